// compress_int4: one tile is one group of 128 rows, so minimum, maximum and packing share one read.
#include "cuda/common/bf16.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/tile.cuh"
#include "cuda/storage/storage.hpp"

namespace hot {
namespace {

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
      float t = __fmaf_rn(__fsub_rn(v[8 * half + i], low), reciprocal, 12582912.0f);
      packed = packed * 16 + __float_as_uint(t);
    }
    word[half] = packed - kOffsets;
  }
  return make_uint2(word[0], word[1]);
}

template <class T>
struct CompressShared {
  Tile<T> tile;
  float low[kGroups][Tile<T>::kColumns], high[kGroups][Tile<T>::kColumns];
  float minimum[Tile<T>::kColumns], reciprocal[Tile<T>::kColumns];
};

// One thread per column: the group's grid from the extremes of its 8 parts.
template <class T>
__device__ void find_groups(const CompressTask& task, CompressShared<T>& shared, int64_t first,
                            int64_t tile) {
  int i = threadIdx.x;
  if (i >= Tile<T>::kColumns) return;
  float low = shared.low[0][i], high = shared.high[0][i];
#pragma unroll
  for (int g = 1; g < kGroups; ++g) {
    low = min_nan(low, shared.low[g][i]);
    high = max_nan(high, shared.high[g][i]);
  }
  Group group = group_of(low, high);
  shared.minimum[i] = group.low;
  shared.reciprocal[i] = group.reciprocal;
  int64_t column = first + Tile<T>::column_at(i);
  if (column >= task.columns) return;
  int64_t groups = (task.rows + kTileRows - 1) / kTileRows;
  task.scale[column * groups + tile] = group.scale;
  task.minimum[column * groups + tile] = group.minimum;
}

template <class T>
__device__ void keep_extremes(CompressShared<T>& shared, int group, int lane, int valid) {
  constexpr int kCount = Word<T>::kCount;
  constexpr uint32_t kMost = Infinity<T>::kWord, kLeast = kMost | Infinity<T>::kSigns;
  uint2 low = make_uint2(kMost, kMost), high = make_uint2(kLeast, kLeast);
  auto take = [&](int i) {
    uint2 words = shared.tile.read_words(group, lane, i);
    low.x = min_words(low.x, words.x, T()), low.y = min_words(low.y, words.y, T());
    high.x = max_words(high.x, words.x, T()), high.y = max_words(high.y, words.y, T());
  };
  if (valid == kOrder) {
#pragma unroll
    for (int i = 0; i < kOrder; ++i) take(i);
  } else {
#pragma unroll 1
    for (int i = 0; i < valid; ++i) take(i);
  }
  float lows[2 * kCount], highs[2 * kCount];
  unpack(low.x, lows, T());
  unpack(low.y, lows + kCount, T());
  unpack(high.x, highs, T());
  unpack(high.y, highs + kCount, T());
#pragma unroll
  for (int c = 0; c < Tile<T>::kPerThread; ++c) {
    shared.low[group][c * 32 + lane] = lows[c];
    shared.high[group][c * 32 + lane] = highs[c];
  }
}

template <class T>
__device__ void pack(CompressShared<T>& shared, int group, int lane, int valid) {
  constexpr int kPer = Tile<T>::kPerThread;
  using Out = Transposed<8, Tile<T>::kColumns>;
  Out& out = *reinterpret_cast<Out*>(shared.tile.data);  // its values are in registers by then
  uint64_t keep = valid == kOrder ? ~0ull : (1ull << 4 * valid) - 1;
  float v[kPer][kOrder];
  shared.tile.read_columns(group, lane, v);
  __syncthreads();
#pragma unroll
  for (int c = 0; c < kPer; ++c) {
    float reciprocal = shared.reciprocal[c * 32 + lane];
    uint2 words = pack_nibbles(v[c], shared.minimum[c * 32 + lane], reciprocal);
    uint64_t mask = reciprocal == 0.0f ? 0 : keep;
    words.x &= static_cast<uint32_t>(mask);
    words.y &= static_cast<uint32_t>(mask >> 32);
    *reinterpret_cast<uint2*>(out.chunk(lane * kPer + c, group)) = words;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 4)
    compress_int4_kernel(const __grid_constant__ CompressTask task) {
  __shared__ CompressShared<T> shared;
  wait_for_predecessor();
  uint32_t tile = tile_index(), rows = static_cast<uint32_t>(task.rows);
  if (int64_t{tile} * kTileRows >= task.rows) return;
  int64_t first = static_cast<int64_t>(blockIdx.x) * Tile<T>::kColumns;
  int lane = threadIdx.x % 32, group = threadIdx.x / 32;
  int left = static_cast<int>(min(task.rows - int64_t{tile} * kTileRows, int64_t{kTileRows})) -
             group * kOrder;
  int valid = min(max(left, 0), kOrder);
  Matrix x = {
      task.x,       rows,         rows,    1,    static_cast<uint32_t>(task.stride * sizeof(T)),
      task.columns, task.vectors, nullptr, false};
  shared.tile.start(x, tile * kGroups, first);
  shared.tile.wait();
  __syncthreads();
  keep_extremes<T>(shared, group, lane, valid);
  __syncthreads();
  find_groups(task, shared, first, tile);
  __syncthreads();
  pack<T>(shared, group, lane, valid);
  __syncthreads();
  using Out = Transposed<8, Tile<T>::kColumns>;
  reinterpret_cast<Out*>(shared.tile.data)
      ->store(task.packed, static_cast<uint32_t>(task.columns),
              static_cast<uint32_t>(task.packed_length), static_cast<uint32_t>(first),
              tile * (kTileRows / 2));
}

template <class T>
void launch(const CompressTask& task) {
  int64_t strips = (task.columns + Tile<T>::kColumns - 1) / Tile<T>::kColumns;
  int64_t tiles = (task.rows + kTileRows - 1) / kTileRows;
  queue_kernel("compress_int4", compress_int4_kernel<T>, {strips_by_tiles(strips, tiles), kThreads},
               task.stream, task);
}

}  // namespace

void compress_int4_bf16(const CompressTask& task) { launch<__nv_bfloat16>(task); }
void compress_int4_fp16(const CompressTask& task) { launch<__half>(task); }
void compress_int4_fp32(const CompressTask& task) { launch<float>(task); }

}  // namespace hot
