#include "quantize.cuh"

namespace hot {

// Always stochastic, so that the fused form needs half the kernels.
void quantize_grad_bf16(const QuantizeTask& task) {
  launch_columns<__nv_bfloat16, true, true>(task);
}

}  // namespace hot
