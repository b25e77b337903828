#include "quantize.cuh"

namespace hot {

void quantize_fp32(const QuantizeTask& task) { quantize<float>(task); }

}  // namespace hot
