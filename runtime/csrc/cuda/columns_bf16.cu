#include "quantize.cuh"

namespace hot {

void quantize_columns_bf16(const QuantizeTask& task) {
  if (task.stochastic) return launch_columns<__nv_bfloat16, false, true>(task);
  launch_columns<__nv_bfloat16, false, false>(task);
}

}  // namespace hot
