#include "gemm_sm90.cuh"

namespace hot {

void gemm_sm90_fp16_128x128(const GemmProblem& p) {
  GemmSm90<cutlass::half_t, 128, 128, Pingpong>::run(p);
}

}  // namespace hot
