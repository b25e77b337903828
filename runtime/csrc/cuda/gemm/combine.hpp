// The epilogue of products whose int32 sums are in a workspace: split K, any output alignment.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace hot {

enum class OutType { kBf16, kFp16, kFp32 };

struct CombineTask {
  const int32_t* sums;  // [slabs, m, stride]
  int slabs;
  int64_t m, n, stride, slab;
  const float* a_scale;
  const float* b_scale;
  const float* row_term;  // null: no rank-1 term
  const float* col_term;
  void* out;  // [m, n]
  OutType type;
  cudaStream_t stream;
};

void combine(const CombineTask&);

}  // namespace hot
