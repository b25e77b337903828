#include "cuda/common/variant.hpp"
#include "cuda/quantize/quantize.cuh"

namespace hot {

// Always stochastic, so that the fused form needs half the kernels.
void HOT_VARIANT(quantize_grad)(const QuantizeTask& task) {
  launch_columns<HOT_ELEMENT, true, true>(task);
}

}  // namespace hot
