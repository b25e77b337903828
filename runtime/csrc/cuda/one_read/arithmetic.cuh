// What one read of grad_output computes of each value: samples, scales, the lift of columns,
// rounding.
#pragma once

#include <algorithm>

#include "cuda/common/launch.cuh"
#include "cuda/common/numeric.cuh"
#include "cuda/one_read/one_read.hpp"

namespace hot {

constexpr int kOneReadThreads = 384;  // at most: more columns are spread over a cluster
constexpr int kOneReadBlocksPerSm = 2;
constexpr int kMostCluster = 8;
constexpr float kOneReadTiny = 0x1p-100f;  // one_read.ONE_READ_TINY
constexpr int kMostLift = 8;               // one_read.MOST_LIFT

// Columns that one thread owns: 8 bytes of each row.
template <class T>
constexpr int kOwned = 8 / sizeof(T);

// 8 bytes from `row` on, of which `left` elements exist.
template <class T>
__device__ inline uint2 load_owned(const T* row, int64_t left, bool vectors) {
  if (vectors) return left > 0 ? __ldcs(reinterpret_cast<const uint2*>(row)) : make_uint2(0, 0);
  alignas(8) T v[kOwned<T>];
#pragma unroll
  for (int c = 0; c < kOwned<T>; ++c) v[c] = c < left ? row[c] : static_cast<T>(0.0f);
  return *reinterpret_cast<uint2*>(v);
}

template <class T>
__device__ inline void unpack_owned(uint2 words, float (&v)[kOwned<T>]) {
  unpack(words.x, v, T());
  unpack(words.y, v + Word<T>::kCount, T());
}

// The absmax of each column over the sampled rows.
template <class T>
__global__ void __launch_bounds__(512) sample_kernel(const __grid_constant__ OneReadTask task) {
  __shared__ uint32_t most[kSampleStrip], top;
  constexpr int kLanes = kSampleStrip / kOwned<T>, kRows = 512 / kLanes;
  if (threadIdx.x < kSampleStrip) most[threadIdx.x] = 0;
  if (threadIdx.x == 0) top = 0;
  __syncthreads();
  wait_for_predecessor();
  int lane = threadIdx.x % kLanes;
  int64_t first = static_cast<int64_t>(blockIdx.x) * kSampleStrip,
          column = first + lane * kOwned<T>;
  int64_t count = min(task.rows, kSampledRows);
  float mine[kOwned<T>] = {};
#pragma unroll 8
  for (int64_t i = threadIdx.x / kLanes; i < count; i += kRows) {
    const T* row = static_cast<const T*>(task.g) + i * task.rows / count * task.stride;
    float v[kOwned<T>];
    unpack_owned<T>(load_owned(row + column, task.columns - column, task.vectors), v);
#pragma unroll
    for (int c = 0; c < kOwned<T>; ++c) mine[c] = max_nan(mine[c], fabsf(v[c]));
  }
#pragma unroll
  for (int c = 0; c < kOwned<T>; ++c)
    atomicMax(most + lane * kOwned<T> + c, __float_as_uint(mine[c]));
  __syncthreads();
  if (threadIdx.x < kSampleStrip && first + threadIdx.x < task.columns)
    task.sampled[first + threadIdx.x] = most[threadIdx.x];
  if (threadIdx.x < kSampleStrip) atomicMax(&top, most[threadIdx.x]);
  __syncthreads();
  if (threadIdx.x == 0) task.strip_max[blockIdx.x] = top;
}

__device__ inline int exponent_of(uint32_t bits) { return min(static_cast<int>(bits >> 23), 254); }

// 2^exponent for -126 ... 127.
__device__ inline float power_of_2(int exponent) {
  return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
}

__device__ inline float one_read_scale_of(uint32_t absmax_bits) {
  if (absmax_bits >= 0x7f800000u) return __uint_as_float(0x7fc00000u);
  float absmax = __uint_as_float(absmax_bits);
  return absmax < kOneReadTiny ? 0.0f : __fmul_rn(__fdiv_rn(absmax, 127.0f), 256.0f);
}

__device__ inline float one_read_reciprocal_of(uint32_t absmax_bits) {
  float absmax = __uint_as_float(absmax_bits);
  bool usable = absmax >= kOneReadTiny && absmax_bits < 0x7f800000u;
  return usable ? __fdiv_rn(32512.0f, absmax) : 0.0f;
}

// One unit's rows: i-th of 16, or -1 beyond grad_output.
struct UnitRows {
  uint32_t sample, token, samples, tokens;

  __device__ UnitRows(const OneReadTask& task, uint32_t unit)
      : sample((task.tokens == 1 ? unit : unit / task.tokens) * kOrder),
        token(task.tokens == 1 ? 0 : unit % task.tokens),
        samples(task.samples),
        tokens(task.tokens) {}

  // To the next unit, without dividing.
  __device__ void next() {
    bool wrap = ++token == tokens;
    token = wrap ? 0 : token;
    sample += wrap ? kOrder : 0;
  }

  __device__ bool has(uint32_t i) const { return sample + i < samples; }
  __device__ uint32_t row(uint32_t i) const { return (sample + i) * tokens + token; }
};

// 2^-8 / equal of a thread's columns, applied to the packed words where that is exact (bf16 and
// fp32: what it loses of subnormals is far below any row's step), else to each unpacked value.
template <class T>
struct Lift {
  float by[kOwned<T>];

  __device__ void apply(uint2&) const {}
  // The largest magnitude of one row's words.
  __device__ float largest(uint2 words) const {
    float v[kOwned<T>], most = 0.0f;
    unpack_owned<T>(words, v);
#pragma unroll
    for (int c = 0; c < kOwned<T>; ++c) most = max_nan(most, fabsf(value(v[c], c)));
    return most;
  }
  __device__ float value(float x, int c) const {
    return __fmul_rn(x, c == 0 ? by[0] : c == 1 ? by[1] : c == 2 ? by[2] : by[3]);
  }
};
template <>
struct Lift<float> {
  float by[2];

  __device__ void apply(uint2& words) const {
    words.x = __float_as_uint(__fmul_rn(__uint_as_float(words.x), by[0]));
    words.y = __float_as_uint(__fmul_rn(__uint_as_float(words.y), by[1]));
  }
  __device__ float largest(uint2 words) const {
    return max_nan(fabsf(__uint_as_float(words.x)), fabsf(__uint_as_float(words.y)));
  }
  __device__ float value(float x, int) const { return x; }
};
template <>
struct Lift<__nv_bfloat16> {
  float by[4];

  __device__ static uint32_t product(uint32_t word, float low, float high) {
    __nv_bfloat162 factor = __floats2bfloat162_rn(low, high);
    __nv_bfloat162 x = __hmul2(*reinterpret_cast<__nv_bfloat162*>(&word), factor);
    return *reinterpret_cast<uint32_t*>(&x);
  }
  __device__ void apply(uint2& words) const {
    words.x = product(words.x, by[0], by[1]);
    words.y = product(words.y, by[2], by[3]);
  }
  __device__ float largest(uint2 words) const {
    uint32_t most;  // magnitudes; what signs they get does not matter
#if __CUDA_ARCH__ >= 860
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(words.x), "r"(words.y));
#else
    asm("{\n.reg .b32 a, b;\n"
        "abs.bf16x2 a, %1;\n"
        "abs.bf16x2 b, %2;\n"
        "max.NaN.bf16x2 %0, a, b;\n}"
        : "=r"(most)
        : "r"(words.x), "r"(words.y));
#endif
    float v[2];
    unpack(most, v, __nv_bfloat16());
    return max_nan(fabsf(v[0]), fabsf(v[1]));
  }
  __device__ float value(float x, int) const { return x; }
};

// A quarter of the sum of the rows' absmax, which bounds what HLA keeps: |h| <= sum |g| / 4. In all
// lanes; added as the butterflies at distance 1, 2, 4, 8 add.
__device__ inline uint32_t bound_of_kept(uint32_t most) {
  float sum = __uint_as_float(most);
#pragma unroll
  for (int d = 1; d < kOrder; d *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, d));
  return __float_as_uint(__fmul_rn(__shfl_sync(~0u, sum, 0), 0.25f));
}

}  // namespace hot
