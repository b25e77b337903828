// Two passes over x, both for any mix of row and column forms: absmax, then quantise. A column's
// scale needs the whole column before its first integer, so x is read twice; the second pass runs
// backwards to meet what the first left in L2.
#pragma once

#include "launch.cuh"
#include "quantize.hpp"
#include "tile.cuh"

namespace hot {

enum Columns { kNone = -2, kAnyRank = -1, kPlain = 0, kLowPass8 = 8, kFull = 16 };

template <int kColumnsMode>
__device__ inline uint32_t kept_mask(int rank) {
  return kColumnsMode == kAnyRank ? low_pass_mask(rank) : low_pass_mask(kColumnsMode);
}

struct Place {
  int64_t tile, strip;
};

template <class T>
__device__ inline Place place_of(const QuantizeTask& task, int64_t block) {
  int64_t strips = (task.columns + Tile<T>::kColumns - 1) / Tile<T>::kColumns;
  return {block / strips, block % strips};
}

template <class T>
__device__ void rows_absmax(const QuantizeTask& task, const Tile<T>& tile) {
  constexpr int kBlocks = Tile<T>::kColumns / kOrder;
#pragma unroll
  for (int item = threadIdx.x; item < kTileRows * kBlocks; item += kThreads) {
    int r = item / kBlocks, block = item % kBlocks;
    float v[kOrder];
    tile.read_row(r, block, block & 4, v);
    hadamard_times_4(v);
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < kOrder; ++i) most = max_nan(most, fabsf(v[i]));
#pragma unroll
    for (int d = 1; d < kBlocks; d *= 2) most = max_nan(most, __shfl_xor_sync(~0u, most, d));
    if (block == 0 && tile.row[r] >= 0)
      atomicMax(task.row_absmax + (task.per_row ? tile.row[r] : 0),
                __float_as_uint(__fmul_rn(most, 0.25f)));
  }
}

// absmax of what is kept of one column of a group.
template <int kColumnsMode>
__device__ inline float column_absmax(float (&v)[kOrder], uint32_t kept) {
  float most = 0.0f;
  if (kColumnsMode != kPlain) hadamard_times_4(v);
#pragma unroll
  for (int n = 0; n < kOrder; ++n)
    if (kColumnsMode == kPlain || (kept >> n & 1)) most = max_nan(most, fabsf(v[n]));
  return kColumnsMode == kPlain ? most : __fmul_rn(most, 0.25f);
}

template <class T, int kColumnsMode>
__device__ void columns_absmax(const QuantizeTask& task, const Tile<T>& tile, int64_t first) {
  constexpr int kPer = Tile<T>::kPerThread;
  __shared__ uint32_t most[Tile<T>::kColumns];
  if (threadIdx.x < Tile<T>::kColumns) most[threadIdx.x] = 0;
  __syncthreads();
  int lane = threadIdx.x % 32;
  uint32_t kept = kept_mask<kColumnsMode>(task.rank);
  float v[kPer][kOrder];
  tile.read_columns(threadIdx.x / 32, lane, v);
#pragma unroll
  for (int c = 0; c < kPer; ++c)
    atomicMax(most + lane * kPer + c, __float_as_uint(column_absmax<kColumnsMode>(v[c], kept)));
  __syncthreads();
  int64_t column = first + threadIdx.x;
  if (threadIdx.x < Tile<T>::kColumns && column < task.columns)
    atomicMax(task.column_absmax + (task.per_column ? column : 0), most[threadIdx.x]);
}

template <class T, bool kRows, int kColumnsMode>
__global__ void __launch_bounds__(kThreads) absmax_kernel(const __grid_constant__ QuantizeTask task) {
  __shared__ Tile<T> tile;
  Place place = place_of<T>(task, blockIdx.x);
  int64_t first = place.strip * Tile<T>::kColumns;
  tile.find_rows({task.rows, task.tokens, task.blocks}, place.tile * kGroups);
  tile.load(static_cast<const T*>(task.x), task.stride, task.columns, first, task.vectors);
  if (kRows) rows_absmax(task, tile);
  if constexpr (kColumnsMode != kNone) columns_absmax<T, kColumnsMode>(task, tile, first);
}

// The reciprocals a tile needs, and the scales it is the one to write.
template <class T>
struct Reciprocals {
  float row[kTileRows];
  float column[Tile<T>::kColumns];
  int32_t sum[Tile<T>::kColumns];

  __device__ void find_row(const QuantizeTask& task, const Tile<T>& tile, bool write) {
    int64_t r = threadIdx.x < kTileRows ? tile.row[threadIdx.x] : -1;
    if (r < 0) return;
    Grid grid = grid_of(task.row_absmax[task.per_row ? r : 0], task.row_qmax);
    row[threadIdx.x] = grid.reciprocal;
    if (write) task.row_scale[r] = grid.scale;
  }

  __device__ void find_column(const QuantizeTask& task, int64_t first, bool write) {
    int i = static_cast<int>(threadIdx.x) - kTileRows;
    if (i < 0 || i >= Tile<T>::kColumns) return;
    sum[i] = 0;
    column[i] = 0.0f;
    if (first + i >= task.columns) return;
    Grid grid = grid_of(task.column_absmax[task.per_column ? first + i : 0], task.column_qmax);
    column[i] = grid.reciprocal;
    if (write) task.column_scale[first + i] = grid.scale;
  }
};

// Bytes of four transformed values; `quarter` is 1 when reciprocal already holds the factor 1/4.
template <bool kStochastic>
__device__ inline uint32_t quantize_four(const float* v, float quarter, float reciprocal,
                                         uint32_t place, float least) {
  uint32_t q[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float value = quarter == 1.0f ? v[i] : __fmul_rn(v[i], quarter);
    q[i] = round_to_byte<kStochastic>(__fmul_rn(value, reciprocal), place + i * kColHash, least);
  }
  return low_bytes(q[0], q[1], q[2], q[3]);
}

template <bool kStochastic>
__device__ inline uint4 quantize_block(const float (&v)[kOrder], float quarter, float sum_side,
                                       float difference_side, uint32_t place, float least) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    words[i] = quantize_four<kStochastic>(v + 4 * i, quarter, i < 2 ? sum_side : difference_side,
                                          place + 4 * i * kColHash, least);
  return make_uint4(words[0], words[1], words[2], words[3]);
}

template <class T, bool kStochastic>
__device__ void rows_quantize(const QuantizeTask& task, const Tile<T>& tile, const float* reciprocals,
                              int64_t first) {
  constexpr int kBlocks = Tile<T>::kColumns / kOrder;
  float least = 1.0f - task.row_qmax;
#pragma unroll
  for (int item = threadIdx.x; item < kTileRows * kBlocks; item += kThreads) {
    int r = item / kBlocks, block = item % kBlocks;
    int64_t row = tile.row[r], column = first + block * kOrder;
    if (row < 0 || column >= task.row_length) continue;
    float reciprocal = reciprocals[r];
    bool swapped = block & 4;
    uint32_t place = static_cast<uint32_t>(row) * kRowHash + static_cast<uint32_t>(column) * kColHash;
    float v[kOrder];
    tile.read_row(r, block, swapped, v);
    hadamard_times_4(v);
    uint4 q = make_uint4(0, 0, 0, 0);
    if (folds_quarter(reciprocal)) {
      float side = 0.25f * reciprocal;
      q = quantize_block<kStochastic>(v, 1.0f, side, swapped ? -side : side, place, least);
    } else if (reciprocal != 0.0f) {
      q = quantize_block<kStochastic>(v, 0.25f, reciprocal, swapped ? -reciprocal : reciprocal, place,
                                      least);
    }
    *reinterpret_cast<uint4*>(task.row_q + row * task.row_length + column) = q;
  }
}

// The kept integers of one column of a group, packed; returns how many words they fill.
template <int kColumnsMode, bool kStochastic>
__device__ inline void quantize_kept(float (&v)[kOrder], float reciprocal, uint32_t place, float least,
                                     uint32_t (&words)[4]) {
  constexpr uint32_t kKept = low_pass_mask(kColumnsMode);
  if (kColumnsMode != kPlain) hadamard_times_4(v);
  float kept[kOrder];
  int k = 0;
#pragma unroll
  for (int n = 0; n < kOrder; ++n)
    if (kColumnsMode == kPlain || (kKept >> n & 1)) kept[k++] = v[n];
#pragma unroll
  for (int i = 0; i < (kColumnsMode == kLowPass8 ? 2 : 4); ++i) {
    uint32_t there = place + 4 * i * kColHash;
    if (kColumnsMode == kPlain)
      words[i] = quantize_four<kStochastic>(kept + 4 * i, 1.0f, reciprocal, there, least);
    else if (folds_quarter(reciprocal))
      words[i] = quantize_four<kStochastic>(kept + 4 * i, 1.0f, 0.25f * reciprocal, there, least);
    else
      words[i] = quantize_four<kStochastic>(kept + 4 * i, 0.25f, reciprocal, there, least);
    if (reciprocal == 0.0f) words[i] = 0;
  }
}

template <class T, int kColumnsMode, bool kStochastic>
__device__ void columns_quantize(const QuantizeTask& task, Tile<T>& tile, Reciprocals<T>& scales,
                                 int64_t first, int64_t first_block) {
  constexpr int kPer = Tile<T>::kPerThread;
  constexpr int kChunk = kColumnsMode == kLowPass8 ? 8 : 16;
  using Out = Transposed<kChunk, Tile<T>::kColumns>;
  static_assert(sizeof(Out) <= sizeof(tile.data));
  Out& out = *reinterpret_cast<Out*>(tile.data);  // its values are in registers by then
  int lane = threadIdx.x % 32, group = threadIdx.x / 32;
  float least = 1.0f - task.column_qmax;
  float v[kPer][kOrder];
  tile.read_columns(group, lane, v);
  __syncthreads();
#pragma unroll
  for (int c = 0; c < kPer; ++c) {
    int column = lane * kPer + c;
    uint32_t place = static_cast<uint32_t>(first + column) * kRowHash +
                     static_cast<uint32_t>((first_block + group) * kChunk) * kColHash;
    uint32_t words[4];
    quantize_kept<kColumnsMode, kStochastic>(v[c], scales.column[column], place, least, words);
    int sum = __dp4a(static_cast<int>(words[0]), 0x01010101, 0);
    sum = __dp4a(static_cast<int>(words[1]), 0x01010101, sum);
    if constexpr (kChunk == 8) {
      *reinterpret_cast<uint2*>(out.chunk(column, group)) = make_uint2(words[0], words[1]);
    } else {
      sum = __dp4a(static_cast<int>(words[2]), 0x01010101, sum);
      sum = __dp4a(static_cast<int>(words[3]), 0x01010101, sum);
      *reinterpret_cast<uint4*>(out.chunk(column, group)) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
    atomicAdd(scales.sum + column, sum);
  }
  __syncthreads();
  out.store(reinterpret_cast<unsigned char*>(task.column_q), task.columns, task.contracted, first,
            first_block * kChunk);
}

// Any rank: the same values written byte by byte. Only ranks 0, 8 and 16 are in a recipe.
template <class T, bool kStochastic>
__device__ void columns_quantize_any(const QuantizeTask& task, const Tile<T>& tile,
                                     Reciprocals<T>& scales, int64_t first, int64_t first_block) {
  constexpr int kPer = Tile<T>::kPerThread;
  int lane = threadIdx.x % 32, group = threadIdx.x / 32;
  uint32_t kept = low_pass_mask(task.rank);
  float v[kPer][kOrder];
  tile.read_columns(group, lane, v);
#pragma unroll
  for (int c = 0; c < kPer; ++c) {
    int64_t column = first + lane * kPer + c;
    if (column >= task.columns || first_block + group >= task.blocks) continue;
    float reciprocal = scales.column[lane * kPer + c];
    int64_t k = (first_block + group) * task.rank;
    int sum = 0;
    hadamard_times_4(v[c]);
#pragma unroll
    for (int n = 0; n < kOrder; ++n) {
      if (!(kept >> n & 1)) continue;
      float t = __fmul_rn(__fmul_rn(v[c][n], 0.25f), reciprocal);
      uint32_t place = static_cast<uint32_t>(column) * kRowHash + static_cast<uint32_t>(k) * kColHash;
      uint32_t bits = round_to_byte<kStochastic>(t, place, 1.0f - task.column_qmax);
      int8_t q = reciprocal == 0.0f ? 0 : static_cast<int8_t>(bits & 0xff);
      task.column_q[column * task.contracted + k++] = q;
      sum += q;
    }
    atomicAdd(scales.sum + lane * kPer + c, sum);
    if (first_block + group == task.blocks - 1)
      for (; k < task.contracted; ++k) task.column_q[column * task.contracted + k] = 0;
  }
  __syncthreads();
}

// Adds the tile's sums of integers; the strip's last tile turns them into the totals.
template <class T>
__device__ void finish_columns(const QuantizeTask& task, const Reciprocals<T>& scales,
                               const Place& place, int64_t tiles) {
  __shared__ bool last;
  int64_t column = place.strip * Tile<T>::kColumns + threadIdx.x;
  bool mine = threadIdx.x < Tile<T>::kColumns && column < task.columns;
  if (mine) atomicAdd(task.column_sum + column, scales.sum[threadIdx.x]);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(task.finished + place.strip, 1u) == tiles - 1;
  __syncthreads();
  if (!last || !mine) return;
  __threadfence();
  Grid grid = grid_of(task.column_absmax[task.per_column ? column : 0], task.column_qmax);
  float sum = static_cast<float>(__ldcg(task.column_sum + column));
  task.column_total[column] = __fmul_rn(grid.scale, sum);
}

template <class T, bool kRows, int kColumnsMode, bool kStochastic>
__global__ void __launch_bounds__(kThreads)
    quantize_kernel(const __grid_constant__ QuantizeTask task, int64_t tiles) {
  __shared__ Tile<T> tile;
  __shared__ Reciprocals<T> scales;
  Place place = place_of<T>(task, gridDim.x - 1 - blockIdx.x);
  int64_t first = place.strip * Tile<T>::kColumns, first_block = place.tile * kGroups;
  tile.find_rows({task.rows, task.tokens, task.blocks}, first_block);
  if (kRows) scales.find_row(task, tile, place.strip == 0);
  if (kColumnsMode != kNone) scales.find_column(task, first, place.tile == 0);
  tile.load(static_cast<const T*>(task.x), task.stride, task.columns, first, task.vectors);
  if (kRows) rows_quantize<T, kStochastic>(task, tile, scales.row, first);
  if constexpr (kColumnsMode == kNone) return;
  if constexpr (kColumnsMode == kAnyRank)
    columns_quantize_any<T, kStochastic>(task, tile, scales, first, first_block);
  else if constexpr (kColumnsMode != kNone)
    columns_quantize<T, kColumnsMode, kStochastic>(task, tile, scales, first, first_block);
  finish_columns(task, scales, place, tiles);
}

template <class T, bool kRows, int kColumnsMode, bool kStochastic>
void launch_quantize(const QuantizeTask& task) {
  int64_t strips = (task.columns + Tile<T>::kColumns - 1) / Tile<T>::kColumns;
  int64_t tiles = (task.blocks + kGroups - 1) / kGroups;
  unsigned blocks = grid_size(tiles * strips);
  absmax_kernel<T, kRows, kColumnsMode><<<blocks, kThreads, 0, task.stream>>>(task);
  check_launch("absmax");
  quantize_kernel<T, kRows, kColumnsMode, kStochastic><<<blocks, kThreads, 0, task.stream>>>(task, tiles);
  check_launch("quantize");
}

template <class T, bool kRows, bool kStochastic>
void launch_columns(const QuantizeTask& task) {
  if (task.rank == 0) return launch_quantize<T, kRows, kPlain, kStochastic>(task);
  if (task.rank == 8) return launch_quantize<T, kRows, kLowPass8, kStochastic>(task);
  if (task.rank == 16) return launch_quantize<T, kRows, kFull, kStochastic>(task);
  launch_quantize<T, kRows, kAnyRank, kStochastic>(task);
}

// quantize_grad is always stochastic, so that the fused form needs half the kernels.
template <class T>
void quantize(const QuantizeTask& task) {
  if (task.want_rows && task.want_columns) return launch_columns<T, true, true>(task);
  if (task.want_columns)
    return task.stochastic ? launch_columns<T, false, true>(task) : launch_columns<T, false, false>(task);
  if (task.stochastic) return launch_quantize<T, true, kNone, true>(task);
  launch_quantize<T, true, kNone, false>(task);
}

}  // namespace hot
