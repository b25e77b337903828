#include "rows.cuh"

namespace hot {

void quantize_rows_fp16(const QuantizeTask& task) {
  if (rows_in_one_pass(task)) return launch_rows<__half>(task);
  if (task.stochastic) return launch_quantize<__half, true, kNone, true>(task);
  launch_quantize<__half, true, kNone, false>(task);
}

}  // namespace hot
