// Shape -> kernel: a small table from measurements on the H200, no tuning at run time.
#pragma once

#include <cstdint>

#include "cuda/gemm/combine.hpp"
#include "cuda/gemm/gemm.hpp"

namespace hot {

struct GemmShape {
  int64_t m, n, k;
  OutType type;
  bool hopper;
  bool packed;  // INT4 operands, two values a byte
  int sm_count;
};

// Sums and outputs of the Ampere kernels are written in whole vectors of 4.
constexpr int64_t kSm80Vector = 4;

struct GemmPlan {
  GemmKernel kernel;
  bool fused;     // writes the scaled output itself; else int32 sums for combine()
  int64_t slice;  // of K per slab, when not fused
};

GemmPlan plan_gemm(const GemmShape&);

// Of a product whose fp32 result is added to what is there, unless it is the `first`. Throws where
// there is none: not on Hopper, or with sums that int32 cannot hold.
GemmKernel adding_kernel(bool hopper, int64_t k, bool first);

// Of a product with H16 over its columns, or its rows, in the epilogue; `crops` ends in a block.
GemmPlan plan_hadamard(const GemmShape&, bool columns, bool crops);

}  // namespace hot
