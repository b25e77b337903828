#include "quantize.cuh"

namespace hot {

// Always stochastic, so that the fused form needs half the kernels.
void quantize_grad_fp32(const QuantizeTask& task) { launch_columns<float, true, true>(task); }

}  // namespace hot
