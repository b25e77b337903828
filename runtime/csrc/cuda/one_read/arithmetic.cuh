// What one read of grad_output computes of its rows, and which rows and columns a thread has.
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

// Columns of a row for each thread of a block, and of a tile's sums.
template <class T>
constexpr int kOwned = 8 / sizeof(T);

__device__ inline float one_read_scale_of(uint32_t absmax_bits) {
  if (absmax_bits >= 0x7f800000u) return __uint_as_float(0x7fc00000u);
  float absmax = __uint_as_float(absmax_bits);
  return absmax < kOneReadTiny ? 0.0f : __fdiv_rn(absmax, 127.0f);
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

// A quarter of the sum of the rows' absmax, which bounds what HLA keeps: |h| <= sum |g| / 4. In all
// lanes; added as the butterflies at distance 1, 2, 4, 8 add.
__device__ inline uint32_t bound_of_kept(uint32_t most) {
  float sum = __uint_as_float(most);
#pragma unroll
  for (int d = 1; d < kOrder; d *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, d));
  return __float_as_uint(__fmul_rn(__shfl_sync(~0u, sum, 0), 0.25f));
}

}  // namespace hot
