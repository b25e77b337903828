// Two passes over x, both for any mix of row and column forms: absmax, then quantise. A column's
// scale needs the whole column before its first integer, so x is read twice; the second pass runs
// backwards to meet what the first left in L2. A block walks down one strip of columns and loads
// the next tile while it works on one.
#pragma once

#include <algorithm>

#include "cuda/common/launch.cuh"
#include "cuda/common/nibbles.cuh"
#include "cuda/common/tile.cuh"
#include "cuda/quantize/quantize.hpp"

namespace hot {

enum Columns { kNone = -2, kAnyRank = -1, kPlain = 0, kLowPass8 = 8, kFull = 16 };

// A block walks down its strip and loads a tile while it works on another: two tiles' shared memory
// lets 3 blocks share a multiprocessor. The fused second pass is bound by its instructions: there a
// fourth block, one tile per block and the hardware's balancing are worth more (measured:
// docs/measured/benchmarks_cuda.md).
template <bool kRows, int kColumnsMode, bool kSecondPass>
struct Buffers {
  static constexpr int kCount = kSecondPass && kRows && kColumnsMode != kNone ? 1 : 2;
  static constexpr int kBlocksPerSm = kCount == 1 ? 4 : 3;
};

__device__ inline Matrix matrix_of(const QuantizeTask& task, uint32_t element,
                                   const uint32_t* row_absmax) {
  return {task.x,
          static_cast<uint32_t>(task.rows),
          static_cast<uint32_t>(task.samples),
          static_cast<uint32_t>(task.tokens),
          static_cast<uint32_t>(task.stride) * element,
          task.columns,
          task.vectors,
          row_absmax,
          task.per_row};
}

// absmax of 16 values after the transform, before the factor 1/4, of the rows in `kept`.
__device__ inline float transformed_absmax(float (&v)[kOrder], uint32_t kept) {
  butterfly<1>(v);
  butterfly<2>(v);
  butterfly<4>(v);
  float most = 0.0f;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    bool sum = kept >> n & 1, difference = kept >> (n + 8) & 1;
    if (sum && difference)
      most = max_nan(most, larger_of_butterfly(v[n], v[n + 8]));
    else if (sum)
      most = max_nan(most, fabsf(__fadd_rn(v[n], v[n + 8])));
    else if (difference)
      most = max_nan(most, fabsf(__fsub_rn(v[n], v[n + 8])));
  }
  return most;
}

template <class T>
__device__ void rows_absmax(const QuantizeTask& task, const Tile<T>& tile) {
  constexpr int kBlocks = Tile<T>::kColumns / kOrder;
  int block = threadIdx.x % kBlocks;
#pragma unroll
  for (int r = threadIdx.x / kBlocks; r < kTileRows; r += kThreads / kBlocks) {
    float v[kOrder];
    tile.read_row(r, block, block & 4, v);
    float most = transformed_absmax(v, 0xffffu);
#pragma unroll
    for (int d = 1; d < kBlocks; d *= 2) most = max_nan(most, __shfl_xor_sync(~0u, most, d));
    int row = tile.row[r];
    if (block == 0 && row >= 0)
      atomicMax(task.row_absmax + (task.per_row ? row : 0),
                __float_as_uint(__fmul_rn(most, 0.25f)));
  }
}

// absmax of what is kept of one column of a group.
template <int kColumnsMode>
__device__ inline float column_absmax(float (&v)[kOrder], uint32_t kept) {
  if (kColumnsMode != kPlain) return __fmul_rn(transformed_absmax(v, kept), 0.25f);
  float most = 0.0f;
#pragma unroll
  for (int n = 0; n < kOrder; ++n) most = max_nan(most, fabsf(v[n]));
  return most;
}

template <class T, int kColumnsMode>
__device__ void columns_absmax(const QuantizeTask& task, const Tile<T>& tile,
                               float (&most)[Tile<T>::kPerThread]) {
  uint32_t kept = low_pass_mask(kColumnsMode == kAnyRank ? task.rank : kColumnsMode);
  float v[Tile<T>::kPerThread][kOrder];
  tile.read_columns(threadIdx.x / 32, threadIdx.x % 32, v);
#pragma unroll
  for (int c = 0; c < Tile<T>::kPerThread; ++c)
    most[c] = max_nan(most[c], column_absmax<kColumnsMode>(v[c], kept));
}

// Folds the 8 groups' absmax of each column, then into the whole column's.
template <class T>
__device__ void share_absmax(const QuantizeTask& task, const float (&mine)[Tile<T>::kPerThread],
                             int64_t first) {
  __shared__ uint32_t most[Tile<T>::kColumns];
  if (threadIdx.x < Tile<T>::kColumns) most[threadIdx.x] = 0;
  __syncthreads();
#pragma unroll
  for (int c = 0; c < Tile<T>::kPerThread; ++c)
    atomicMax(most + c * 32 + threadIdx.x % 32, __float_as_uint(mine[c]));
  __syncthreads();
  int64_t column = first + Tile<T>::column_at(threadIdx.x);
  if (threadIdx.x < Tile<T>::kColumns && column < task.columns)
    atomicMax(task.column_absmax + (task.per_column ? column : 0), most[threadIdx.x]);
}

template <class T, bool kRows, int kColumnsMode>
__global__ void __launch_bounds__(kThreads, Buffers<kRows, kColumnsMode, false>::kBlocksPerSm)
    absmax_kernel(const __grid_constant__ QuantizeTask task, uint32_t tiles) {
  extern __shared__ __align__(16) unsigned char shared[];
  Tile<T>* buffers = reinterpret_cast<Tile<T>*>(shared);
  const Matrix m = matrix_of(task, sizeof(T), nullptr);
  int64_t first = static_cast<int64_t>(blockIdx.x) * Tile<T>::kColumns;
  float most[Tile<T>::kPerThread] = {};
  buffers[0].start(m, blockIdx.y * kGroups, first);
  int turn = 0;
  for (uint32_t tile = blockIdx.y; tile < tiles; tile += gridDim.y, turn ^= 1) {
    Tile<T>::wait();
    __syncthreads();  // this tile has come, and the other buffer is free
    if (tile + gridDim.y < tiles) buffers[turn ^ 1].start(m, (tile + gridDim.y) * kGroups, first);
    if (kRows) rows_absmax(task, buffers[turn]);
    if constexpr (kColumnsMode != kNone) columns_absmax<T, kColumnsMode>(task, buffers[turn], most);
  }
  if constexpr (kColumnsMode != kNone) share_absmax<T>(task, most, first);
}

// Reciprocals of the rows of a tile and the columns of the strip.
template <class T>
struct Reciprocals {
  float row[kTileRows];
  float column[Tile<T>::kColumns];

  // The strip's first block writes the scales too.
  __device__ void find_rows(const QuantizeTask& task, const Tile<T>& tile) {
    int r = threadIdx.x < kTileRows ? tile.row[threadIdx.x] : -1;
    if (r < 0) return;
    row[threadIdx.x] = reciprocal_of(tile.absmax[threadIdx.x], task.row_qmax);
    if (blockIdx.x == 0) task.row_scale[r] = scale_of(tile.absmax[threadIdx.x], task.row_qmax);
  }

  __device__ void find_columns(const QuantizeTask& task, int64_t first) {
    int i = threadIdx.x;
    if (i >= Tile<T>::kColumns) return;
    int64_t at = first + Tile<T>::column_at(i);
    column[i] = 0.0f;
    if (at >= task.columns) return;
    uint32_t absmax = task.column_absmax[task.per_column ? at : 0];
    column[i] = reciprocal_of(absmax, task.column_qmax);
    if (blockIdx.y == 0) task.column_scale[at] = scale_of(absmax, task.column_qmax);
  }
};

// What to multiply 4v by. Rarely 4v itself must change first: where the factor 1/4 cannot move into
// the reciprocal, or where a granule of zeros or non-finite values becomes zeros. Assembly changes
// it in place; the compiler would copy all of v on the common way round the branch.
template <bool kTransformed>
__device__ inline float prepare(float (&v)[kOrder], float reciprocal) {
  bool folds = kTransformed ? folds_quarter(reciprocal) : reciprocal != 0.0f;
  if (!folds && reciprocal == 0.0f) {
#pragma unroll
    for (int i = 0; i < kOrder; ++i) asm volatile("mov.f32 %0, 0f00000000;" : "+f"(v[i]));
  } else if (!folds) {
#pragma unroll
    for (int i = 0; i < kOrder; ++i) asm volatile("mul.rn.f32 %0, %0, 0f3e800000;" : "+f"(v[i]));
  }
  return kTransformed && folds ? 0.25f * reciprocal : reciprocal;
}

template <bool kStochastic>
__device__ inline uint32_t quantize_four(const float* v, float factor, uint32_t place,
                                         float least) {
  uint32_t q[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    q[i] = round_to_byte<kStochastic>(__fmul_rn(v[i], factor), place + i * kColHash, least);
  return low_bytes(q[0], q[1], q[2], q[3]);
}

// 16 integers of a row to row_q, `at` entries from its beginning.
__device__ inline void put_row_block(const QuantizeTask& task, uint64_t at,
                                     const uint32_t (&q)[4]) {
  if (task.row_packed)
    *reinterpret_cast<uint2*>(task.row_q + at / 2) = nibbles(q);
  else
    *reinterpret_cast<uint4*>(task.row_q + at) = make_uint4(q[0], q[1], q[2], q[3]);
}

template <class T, bool kStochastic>
__device__ void rows_quantize(const QuantizeTask& task, const Tile<T>& tile,
                              const float* reciprocals, int64_t first) {
  constexpr int kBlocks = Tile<T>::kColumns / kOrder;
  float least = 1.0f - task.row_qmax;
  int block = threadIdx.x % kBlocks;
  bool swapped = block & 4;
  int64_t column = first + block * kOrder;
  if (column >= task.row_length) return;
  uint32_t column_place = static_cast<uint32_t>(column) * kColHash;
#pragma unroll
  for (int r = threadIdx.x / kBlocks; r < kTileRows; r += kThreads / kBlocks) {
    int row = tile.row[r];
    if (row < 0) continue;
    float v[kOrder];
    tile.read_row(r, block, swapped, v);
    hadamard_times_4(v);
    float factor = prepare<true>(v, reciprocals[r]);
    float difference = swapped ? -factor : factor;
    uint32_t place = static_cast<uint32_t>(row) * kRowHash + column_place;
    uint32_t q[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      q[i] = quantize_four<kStochastic>(v + 4 * i, i < 2 ? factor : difference,
                                        place + 4 * i * kColHash, least);
    uint64_t start = static_cast<uint64_t>(row) * static_cast<uint32_t>(task.row_length);
    put_row_block(task, start + column, q);
  }
}

// The kept integers of one column of a group, packed into 2 words (rank 8) or 4.
template <int kColumnsMode, bool kStochastic>
__device__ inline void quantize_kept(float (&v)[kOrder], float reciprocal, uint32_t place,
                                     float least, uint32_t (&words)[4]) {
  constexpr uint32_t kKept = low_pass_mask(kColumnsMode);
  if (kColumnsMode != kPlain) hadamard_times_4(v);
  float factor = prepare<kColumnsMode != kPlain>(v, reciprocal);
  float kept[kOrder];
  int k = 0;
#pragma unroll
  for (int n = 0; n < kOrder; ++n)
    if (kColumnsMode == kPlain || (kKept >> n & 1)) kept[k++] = v[n];
#pragma unroll
  for (int i = 0; i < (kColumnsMode == kLowPass8 ? 2 : 4); ++i)
    words[i] = quantize_four<kStochastic>(kept + 4 * i, factor, place + 4 * i * kColHash, least);
}

template <class T, int kColumnsMode, bool kStochastic>
__device__ void columns_quantize(const QuantizeTask& task, Tile<T>& tile,
                                 const Reciprocals<T>& scales, int64_t first,
                                 uint32_t first_block) {
  constexpr int kPer = Tile<T>::kPerThread;
  constexpr int kChunk = kColumnsMode == kLowPass8 ? 8 : 16;
  using Out = Transposed<kChunk, Tile<T>::kColumns>;
  static_assert(sizeof(Out) <= sizeof(tile.data));
  Out& out = *reinterpret_cast<Out*>(tile.data);  // its values are in registers by then
  int lane = threadIdx.x % 32, group = threadIdx.x / 32;
  float least = 1.0f - task.column_qmax;
  uint32_t k_place = (first_block + group) * kChunk * kColHash;
  float v[kPer][kOrder];
  tile.read_columns(group, lane, v);
  __syncthreads();
#pragma unroll
  for (int c = 0; c < kPer; ++c) {
    int column = lane * kPer + c;
    uint32_t place = static_cast<uint32_t>(first + column) * kRowHash + k_place;
    uint32_t words[4];
    quantize_kept<kColumnsMode, kStochastic>(v[c], scales.column[c * 32 + lane], place, least,
                                             words);
    if constexpr (kChunk == 8) {
      *reinterpret_cast<uint2*>(out.chunk(column, group)) = make_uint2(words[0], words[1]);
    } else {
      *reinterpret_cast<uint4*>(out.chunk(column, group)) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
  __syncthreads();
  out.store(reinterpret_cast<unsigned char*>(task.column_q), static_cast<uint32_t>(task.columns),
            static_cast<uint32_t>(task.contracted), static_cast<uint32_t>(first),
            first_block * kChunk);
}

// Any rank: the same values written byte by byte. Only ranks 0, 8 and 16 are in a recipe.
template <class T, bool kStochastic>
__device__ void columns_quantize_any(const QuantizeTask& task, const Tile<T>& tile,
                                     const Reciprocals<T>& scales, int64_t first,
                                     int64_t first_block) {
  constexpr int kPer = Tile<T>::kPerThread;
  int lane = threadIdx.x % 32, group = threadIdx.x / 32;
  uint32_t kept = low_pass_mask(task.rank);
  float v[kPer][kOrder];
  tile.read_columns(group, lane, v);
#pragma unroll
  for (int c = 0; c < kPer; ++c) {
    int64_t column = first + lane * kPer + c;
    if (column >= task.columns || first_block + group >= task.blocks) continue;
    float reciprocal = scales.column[c * 32 + lane];
    int64_t k = (first_block + group) * task.rank;
    hadamard_times_4(v[c]);
    float factor = prepare<true>(v[c], reciprocal);
#pragma unroll
    for (int n = 0; n < kOrder; ++n) {
      if (!(kept >> n & 1)) continue;
      uint32_t place =
          static_cast<uint32_t>(column) * kRowHash + static_cast<uint32_t>(k) * kColHash;
      uint32_t bits =
          round_to_byte<kStochastic>(__fmul_rn(v[c][n], factor), place, 1.0f - task.column_qmax);
      task.column_q[column * task.contracted + k++] = static_cast<int8_t>(bits & 0xff);
    }
    if (first_block + group == task.blocks - 1)
      for (; k < task.contracted; ++k) task.column_q[column * task.contracted + k] = 0;
  }
}

template <class T, bool kRows, int kColumnsMode, bool kStochastic>
__global__ void __launch_bounds__(kThreads, Buffers<kRows, kColumnsMode, true>::kBlocksPerSm)
    quantize_kernel(const __grid_constant__ QuantizeTask task, uint32_t tiles) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Reciprocals<T> scales;
  Tile<T>* buffers = reinterpret_cast<Tile<T>*>(shared);
  const Matrix m = matrix_of(task, sizeof(T), kRows ? task.row_absmax : nullptr);
  int64_t first = static_cast<int64_t>(blockIdx.x) * Tile<T>::kColumns;
  constexpr int kBuffers = Buffers<kRows, kColumnsMode, true>::kCount;
  buffers[0].start(m, (tiles - 1 - blockIdx.y) * kGroups, first);
  if (kColumnsMode != kNone) scales.find_columns(task, first);
  int turn = 0;
  for (uint32_t done = blockIdx.y; done < tiles; done += gridDim.y, turn ^= 1) {
    Tile<T>& tile = buffers[kBuffers == 2 ? turn : 0];
    uint32_t first_block = (tiles - 1 - done) * kGroups,
             next_block = first_block - gridDim.y * kGroups;
    bool more = done + gridDim.y < tiles;
    Tile<T>::wait();
    __syncthreads();  // this tile has come, and the other buffer is free
    if (kBuffers == 2 && more) buffers[turn ^ 1].start(m, next_block, first);
    if (kRows) {
      scales.find_rows(task, tile);
      __syncthreads();
      rows_quantize<T, kStochastic>(task, tile, scales.row, first);
    }
    if constexpr (kColumnsMode == kAnyRank)
      columns_quantize_any<T, kStochastic>(task, tile, scales, first, first_block);
    else if constexpr (kColumnsMode != kNone)
      columns_quantize<T, kColumnsMode, kStochastic>(task, tile, scales, first, first_block);
    if (kBuffers == 1 && more) {
      __syncthreads();
      tile.start(m, next_block, first);
    }
  }
}

// Enough blocks per strip to fill the device once, or one per tile.
template <class T, class Shape, auto kKernel>
void launch_tiles(const char* name, const QuantizeTask& task) {
  constexpr int kShared = Shape::kCount * sizeof(Tile<T>);
  int64_t strips = (task.columns + Tile<T>::kColumns - 1) / Tile<T>::kColumns;
  int64_t tiles = (task.blocks + kGroups - 1) / kGroups;
  int64_t walkers = std::max<int64_t>(1, Shape::kBlocksPerSm * task.sm_count / strips);
  if (Shape::kCount == 1) walkers = kMostY;
  dim3 grid(grid_size(strips), grid_size(std::min(walkers, tiles)));
  allow_shared<kKernel, kShared>(task.device);
  kKernel<<<grid, kThreads, kShared, task.stream>>>(task, static_cast<uint32_t>(tiles));
  check_launch(name);
}

template <class T, bool kRows, int kColumnsMode, bool kStochastic>
void launch_quantize(const QuantizeTask& task) {
  launch_tiles<T, Buffers<kRows, kColumnsMode, false>, absmax_kernel<T, kRows, kColumnsMode>>(
      "absmax", task);
  launch_tiles<T, Buffers<kRows, kColumnsMode, true>,
               quantize_kernel<T, kRows, kColumnsMode, kStochastic>>("quantize", task);
}

template <class T, bool kRows, bool kStochastic>
void launch_columns(const QuantizeTask& task) {
  if (task.rank == 0) return launch_quantize<T, kRows, kPlain, kStochastic>(task);
  if (task.rank == 8) return launch_quantize<T, kRows, kLowPass8, kStochastic>(task);
  if (task.rank == 16) return launch_quantize<T, kRows, kFull, kStochastic>(task);
  launch_quantize<T, kRows, kAnyRank, kStochastic>(task);
}

}  // namespace hot
