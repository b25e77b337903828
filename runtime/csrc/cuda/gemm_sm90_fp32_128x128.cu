#include "gemm_sm90.cuh"

namespace hot {

void gemm_sm90_fp32_128x128(const GemmProblem& p) { GemmSm90<float, 128, 128, Pingpong>::run(p); }

}  // namespace hot
