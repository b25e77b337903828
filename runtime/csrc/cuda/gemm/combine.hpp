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
  void* out;  // [m, n]; [outputs, n] or [m, outputs] of combine_transformed
  OutType type;
  cudaStream_t stream;
};

void combine(const CombineTask&);

// The same without terms, and with the inverse transform over 16 of the outputs: those are sums'
// columns (`outputs_last`) or their rows, of one scale in 16.
void combine_transformed(const CombineTask&, int64_t outputs, bool outputs_last);

}  // namespace hot
