#include "rows.cuh"

namespace hot {

void quantize_rows_fp32(const QuantizeTask& task) {
  if (rows_in_one_pass(task)) return launch_rows<float>(task);
  if (task.stochastic) return launch_quantize<float, true, kNone, true>(task);
  launch_quantize<float, true, kNone, false>(task);
}

}  // namespace hot
