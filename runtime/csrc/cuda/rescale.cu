// rescale_int4 and rescale_int8: storage times the fold along K, on one INT8 grid per column. A
// thread owns 16 places along K, whose fold it reads once, in several columns.
#include "bf16.cuh"
#include "launch.cuh"
#include "numeric.cuh"
#include "shared.hpp"

namespace hot {
namespace {

constexpr int kThreads = 256, kPlaces = 16;
constexpr int kColumns = kThreads / 32;  // of one block; a warp finds one column's grid
constexpr int kUnitsPerTile = 8;         // ops.UNITS_PER_TILE
constexpr unsigned kMostChunks = 16;     // each finds the grids again

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

// The column's bound over its tiles, by one warp.
template <bool kNibbles>
__device__ Grid find_grid(const RescaleTask& task, int64_t column) {
  float bound = 0.0f;
  for (int64_t tile = threadIdx.x % 32; tile < task.tiles; tile += 32)
    bound = max_nan(bound, __fmul_rn(magnitude<kNibbles>(task, column * task.tiles + tile),
                                     tile_peak(task, tile)));
  uint32_t bits = __reduce_max_sync(~0u, __float_as_uint(bound));
  return {scale_of(bits, 127.0f), reciprocal_of(bits, 127.0f)};
}

__device__ inline uint32_t rounded(float t) { return __float_as_uint(__fadd_rn(t, 12582912.0f)); }

// 16 values of one column in units of its grid, before the fold.
template <bool kNibbles>
__device__ inline void read_places(const RescaleTask& task, int64_t column, int64_t k,
                                   float reciprocal, float (&v)[kPlaces]) {
  int64_t at = column * task.tiles + k / task.tile;
  float slope = __fmul_rn(from_bf16(task.scale[at]), reciprocal);
  if constexpr (kNibbles) {
    float start = __fmul_rn(from_bf16(task.minimum[at]), reciprocal);
    uint2 words = __ldcs(reinterpret_cast<const uint2*>(static_cast<const uint8_t*>(task.stored) +
                                                        (column * task.contracted + k) / 2));
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      uint32_t nibble = (i < 8 ? words.x : words.y) >> 4 * (i % 8) & 15u;
      float q = __fadd_rn(__uint_as_float(0x4B000000u | nibble), -8388608.0f);
      v[i] = __fadd_rn(__fmul_rn(q, slope), start);
    }
  } else {
    uint4 words = __ldcs(reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(task.stored) +
                                                        column * task.contracted + k));
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {  // byte + 128, in the mantissa of 2^23
      uint32_t bits = __byte_perm(word[i / 4] ^ 0x80808080u, 0x4B000000u, 0x7650 | i % 4);
      v[i] = __fmul_rn(__fadd_rn(__uint_as_float(bits), -8388736.0f), slope);
    }
  }
}

template <bool kNibbles>
__global__ void __launch_bounds__(kThreads)
    rescale_kernel(const __grid_constant__ RescaleTask task) {
  __shared__ Grid grids[kColumns];
  int64_t first = static_cast<int64_t>(blockIdx.x) * kColumns, mine = first + threadIdx.x / 32;
  if (mine < task.columns) {
    Grid grid = find_grid<kNibbles>(task, mine);
    if (threadIdx.x % 32 == 0) {
      grids[threadIdx.x / 32] = grid;
      if (blockIdx.y == 0) task.column_scale[mine] = grid.scale;
    }
  }
  __syncthreads();
  int columns = static_cast<int>(min(task.columns - first, int64_t{kColumns}));
  int64_t step = int64_t{gridDim.y} * kThreads * kPlaces;
  int64_t k = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * kPlaces;
  for (; k < task.contracted; k += step) {
    alignas(16) float fold[kPlaces];
#pragma unroll
    for (int i = 0; i < kPlaces; i += 4)
      *reinterpret_cast<float4*>(fold + i) = *reinterpret_cast<const float4*>(task.fold + k + i);
#pragma unroll 4
    for (int c = 0; c < columns; ++c) {
      float v[kPlaces], reciprocal = grids[c].reciprocal;
      read_places<kNibbles>(task, first + c, k, reciprocal, v);
      uint32_t words[kPlaces / 4];
#pragma unroll
      for (int w = 0; w < kPlaces / 4; ++w) {
        uint32_t q[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) q[j] = rounded(__fmul_rn(v[4 * w + j], fold[4 * w + j]));
        words[w] = reciprocal == 0.0f ? 0 : low_bytes(q[0], q[1], q[2], q[3]);
      }
      *reinterpret_cast<uint4*>(task.q + (first + c) * task.contracted + k) =
          make_uint4(words[0], words[1], words[2], words[3]);
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
