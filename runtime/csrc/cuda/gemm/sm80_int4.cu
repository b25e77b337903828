// A file of its own: devices without these instructions must still load the INT8 kernels.
#include "cuda/gemm/sm80.cuh"

namespace hot {

void gemm_sm80_int4_s32(const GemmProblem& p) { SumsSm80<cutlass::int4b_t>::run(p); }
void gemm_sm80_int4_bf16(const GemmProblem& p) {
  ScaledSm80<cutlass::int4b_t, cutlass::bfloat16_t>::run(p);
}
void gemm_sm80_int4_fp16(const GemmProblem& p) {
  ScaledSm80<cutlass::int4b_t, cutlass::half_t>::run(p);
}
void gemm_sm80_int4_fp32(const GemmProblem& p) { ScaledSm80<cutlass::int4b_t, float>::run(p); }

}  // namespace hot
