#include "weight.cuh"

namespace hot {

void quantize_weight_bf16(const WeightTask& task) { launch_weight<__nv_bfloat16>(task); }
void quantize_weight_fp16(const WeightTask& task) { launch_weight<__half>(task); }
void quantize_weight_fp32(const WeightTask& task) { launch_weight<float>(task); }

}  // namespace hot
