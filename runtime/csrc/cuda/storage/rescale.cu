// rescale_int8: storage times the fold along K, on one INT8 grid per column. One
// kernel finds the grids from scales alone; in the other a thread owns 16 places along K, whose
// fold it reads once, in several columns.
#include "cuda/common/bf16.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/numeric.cuh"
#include "cuda/storage/storage.hpp"

namespace hot {
namespace {

constexpr int kThreads = 256, kPlaces = 16;
constexpr int kColumns = 8;       // of one block
constexpr int kAtOnce = 4;        // columns whose reads are under way together
constexpr int kUnitsPerTile = 8;  // ops.UNITS_PER_TILE

// Largest of the fold within a tile.
__device__ inline float tile_peak(const RescaleTask& task, int64_t tile) {
  const float* peak = task.peak + tile * kUnitsPerTile;
  int64_t left = task.units - tile * kUnitsPerTile;
  if (left >= kUnitsPerTile) {
    float4 a = *reinterpret_cast<const float4*>(peak);
    float4 b = *reinterpret_cast<const float4*>(peak + 4);
    return max_nan(max_nan(max_nan(a.x, a.y), max_nan(a.z, a.w)),
                   max_nan(max_nan(b.x, b.y), max_nan(b.z, b.w)));
  }
  float most = 0.0f;
  for (int u = 0; u < left; ++u) most = max_nan(most, peak[u]);
  return most;
}

__device__ inline float magnitude(const RescaleTask& task, int64_t at) {
  return __fmul_rn(from_bf16(task.scale[at]), 127.0f);
}

// The columns' grids from their bounds over all tiles, a tile a thread.
__global__ void __launch_bounds__(kThreads) grids_kernel(const __grid_constant__ RescaleTask task) {
  __shared__ uint32_t most[kColumns];
  int64_t first = static_cast<int64_t>(blockIdx.x) * kColumns;
  int columns = static_cast<int>(min(task.columns - first, int64_t{kColumns}));
  if (threadIdx.x < kColumns) most[threadIdx.x] = 0;
  wait_for_predecessor();
  __syncthreads();
  float bound[kColumns] = {};
  for (int64_t tile = threadIdx.x; tile < task.tiles; tile += kThreads) {
    float peak = tile_peak(task, tile);
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (c < columns)
        bound[c] =
            max_nan(bound[c], __fmul_rn(magnitude(task, (first + c) * task.tiles + tile), peak));
  }
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    uint32_t bits = __reduce_max_sync(~0u, __float_as_uint(bound[c]));
    if (threadIdx.x % 32 == 0) atomicMax(most + c, bits);
  }
  __syncthreads();
  if (threadIdx.x >= columns) return;
  task.column_scale[first + threadIdx.x] = scale_of(most[threadIdx.x], 127.0f);
  task.reciprocal[first + threadIdx.x] = reciprocal_of(most[threadIdx.x], 127.0f);
}

// Where a thread's places of one column are, in bytes of storage and in scales.
struct Place {
  const int8_t* stored;
  int64_t grid;

  __device__ Place(const RescaleTask& task, int64_t column, int64_t k, uint32_t tile)
      : stored(task.stored + column * task.contracted + k), grid(column * task.tiles + tile) {}

  __device__ void next(const RescaleTask& task) {
    stored += task.contracted;
    grid += task.tiles;
  }
};

// 16 stored values of one column and their tile's scale.
struct Stored {
  uint4 words;
  uint16_t step;

  __device__ void load(const RescaleTask& task, const Place& place) {
    step = task.scale[place.grid];
    words = __ldcs(reinterpret_cast<const uint4*>(place.stored));
  }

  // In units of the column's grid, before the fold.
  __device__ void values(float reciprocal, float (&v)[kPlaces]) const {
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
    float slope = __fmul_rn(from_bf16(step), reciprocal);
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {  // byte + 128, in the mantissa of 2^23
      uint32_t bits = __byte_perm(word[i / 4] ^ 0x80808080u, 0x4B000000u, 0x7550 | i % 4);
      v[i] = __fmul_rn(__fadd_rn(__uint_as_float(bits), -8388736.0f), slope);
    }
  }
};

// The product is rounded stochastically: rows of little gradient have small folds.
__device__ inline uint4 fold_and_round(const float (&v)[kPlaces], const float (&fold)[kPlaces],
                                       uint32_t column_place, uint32_t k_place, bool zero) {
  uint32_t words[kPlaces / 4];
#pragma unroll
  for (int w = 0; w < kPlaces / 4; ++w) {
    uint32_t q[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t place = k_place ^ (4 * w + j) * kLaneHash;
      float value = __fmul_rn(v[4 * w + j], 256.0f);  // exact; the fold times that may be infinite
      q[j] = round_fixed(value, fold[4 * w + j], column_place ^ place);
    }
    words[w] = second_bytes(q[0], q[1], q[2], q[3]);
  }
  return zero ? make_uint4(0, 0, 0, 0) : make_uint4(words[0], words[1], words[2], words[3]);
}

// Storage and fold are older than grids_kernel, which waited for the kernels before it, so their
// first reads need not wait for it in turn.
__global__ void __launch_bounds__(kThreads, 4)
    rescale_kernel(const __grid_constant__ RescaleTask task) {
  int64_t first = static_cast<int64_t>(blockIdx.x) * kColumns;
  int columns = static_cast<int>(min(task.columns - first, int64_t{kColumns}));
  int64_t step = int64_t{gridDim.y} * kThreads * kPlaces;
  int64_t k = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * kPlaces;
  Stored stored[kAtOnce];
  float fold[kPlaces];
  bool waited = false;
  for (; k < task.contracted; k += step) {
    uint32_t tile = static_cast<uint32_t>(k) / static_cast<uint32_t>(task.tile);
#pragma unroll
    for (int i = 0; i < kPlaces; i += 4) {
      float4 part = *reinterpret_cast<const float4*>(task.fold + k + i);
      fold[i] = part.x, fold[i + 1] = part.y, fold[i + 2] = part.z, fold[i + 3] = part.w;
    }
    uint32_t k_place = static_cast<uint32_t>(k / kOrder) * kColHash;
#pragma unroll 1
    for (int c0 = 0; c0 < columns; c0 += kAtOnce) {
      Place place(task, first + c0, k, tile);
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c, place.next(task))
        if (c0 + c < columns) stored[c].load(task, place);
      if (!waited) wait_for_predecessor();
      waited = true;
      int8_t* out = task.q + (first + c0) * task.contracted + k;
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c, out += task.contracted) {
        if (c0 + c >= columns) break;
        float v[kPlaces], reciprocal = task.reciprocal[first + c0 + c];
        stored[c].values(reciprocal, v);
        uint32_t column_place = static_cast<uint32_t>(first + c0 + c) * kRowHash;
        *reinterpret_cast<uint4*>(out) =
            fold_and_round(v, fold, column_place, k_place, reciprocal == 0.0f);
      }
    }
  }
  if (!waited) wait_for_predecessor();
}

}  // namespace

void rescale_int8(const RescaleTask& task) {
  unsigned groups = grid_size((task.columns + kColumns - 1) / kColumns);
  int64_t chunks = (task.contracted + kThreads * kPlaces - 1) / (kThreads * kPlaces);
  queue_kernel("rescale: grids", grids_kernel, {groups, kThreads}, task.stream, task);
  dim3 grid(groups, static_cast<unsigned>(chunks < kMostY ? chunks : kMostY));
  queue_kernel("rescale", rescale_kernel, {grid, kThreads}, task.stream, task);
}

}  // namespace hot
