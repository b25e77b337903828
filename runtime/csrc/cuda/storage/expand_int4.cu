// expand_int4: one block per column. A group's 16 levels become 16 bytes in shared memory, and a
// byte permute looks four nibbles up at once.
#include "cuda/common/bf16.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/numeric.cuh"
#include "cuda/storage/storage.hpp"

namespace hot {
namespace {

constexpr int kThreads = 256;
constexpr int kGroupsAtOnce = 512;  // whose levels are in shared memory
constexpr int kPerGroup = 8;        // 128 nibbles are eight reads of 8 bytes
constexpr int kUnroll = 4;          // reads in flight per thread

struct ColumnGrid {
  float scale, reciprocal, zero;
};

__device__ inline ColumnGrid column_grid(float low, float high) {
  ColumnGrid grid = {0.0f, 0.0f, __fmul_rn(__fadd_rn(low, high), 0.5f)};
  float width = __fsub_rn(high, low);
  if (width >= kTiny && width < INFINITY) {
    grid.scale = __fdiv_rn(width, 254.0f);
    grid.reciprocal = __fdiv_rn(254.0f, width);
  } else if (!(width < kTiny)) {
    grid.scale = __uint_as_float(0x7fc00000u);
  }
  return grid;
}

__device__ inline float highest(float scale, float low) {
  return __fadd_rn(__fmul_rn(15.0f, scale), low);
}

// The column's range over all its groups, NaN if any is NaN; the same in every thread.
__device__ ColumnGrid find_grid(const ExpandTask& task, int64_t column) {
  __shared__ float lows[kThreads / 32], highs[kThreads / 32];
  float low = INFINITY, high = -INFINITY;
  for (int64_t g = threadIdx.x; g < task.groups; g += kThreads) {
    float least = from_bf16(task.minimum[column * task.groups + g]);
    low = min_nan(low, least);
    high = max_nan(high, highest(from_bf16(task.scale[column * task.groups + g]), least));
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) {
    low = min_nan(low, __shfl_xor_sync(~0u, low, d));
    high = max_nan(high, __shfl_xor_sync(~0u, high, d));
  }
  if (threadIdx.x % 32 == 0) {
    lows[threadIdx.x / 32] = low;
    highs[threadIdx.x / 32] = high;
  }
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) {
    low = min_nan(low, lows[w]);
    high = max_nan(high, highs[w]);
  }
  return column_grid(low, high);
}

// Bytes of levels 4 * quarter ... 4 * quarter + 3 of a group on the column's grid.
__device__ inline uint32_t levels(int quarter, float step, float low, const ColumnGrid& grid) {
  uint32_t q[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float level = static_cast<float>(4 * quarter + i);
    float value = __fsub_rn(__fadd_rn(__fmul_rn(level, step), low), grid.zero);
    float t = fminf(fmaxf(__fmul_rn(value, grid.reciprocal), -127.0f), 127.0f);
    q[i] = __float_as_uint(__fadd_rn(t, 12582912.0f));
  }
  return grid.reciprocal == 0.0f ? 0 : low_bytes(q[0], q[1], q[2], q[3]);
}

// Four bytes for the four nibbles in the low half of `nibbles`: look up both halves of the table,
// then choose between them by each nibble's top bit.
__device__ inline uint32_t look_up(uint32_t nibbles, const uint32_t (&table)[4]) {
  uint32_t low = __byte_perm(table[0], table[1], nibbles & 0x7777);
  uint32_t high = __byte_perm(table[2], table[3], nibbles & 0x7777);
  return __byte_perm(low, high, (nibbles >> 1 & 0x4444) | 0x3210);
}

__device__ inline uint4 look_up_16(uint2 nibbles, const uint32_t (&table)[4]) {
  return make_uint4(look_up(nibbles.x, table), look_up(nibbles.x >> 16, table),
                    look_up(nibbles.y, table), look_up(nibbles.y >> 16, table));
}

// Levels of groups `first` ... of the column, four bytes per thread and step.
__device__ void fill_table(const ExpandTask& task, int64_t column, int64_t first, int groups,
                           const ColumnGrid& grid, uint4 (&table)[kGroupsAtOnce]) {
  for (int i = threadIdx.x; i < groups * 4; i += kThreads) {
    int64_t at = column * task.groups + first + i / 4;
    uint32_t bytes = levels(i % 4, from_bf16(task.scale[at]), from_bf16(task.minimum[at]), grid);
    reinterpret_cast<uint32_t*>(table)[i] = bytes;
  }
}

__global__ void __launch_bounds__(kThreads)
    expand_int4_kernel(const __grid_constant__ ExpandTask task) {
  __shared__ uint4 tables[kGroupsAtOnce];
  int64_t column = blockIdx.x, reads = task.packed_length / 8;
  const uint2* packed = reinterpret_cast<const uint2*>(task.packed + column * task.packed_length);
  uint4* q = reinterpret_cast<uint4*>(task.q + column * task.packed_length * 2);
  ColumnGrid grid = find_grid(task, column);
  if (threadIdx.x == 0) {
    task.column_scale[column] = grid.scale;
    task.zero[column] = grid.zero;
  }
  for (int64_t first = 0; first < task.groups; first += kGroupsAtOnce) {
    int groups = static_cast<int>(min(task.groups - first, int64_t{kGroupsAtOnce}));
    fill_table(task, column, first, groups, grid, tables);
    __syncthreads();
    int count = static_cast<int>(min(reads - first * kPerGroup, int64_t{groups * kPerGroup}));
    for (int start = threadIdx.x; start < count; start += kUnroll * kThreads) {
      uint2 in[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (start + u * kThreads < count)
          in[u] = __ldcs(packed + first * kPerGroup + start + u * kThreads);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        int i = start + u * kThreads;
        if (i >= count) break;
        uint4 table = tables[i / kPerGroup];
        q[first * kPerGroup + i] = look_up_16(in[u], {table.x, table.y, table.z, table.w});
      }
    }
    __syncthreads();
  }
}

}  // namespace

void expand_int4(const ExpandTask& task) {
  expand_int4_kernel<<<grid_size(task.columns), kThreads, 0, task.stream>>>(task);
  check_launch("expand_int4");
}

}  // namespace hot
