#include "quantize.cuh"

namespace hot {

void quantize_columns_fp32(const QuantizeTask& task) {
  if (task.stochastic) return launch_columns<float, false, true>(task);
  launch_columns<float, false, false>(task);
}

}  // namespace hot
