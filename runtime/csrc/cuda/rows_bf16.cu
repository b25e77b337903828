#include "rows.cuh"

namespace hot {

void quantize_rows_bf16(const QuantizeTask& task) {
  if (rows_in_one_pass(task)) return launch_rows<__nv_bfloat16>(task);
  if (task.stochastic) return launch_quantize<__nv_bfloat16, true, kNone, true>(task);
  launch_quantize<__nv_bfloat16, true, kNone, false>(task);
}

}  // namespace hot
