// compress_int8: one tile is 8 units of 16 rows, so absmax and integers share one read.
#include "cuda/common/bf16.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/tile.cuh"
#include "cuda/storage/storage.hpp"

namespace hot {
namespace {

struct Granule {
  uint16_t scale;
  float reciprocal;  // 0: the granule's integers are 0
};

__device__ inline Granule granule_of(uint32_t absmax_bits) {
  float absmax = __uint_as_float(absmax_bits);
  if (absmax_bits >= 0x7f800000u) return {0x7fc0, 0.0f};
  if (absmax < kTiny) return {0, 0.0f};
  uint16_t scale = bf16_outward(__fdiv_rn(absmax, 127.0f), true);
  return {scale, __fdiv_rn(1.0f, from_bf16(scale))};
}

template <class T>
struct Int8Shared {
  Tile<T> tile;
  uint32_t most[Tile<T>::kColumns];
  float reciprocal[Tile<T>::kColumns];
};

// What is stored of a group of 16 rows: all of them, or the 8 that HLA keeps.
template <int kKept>
__device__ inline void keep(float (&v)[kOrder], float (&kept)[kKept]) {
  constexpr uint32_t kMask = low_pass_mask(8);
  if constexpr (kKept == 8) hadamard_times_4(v);
  int k = 0;
#pragma unroll
  for (int n = 0; n < kOrder; ++n) {
    if (kKept == 8 && !(kMask >> n & 1)) continue;
    kept[k++] = kKept == 8 ? __fmul_rn(v[n], 0.25f) : v[n];
  }
}

template <class T>
__device__ void find_scales(const CompressInt8Task& task, Int8Shared<T>& shared, int64_t first,
                            uint32_t tile) {
  int i = threadIdx.x;
  if (i >= Tile<T>::kColumns) return;
  Granule granule = granule_of(shared.most[i]);
  shared.reciprocal[i] = granule.reciprocal;
  int64_t column = first + Tile<T>::column_at(i);
  if (column < task.columns) task.scale[column * task.tiles + tile] = granule.scale;
}

template <class T, int kKept>
__global__ void __launch_bounds__(kThreads, 3)
    compress_int8_kernel(const __grid_constant__ CompressInt8Task task) {
  constexpr int kPer = Tile<T>::kPerThread;
  __shared__ Int8Shared<T> shared;
  wait_for_predecessor();
  uint32_t tile = tile_index();
  if (tile >= task.tiles) return;
  int64_t first = static_cast<int64_t>(blockIdx.x) * Tile<T>::kColumns;
  int lane = threadIdx.x % 32, group = threadIdx.x / 32;
  Matrix x = {task.x,
              static_cast<uint32_t>(task.rows),
              task.samples,
              task.tokens,
              static_cast<uint32_t>(task.stride * sizeof(T)),
              task.columns,
              task.vectors,
              nullptr,
              false};
  shared.tile.start(x, tile * kGroups, first);
  if (threadIdx.x < Tile<T>::kColumns) shared.most[threadIdx.x] = 0;
  shared.tile.wait();
  __syncthreads();
  float v[kPer][kOrder], kept[kPer][kKept];
  shared.tile.read_columns(group, lane, v);
#pragma unroll
  for (int c = 0; c < kPer; ++c) {
    keep<kKept>(v[c], kept[c]);
    float most = 0.0f;
#pragma unroll
    for (int k = 0; k < kKept; ++k) most = max_nan(most, fabsf(kept[c][k]));
    atomicMax(shared.most + c * 32 + lane, __float_as_uint(most));
  }
  __syncthreads();
  find_scales(task, shared, first, tile);
  __syncthreads();
  using Out = Transposed<kKept, Tile<T>::kColumns>;
  Out& out = *reinterpret_cast<Out*>(shared.tile.data);  // its values are in registers by now
#pragma unroll
  for (int c = 0; c < kPer; ++c) {
    float reciprocal = shared.reciprocal[c * 32 + lane];
    uint32_t words[kKept / 4], mask = reciprocal == 0.0f ? 0 : ~0u;
#pragma unroll
    for (int w = 0; w < kKept / 4; ++w) {
      uint32_t q[4];  // the scale is rounded outward: nothing is beyond 127.5
#pragma unroll
      for (int j = 0; j < 4; ++j)
        q[j] = __float_as_uint(__fadd_rn(__fmul_rn(kept[c][4 * w + j], reciprocal), 12582912.0f));
      words[w] = low_bytes(q[0], q[1], q[2], q[3]) & mask;
    }
    unsigned char* chunk = out.chunk(lane * kPer + c, group);
    if constexpr (kKept == 8)
      *reinterpret_cast<uint2*>(chunk) = make_uint2(words[0], words[1]);
    else
      *reinterpret_cast<uint4*>(chunk) = make_uint4(words[0], words[1], words[2], words[3]);
  }
  __syncthreads();
  out.store(reinterpret_cast<unsigned char*>(task.q), static_cast<uint32_t>(task.columns),
            static_cast<uint32_t>(task.contracted), static_cast<uint32_t>(first),
            tile * (kGroups * kKept));
}

template <class T>
void launch(const CompressInt8Task& task) {
  int64_t strips = (task.columns + Tile<T>::kColumns - 1) / Tile<T>::kColumns;
  dim3 grid = strips_by_tiles(strips, task.tiles);
  auto kernel = task.rank == 0 ? compress_int8_kernel<T, 16> : compress_int8_kernel<T, 8>;
  queue_kernel("compress_int8", kernel, {grid, kThreads}, task.stream, task);
}

}  // namespace

void compress_int8_bf16(const CompressInt8Task& task) { launch<__nv_bfloat16>(task); }
void compress_int8_fp16(const CompressInt8Task& task) { launch<__half>(task); }
void compress_int8_fp32(const CompressInt8Task& task) { launch<float>(task); }

}  // namespace hot
