#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/common/launch.cuh"
#include "cuda/gemm/combine.hpp"

namespace hot {
namespace {

constexpr int kThreads = 256;

__device__ inline void put(float x, __nv_bfloat16* out) { *out = __float2bfloat16_rn(x); }
__device__ inline void put(float x, __half* out) { *out = __float2half_rn(x); }
__device__ inline void put(float x, float* out) { *out = x; }

// The exact sum over slabs: 64 bits, since K may be longer than int32 sums can hold. The stride is
// padded to whole vectors, but nobody wrote the pad.
__device__ inline void add_slabs(const CombineTask& task, int64_t at, int64_t (&sum)[4],
                                 int count) {
  for (int s = 0; s < task.slabs; ++s) {
    const int32_t* source = task.sums + s * task.slab + at;
    int4 v = make_int4(source[0], 0, 0, 0);
    if (count == 4) {
      v = *reinterpret_cast<const int4*>(source);
    } else {
      if (count > 1) v.y = source[1];
      if (count > 2) v.z = source[2];
    }
    sum[0] += v.x;
    sum[1] += v.y;
    sum[2] += v.z;
    sum[3] += v.w;
  }
}

template <class Out>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ CombineTask task) {
  int64_t vectors = task.stride / 4;
  int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= task.m * vectors) return;
  int64_t row = i / vectors, column = i % vectors * 4;
  int count = static_cast<int>(min(task.n - column, int64_t{4}));
  int64_t sum[4] = {0, 0, 0, 0};
  add_slabs(task, row * task.stride + column, sum, count);
  float a = task.a_scale[row], term = task.row_term ? task.row_term[row] : 0.0f;
  alignas(16) Out packed[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j >= count) break;
    float x = __fmul_rn(__fmul_rn(static_cast<float>(sum[j]), a), task.b_scale[column + j]);
    if (task.row_term) x = __fadd_rn(x, __fmul_rn(term, task.col_term[column + j]));
    put(x, packed + j);
  }
  Out* out = static_cast<Out*>(task.out) + row * task.n + column;
  if (task.n % 4 == 0) {
    using Vector = std::conditional_t<sizeof(Out) == 2, uint2, uint4>;
    *reinterpret_cast<Vector*>(out) = *reinterpret_cast<Vector*>(packed);
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j)
    if (j < count) out[j] = packed[j];
}

}  // namespace

void combine(const CombineTask& task) {
  int64_t vectors = task.m * (task.stride / 4);
  unsigned blocks = grid_size((vectors + kThreads - 1) / kThreads);
  if (blocks == 0) return;
  if (task.type == OutType::kBf16)
    combine_kernel<__nv_bfloat16><<<blocks, kThreads, 0, task.stream>>>(task);
  else if (task.type == OutType::kFp16)
    combine_kernel<__half><<<blocks, kThreads, 0, task.stream>>>(task);
  else
    combine_kernel<float><<<blocks, kThreads, 0, task.stream>>>(task);
  check_launch("combine");
}

}  // namespace hot
