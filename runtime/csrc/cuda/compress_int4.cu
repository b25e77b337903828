// compress_int4: one tile is one group of 128 rows, so minimum, maximum and packing share one read.
#include "int4.hpp"
#include "launch.cuh"
#include "tile.cuh"

namespace hot {
namespace {

// fp32 rounded to bf16 away from zero where `grow`, else towards zero; NaN stays NaN.
__device__ inline uint16_t bf16_outward(float x, bool up) {
  uint32_t bits = __float_as_uint(x);
  if (isnan(x)) return 0x7fc0;
  bool grow = up ? x > 0.0f : x < 0.0f;
  return static_cast<uint16_t>((bits >> 16) + (grow && (bits & 0xffffu) ? 1 : 0));
}

__device__ inline float from_bf16(uint16_t x) { return __uint_as_float(static_cast<uint32_t>(x) << 16); }

struct Group {
  uint16_t scale, minimum;
  float low, reciprocal;  // reciprocal 0: the group's integers are 0
};

__device__ inline Group group_of(float low, float high) {
  Group group;
  group.minimum = bf16_outward(low, false);
  group.low = from_bf16(group.minimum);
  float width = __fsub_rn(high, group.low);
  bool finite = isfinite(width) && isfinite(group.low);
  bool usable = finite && width >= kTiny;
  group.scale = bf16_outward(usable ? __fdiv_rn(width, 15.0f) : 0.0f, true);
  group.reciprocal = usable ? __fdiv_rn(1.0f, from_bf16(group.scale)) : 0.0f;
  if (!finite) group.minimum = 0x7fc0;
  return group;
}

// What eight nibbles' rounding offsets of 1.5 * 2^23 add up to in the packed word.
constexpr uint32_t kOffsets = 0x4B400000u * 0x11111111u;

// 16 values on the group's grid as 16 nibbles, the first in the lowest.
__device__ inline uint2 pack_nibbles(const float (&v)[kOrder], float low, float reciprocal) {
  uint32_t word[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t packed = 0;
#pragma unroll
    for (int i = 7; i >= 0; --i) {
      float t = __fmul_rn(__fsub_rn(v[8 * half + i], low), reciprocal);
      packed = packed * 16 + __float_as_uint(__fadd_rn(t, 12582912.0f));
    }
    word[half] = packed - kOffsets;
  }
  return make_uint2(word[0], word[1]);
}

template <class T>
struct CompressShared {
  Tile<T> tile;
  float low[kGroups][Tile<T>::kColumns], high[kGroups][Tile<T>::kColumns];
  float reciprocal[Tile<T>::kColumns];
};

template <class T>
__device__ void find_groups(const CompressTask& task, CompressShared<T>& shared, int64_t first,
                            int64_t tile) {
  int64_t column = first + threadIdx.x;
  if (threadIdx.x >= Tile<T>::kColumns) return;
  float low = shared.low[0][threadIdx.x], high = shared.high[0][threadIdx.x];
#pragma unroll
  for (int g = 1; g < kGroups; ++g) {
    low = min_nan(low, shared.low[g][threadIdx.x]);
    high = max_nan(high, shared.high[g][threadIdx.x]);
  }
  Group group = group_of(low, high);
  shared.low[0][threadIdx.x] = group.low;
  shared.reciprocal[threadIdx.x] = group.reciprocal;
  if (column >= task.columns) return;
  int64_t groups = (task.rows + kTileRows - 1) / kTileRows;
  task.scale[column * groups + tile] = group.scale;
  task.minimum[column * groups + tile] = group.minimum;
}

template <class T>
__device__ void keep_extremes(CompressShared<T>& shared, int group, int lane,
                              const float (&v)[Tile<T>::kPerThread][kOrder], int valid) {
#pragma unroll
  for (int c = 0; c < Tile<T>::kPerThread; ++c) {
    float low = INFINITY, high = -INFINITY;
#pragma unroll
    for (int i = 0; i < kOrder; ++i) {
      if (i >= valid) continue;
      low = min_nan(low, v[c][i]);
      high = max_nan(high, v[c][i]);
    }
    shared.low[group][lane * Tile<T>::kPerThread + c] = low;
    shared.high[group][lane * Tile<T>::kPerThread + c] = high;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) compress_int4_kernel(const __grid_constant__ CompressTask task) {
  constexpr int kPer = Tile<T>::kPerThread;
  using Out = Transposed<8, Tile<T>::kColumns>;
  __shared__ CompressShared<T> shared;
  int64_t strips = (task.columns + Tile<T>::kColumns - 1) / Tile<T>::kColumns;
  int64_t tile = blockIdx.x / strips, first = blockIdx.x % strips * Tile<T>::kColumns;
  int lane = threadIdx.x % 32, group = threadIdx.x / 32;
  int64_t left = task.rows - tile * kTileRows - group * kOrder;
  int valid = left >= kOrder ? kOrder : left > 0 ? static_cast<int>(left) : 0;
  shared.tile.find_rows({task.rows, 1, (task.rows + kOrder - 1) / kOrder}, tile * kGroups);
  shared.tile.load(static_cast<const T*>(task.x), task.stride, task.columns, first, task.vectors);
  float v[kPer][kOrder];
  shared.tile.read_columns(group, lane, v);
  keep_extremes<T>(shared, group, lane, v, valid);
  __syncthreads();
  find_groups(task, shared, first, tile);
  __syncthreads();
  Out& out = *reinterpret_cast<Out*>(shared.tile.data);
#pragma unroll
  for (int c = 0; c < kPer; ++c) {
    int column = lane * kPer + c;
    float reciprocal = shared.reciprocal[column];
    uint2 words = pack_nibbles(v[c], shared.low[0][column], reciprocal);
    uint64_t mask = reciprocal == 0.0f ? 0 : valid == kOrder ? ~0ull : (1ull << 4 * valid) - 1;
    words.x &= static_cast<uint32_t>(mask);
    words.y &= static_cast<uint32_t>(mask >> 32);
    *reinterpret_cast<uint2*>(out.chunk(column, group)) = words;
  }
  __syncthreads();
  out.store(task.packed, task.columns, task.packed_length, first, tile * (kTileRows / 2));
}

template <class T>
void launch(const CompressTask& task) {
  int64_t strips = (task.columns + Tile<T>::kColumns - 1) / Tile<T>::kColumns;
  int64_t tiles = (task.rows + kTileRows - 1) / kTileRows;
  compress_int4_kernel<T><<<grid_size(tiles * strips), kThreads, 0, task.stream>>>(task);
  check_launch("compress_int4");
}

}  // namespace

void compress_int4_bf16(const CompressTask& task) { launch<__nv_bfloat16>(task); }
void compress_int4_fp16(const CompressTask& task) { launch<__half>(task); }
void compress_int4_fp32(const CompressTask& task) { launch<float>(task); }

}  // namespace hot
