#include "gemm_sm90.cuh"

namespace hot {

void gemm_sm90_bf16_64x128(const GemmProblem& p) {
  GemmSm90<cutlass::bfloat16_t, 64, 128, Pingpong>::run(p);
}

}  // namespace hot
