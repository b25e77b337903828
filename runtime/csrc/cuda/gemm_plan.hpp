// Shape -> kernel: a small table from measurements on the H200, no tuning at run time.
#pragma once

#include <cstdint>

#include "combine.hpp"
#include "gemm.hpp"

namespace hot {

struct GemmShape {
  int64_t m, n, k;
  OutType type;
  bool hopper;
  int sm_count;
};

struct GemmPlan {
  GemmKernel kernel;
  bool fused;     // writes the scaled output itself; else int32 sums for combine()
  int64_t slice;  // of K per slab, when not fused
};

GemmPlan plan_gemm(const GemmShape&);

}  // namespace hot
