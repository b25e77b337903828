#include "gemm_sm90.cuh"

namespace hot {

void gemm_sm90_bf16_128x256(const GemmProblem& p) {
  GemmSm90<cutlass::bfloat16_t, 128, 256, Cooperative>::run(p);
}

}  // namespace hot
