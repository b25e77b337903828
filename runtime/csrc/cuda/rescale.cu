// rescale_int4 and rescale_int8: storage times the fold along K, on one INT8 grid per column. A
// thread owns 16 places along K, whose fold it reads once, in several columns.
#include "bf16.cuh"
#include "launch.cuh"
#include "numeric.cuh"
#include "shared.hpp"

namespace hot {
namespace {

constexpr int kThreads = 256, kPlaces = 16;
constexpr int kColumns = 8;           // of one block
constexpr int kAtOnce = 4;            // columns whose reads are under way together
constexpr int kUnitsPerTile = 8;      // ops.UNITS_PER_TILE
constexpr unsigned kMostChunks = 16;  // each finds the grids again

struct Grid {
  float scale, reciprocal;
};

// Largest of the fold within a tile.
__device__ inline float tile_peak(const RescaleTask& task, int64_t tile) {
  float most = 0.0f;
#pragma unroll
  for (int u = 0; u < kUnitsPerTile; ++u) {
    int64_t unit = tile * kUnitsPerTile + u;
    if (unit < task.units) most = max_nan(most, task.peak[unit]);
  }
  return most;
}

template <bool kNibbles>
__device__ inline float magnitude(const RescaleTask& task, int64_t at) {
  float step = from_bf16(task.scale[at]);
  if (!kNibbles) return __fmul_rn(step, 127.0f);
  float low = from_bf16(task.minimum[at]);
  return max_nan(fabsf(low), fabsf(__fadd_rn(__fmul_rn(15.0f, step), low)));
}

// Grids of the block's columns from their bounds over all tiles, a tile a thread.
template <bool kNibbles>
__device__ void find_grids(const RescaleTask& task, int64_t first, int columns,
                           Grid (&grids)[kColumns]) {
  __shared__ uint32_t most[kColumns];
  if (threadIdx.x < kColumns) most[threadIdx.x] = 0;
  __syncthreads();
  float bound[kColumns] = {};
  for (int64_t tile = threadIdx.x; tile < task.tiles; tile += kThreads) {
    float peak = tile_peak(task, tile);
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (c < columns)
        bound[c] = max_nan(
            bound[c], __fmul_rn(magnitude<kNibbles>(task, (first + c) * task.tiles + tile), peak));
  }
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    uint32_t bits = __reduce_max_sync(~0u, __float_as_uint(bound[c]));
    if (threadIdx.x % 32 == 0) atomicMax(most + c, bits);
  }
  __syncthreads();
  if (threadIdx.x < kColumns)
    grids[threadIdx.x] = {scale_of(most[threadIdx.x], 127.0f),
                          reciprocal_of(most[threadIdx.x], 127.0f)};
  __syncthreads();
}

__device__ inline uint32_t rounded(float t) { return __float_as_uint(__fadd_rn(t, 12582912.0f)); }

// 16 stored values of one column and their tile's scale.
template <bool kNibbles>
struct Stored {
  uint4 words;
  uint16_t step, low;

  __device__ void load(const RescaleTask& task, int64_t column, int64_t k, int64_t tile) {
    const uint8_t* stored = static_cast<const uint8_t*>(task.stored);
    int64_t at = column * task.contracted + k;
    step = task.scale[column * task.tiles + tile];
    if constexpr (kNibbles) {
      uint2 half = __ldcs(reinterpret_cast<const uint2*>(stored + at / 2));
      words = make_uint4(half.x, half.y, 0, 0);
      low = task.minimum[column * task.tiles + tile];
    } else {
      words = __ldcs(reinterpret_cast<const uint4*>(stored + at));
    }
  }

  // In units of the column's grid, before the fold.
  __device__ void values(float reciprocal, float (&v)[kPlaces]) const {
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
    float slope = __fmul_rn(from_bf16(step), reciprocal);
    float start = kNibbles ? __fmul_rn(from_bf16(low), reciprocal) : 0.0f;
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      if (kNibbles) {
        uint32_t nibble = word[i / 8] >> 4 * (i % 8) & 15u;
        float q = __fadd_rn(__uint_as_float(0x4B000000u | nibble), -8388608.0f);
        v[i] = __fadd_rn(__fmul_rn(q, slope), start);
      } else {  // byte + 128, in the mantissa of 2^23
        uint32_t bits = __byte_perm(word[i / 4] ^ 0x80808080u, 0x4B000000u, 0x7650 | i % 4);
        v[i] = __fmul_rn(__fadd_rn(__uint_as_float(bits), -8388736.0f), slope);
      }
    }
  }
};

__device__ inline uint4 fold_and_round(const float (&v)[kPlaces], const float (&fold)[kPlaces],
                                       bool zero) {
  uint32_t words[kPlaces / 4];
#pragma unroll
  for (int w = 0; w < kPlaces / 4; ++w) {
    uint32_t q[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) q[j] = rounded(__fmul_rn(v[4 * w + j], fold[4 * w + j]));
    words[w] = low_bytes(q[0], q[1], q[2], q[3]);
  }
  return zero ? make_uint4(0, 0, 0, 0) : make_uint4(words[0], words[1], words[2], words[3]);
}

template <bool kNibbles>
__global__ void __launch_bounds__(kThreads)
    rescale_kernel(const __grid_constant__ RescaleTask task) {
  __shared__ Grid grids[kColumns];
  int64_t first = static_cast<int64_t>(blockIdx.x) * kColumns;
  int columns = static_cast<int>(min(task.columns - first, int64_t{kColumns}));
  find_grids<kNibbles>(task, first, columns, grids);
  if (blockIdx.y == 0 && threadIdx.x < columns)
    task.column_scale[first + threadIdx.x] = grids[threadIdx.x].scale;
  int64_t step = int64_t{gridDim.y} * kThreads * kPlaces;
  int64_t k = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * kPlaces;
  for (; k < task.contracted; k += step) {
    int64_t tile = static_cast<uint32_t>(k) / static_cast<uint32_t>(task.tile);
    alignas(16) float fold[kPlaces];
#pragma unroll
    for (int i = 0; i < kPlaces; i += 4)
      *reinterpret_cast<float4*>(fold + i) = *reinterpret_cast<const float4*>(task.fold + k + i);
#pragma unroll
    for (int c0 = 0; c0 < kColumns; c0 += kAtOnce) {
      Stored<kNibbles> stored[kAtOnce];
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c)
        if (c0 + c < columns) stored[c].load(task, first + c0 + c, k, tile);
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c) {
        if (c0 + c >= columns) break;
        float v[kPlaces], reciprocal = grids[c0 + c].reciprocal;
        stored[c].values(reciprocal, v);
        *reinterpret_cast<uint4*>(task.q + (first + c0 + c) * task.contracted + k) =
            fold_and_round(v, fold, reciprocal == 0.0f);
      }
    }
  }
}

template <bool kNibbles>
void launch(const RescaleTask& task) {
  int64_t chunks = (task.contracted + kThreads * kPlaces - 1) / (kThreads * kPlaces);
  dim3 grid(grid_size((task.columns + kColumns - 1) / kColumns),
            static_cast<unsigned>(chunks < kMostChunks ? chunks : kMostChunks));
  rescale_kernel<kNibbles><<<grid, kThreads, 0, task.stream>>>(task);
  check_launch("rescale");
}

}  // namespace

void rescale_int4(const RescaleTask& task) { launch<true>(task); }
void rescale_int8(const RescaleTask& task) { launch<false>(task); }

}  // namespace hot
