#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/common/launch.cuh"
#include "cuda/common/numeric.cuh"
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

// The first `count` of 4 values, which are aligned where rows are whole vectors.
template <class Out>
__device__ inline void write_four(Out* out, const Out* packed, int count, bool vectors) {
  if (vectors) {
    using Vector = std::conditional_t<sizeof(Out) == 2, uint2, uint4>;
    *reinterpret_cast<Vector*>(out) = *reinterpret_cast<const Vector*>(packed);
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j)
    if (j < count) out[j] = packed[j];
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
  write_four(out, packed, count, task.n % 4 == 0);
}

// A thread has 16 outputs of one input: rows of sums.
template <class Out>
__global__ void __launch_bounds__(kThreads)
    rows_kernel(const __grid_constant__ CombineTask task, int64_t outputs) {
  int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= task.m / kOrder * task.n) return;
  int64_t first = i / task.n * kOrder, column = i % task.n;
  int64_t sum[kOrder] = {};
  for (int s = 0; s < task.slabs; ++s) {
    const int32_t* source = task.sums + s * task.slab + first * task.stride + column;
#pragma unroll
    for (int r = 0; r < kOrder; ++r) sum[r] += source[r * task.stride];
  }
  float v[kOrder], scale = __fmul_rn(task.a_scale[first], task.b_scale[column]);
#pragma unroll
  for (int r = 0; r < kOrder; ++r) v[r] = __fmul_rn(static_cast<float>(sum[r]), scale);
  hadamard_times_4(v);
  Out* out = static_cast<Out*>(task.out) + first * task.n + column;
#pragma unroll
  for (int r = 0; r < kOrder; ++r)
    if (first + r < outputs) put(__fmul_rn(v[r], 0.25f), out + r * task.n);
}

// A thread has 16 outputs of one input: columns of sums.
template <class Out>
__global__ void __launch_bounds__(kThreads)
    columns_kernel(const __grid_constant__ CombineTask task, int64_t outputs) {
  int64_t blocks = task.n / kOrder;
  int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= task.m * blocks) return;
  int64_t row = i / blocks, first = i % blocks * kOrder;
  float v[kOrder], scale = __fmul_rn(task.a_scale[row], task.b_scale[first]);
#pragma unroll
  for (int c = 0; c < kOrder; c += 4) {
    int64_t sum[4] = {0, 0, 0, 0};
    add_slabs(task, row * task.stride + first + c, sum, 4);
#pragma unroll
    for (int j = 0; j < 4; ++j) v[c + j] = __fmul_rn(static_cast<float>(sum[j]), scale);
  }
  hadamard_times_4(v);
  Out* out = static_cast<Out*>(task.out) + row * outputs + first;
#pragma unroll
  for (int c = 0; c < kOrder; c += 4) {
    if (first + c >= outputs) break;
    alignas(16) Out packed[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) put(__fmul_rn(v[c + j], 0.25f), packed + j);
    int count = static_cast<int>(min(outputs - first - c, int64_t{4}));
    write_four(out + c, packed, count, outputs % 4 == 0);
  }
}

template <class Out>
void launch_transformed(const CombineTask& task, int64_t outputs, bool outputs_last) {
  int64_t work = task.m * task.n / kOrder;
  unsigned blocks = grid_size((work + kThreads - 1) / kThreads);
  if (blocks == 0) return;
  if (outputs_last)
    columns_kernel<Out><<<blocks, kThreads, 0, task.stream>>>(task, outputs);
  else
    rows_kernel<Out><<<blocks, kThreads, 0, task.stream>>>(task, outputs);
}

}  // namespace

void combine_transformed(const CombineTask& task, int64_t outputs, bool outputs_last) {
  if (task.type == OutType::kBf16)
    launch_transformed<__nv_bfloat16>(task, outputs, outputs_last);
  else if (task.type == OutType::kFp16)
    launch_transformed<__half>(task, outputs, outputs_last);
  else
    launch_transformed<float>(task, outputs, outputs_last);
  check_launch("combine_transformed");
}

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
