#include "cuda/gemm/sm80.cuh"

namespace hot {

void gemm_sm80_s32(const GemmProblem& p) { SumsSm80<int8_t>::run(p); }
void gemm_sm80_bf16(const GemmProblem& p) { ScaledSm80<int8_t, cutlass::bfloat16_t>::run(p); }
void gemm_sm80_fp16(const GemmProblem& p) { ScaledSm80<int8_t, cutlass::half_t>::run(p); }
void gemm_sm80_fp32(const GemmProblem& p) { ScaledSm80<int8_t, float>::run(p); }

}  // namespace hot
