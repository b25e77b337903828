// Torch-free interface between scaled_int_mm and its CUTLASS kernels, so that each slow-to-compile
// kernel is a .cu of its own and compiles in parallel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/common/stream.hpp"

namespace hot {

// out = a b^T with a [m, k], b [n, k] int8 or packed INT4 (int4_*), k contiguous; lda and ldb count
// elements. Fused kernels multiply by a_scale[m] * b_scale[n] and add row_term[m] * col_term[n]
// (null: no such term), those named rows or columns transform instead; int32 kernels write the
// sums. batch > 1 cuts the contracted dimension: slice s starts s * k further, its sums go to slab
// s.
struct GemmProblem {
  const int8_t* a;
  const int8_t* b;
  void* out;
  const float* a_scale;
  const float* b_scale;
  const float* row_term;
  const float* col_term;
  int m, n, k, batch;
  int64_t lda, ldb, ldo;
  int64_t slab;
  int device, sm_count;
  Stream stream;
};

// Throws std::runtime_error with CUTLASS's or CUDA's reason.
using GemmKernel = void (*)(const GemmProblem&);

#define HOT_GEMM_SM90(name) void gemm_sm90_##name(const GemmProblem&)
HOT_GEMM_SM90(bf16_128x128);
HOT_GEMM_SM90(bf16_128x256);
HOT_GEMM_SM90(fp16_128x128);
HOT_GEMM_SM90(fp32_128x128);
HOT_GEMM_SM90(add_fp32_128x128);
HOT_GEMM_SM90(s32_128x128);
HOT_GEMM_SM90(bf16_128x192);
HOT_GEMM_SM90(bf16_64x128);
HOT_GEMM_SM90(rows_bf16_128x128);
HOT_GEMM_SM90(rows_bf16_128x192);
HOT_GEMM_SM90(columns_bf16_128x128);
#undef HOT_GEMM_SM90

#define HOT_GEMM_SM80(name) void gemm_sm80_##name(const GemmProblem&)
HOT_GEMM_SM80(s32);
HOT_GEMM_SM80(bf16);
HOT_GEMM_SM80(fp16);
HOT_GEMM_SM80(fp32);
HOT_GEMM_SM80(int4_s32);
HOT_GEMM_SM80(int4_bf16);
HOT_GEMM_SM80(int4_fp16);
HOT_GEMM_SM80(int4_fp32);
#undef HOT_GEMM_SM80

}  // namespace hot
