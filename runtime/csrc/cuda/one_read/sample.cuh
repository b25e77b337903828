// How large parts of grad_output are, from a sample of its rows: one_read._sampled_exponents.
#pragma once

#include "cuda/one_read/arithmetic.cuh"

namespace hot {

constexpr int64_t kSampledRows = 512;            // one_read.SAMPLED_ROWS
constexpr int kMostLift = 6, kMostHalvings = 6;  // one_read.MOST_LIFT, .MOST_HALVINGS
constexpr int kSampleThreads = 256;

__device__ inline int exponent_of(uint32_t bits) { return min(static_cast<int>(bits >> 23), 254); }

// 2^exponent for -126 ... 127.
__device__ inline float power_of_2(int exponent) {
  return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
}

// The n-th of `count` sampled rows.
__device__ inline int64_t sampled_row(int64_t n, int64_t count, int64_t rows) {
  int64_t start = n * rows / count, end = (n + 1) * rows / count;
  return start + (static_cast<uint32_t>(n) * kMixHash >> 8) % (end - start);
}

// A block has a part and a slice of the rows, a warp a row at a time.
template <class T>
__global__ void __launch_bounds__(kSampleThreads)
    sample_kernel(const __grid_constant__ OneReadTask task) {
  __shared__ uint32_t most;
  if (threadIdx.x == 0) most = 0;
  __syncthreads();
  wait_for_predecessor();
  int64_t blocks = (task.columns + kOrder - 1) / kOrder, part = blockIdx.x;
  int64_t first = (part * blocks + kEqualParts - 1) / kEqualParts * kOrder;
  int64_t end = min(((part + 1) * blocks + kEqualParts - 1) / kEqualParts * kOrder, task.columns);
  int64_t count = min(task.rows, kSampledRows);
  constexpr int kStep = kSampleThreads / 32 * kPartSlices;
  uint32_t mine = 0;
#pragma unroll 4
  for (int64_t n = blockIdx.y + threadIdx.x / 32 * kPartSlices; n < count; n += kStep) {
    const T* row = static_cast<const T*>(task.g) + sampled_row(n, count, task.rows) * task.stride;
    for (int64_t c = first + threadIdx.x % 32; c < end; c += 32)
      mine = max(mine, __float_as_uint(fabsf(static_cast<float>(row[c]))));
  }
  mine = __reduce_max_sync(~0u, mine);
  if (threadIdx.x % 32 == 0) atomicMax(&most, mine);
  __syncthreads();
  if (threadIdx.x == 0) task.sampled[part * kPartSlices + blockIdx.y] = most;
}

// The parts' exponents, and the largest, for all threads of a block.
struct Sampled {
  int of_part[kEqualParts], top;

  __device__ void find(const OneReadTask& task) {
    for (int i = threadIdx.x; i < kEqualParts; i += blockDim.x) of_part[i] = 0;
    if (threadIdx.x == 0) top = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < kEqualParts * kPartSlices; i += blockDim.x) {
      int exponent = exponent_of(task.sampled[i]);
      atomicMax(of_part + i / kPartSlices, exponent);
      atomicMax(&top, exponent);
    }
    __syncthreads();
  }

  // By what exponent the block of 16 columns from `column` on is lifted.
  __device__ int lift(const OneReadTask& task, int64_t column) const {
    if (!task.fused || column >= task.columns) return 0;
    int64_t blocks = (task.columns + kOrder - 1) / kOrder;
    int own = of_part[column / kOrder * kEqualParts / blocks];
    return own == 0 ? 0 : min(max(top - own - 1, 0), kMostLift);
  }

  // By how many bits g_w's integers of a row are shorter, from the bits of its absmax.
  __device__ int halvings(uint32_t absmax) const {
    return min(max((top - exponent_of(absmax) - 2) >> 1, 0), kMostHalvings);
  }
};

}  // namespace hot
