#include "quantize.cuh"

namespace hot {

// Always stochastic, so that the fused form needs half the kernels.
void quantize_grad_fp16(const QuantizeTask& task) { launch_columns<__half, true, true>(task); }

}  // namespace hot
