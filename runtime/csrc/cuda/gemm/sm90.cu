#include "cuda/common/variant.hpp"
#include "cuda/gemm/sm90.cuh"

namespace hot {

void HOT_VARIANT(gemm_sm90)(const GemmProblem& p) {
  GemmSm90<HOT_OUT, HOT_M, HOT_N, HOT_SCHEDULE, HOT_EPILOGUE>::run(p);
}

}  // namespace hot
