#include "quantize.cuh"

namespace hot {

void quantize_columns_fp16(const QuantizeTask& task) {
  if (task.stochastic) return launch_columns<__half, false, true>(task);
  launch_columns<__half, false, false>(task);
}

}  // namespace hot
