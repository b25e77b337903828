#include "quantize.cuh"

namespace hot {

void quantize_bf16(const QuantizeTask& task) { quantize<__nv_bfloat16>(task); }

}  // namespace hot
