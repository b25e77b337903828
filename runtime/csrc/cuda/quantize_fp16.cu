#include "quantize.cuh"

namespace hot {

void quantize_fp16(const QuantizeTask& task) { quantize<__half>(task); }

}  // namespace hot
