#include "cuda/common/variant.hpp"
#include "cuda/quantize/quantize.cuh"

namespace hot {

void HOT_VARIANT(quantize_columns)(const QuantizeTask& task) {
  if (task.stochastic) return launch_columns<HOT_ELEMENT, false, true>(task);
  launch_columns<HOT_ELEMENT, false, false>(task);
}

}  // namespace hot
