#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "conv.hpp"
#include "launch.cuh"

namespace hot {
namespace {

constexpr int kThreads = 256, kOrder = 16, kBytes = 4;

__device__ inline void put(float x, __nv_bfloat16* out) { *out = __float2bfloat16_rn(x); }
__device__ inline void put(float x, __half* out) { *out = __float2half_rn(x); }
__device__ inline void put(float x, float* out) { *out = x; }

struct Offset {
  int at[3];
};

__device__ inline Offset kernel_offset(const ConvGeometry& g, int k) {
  int plane = g.kernel[1] * g.kernel[2];
  return {{k / plane * g.dilation[0], k % plane / g.kernel[2] * g.dilation[1],
           k % g.kernel[2] * g.dilation[2]}};
}

// Index of the big position that small position (d, h, w) of sample b meets, or -1.
__device__ inline int64_t source_of(const ConvGeometry& g, const Offset& k, int b, int d, int h,
                                    int w) {
  int at0 = d * g.stride[0] + k.at[0] - g.padding[0];
  int at1 = h * g.stride[1] + k.at[1] - g.padding[1];
  int at2 = w * g.stride[2] + k.at[2] - g.padding[2];
  bool inside =
      at0 >= 0 && at0 < g.big[0] && at1 >= 0 && at1 < g.big[1] && at2 >= 0 && at2 < g.big[2];
  if (!inside) return -1;
  return ((static_cast<int64_t>(b) * g.big[0] + at0) * g.big[1] + at1) * g.big[2] + at2;
}

__device__ inline int value_of(const int8_t* row, int64_t at) {
  return at < 0 ? 0 : row ? row[at] : 1;
}

__device__ inline const int8_t* source_row(const UnfoldTask& t, int row) {
  return t.source ? t.source + row % t.channels * t.source_stride : nullptr;
}

// A thread writes 4 positions of one row.
__global__ void __launch_bounds__(kThreads) unfold_kernel(const __grid_constant__ UnfoldTask t) {
  int64_t p = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kBytes;
  int row = static_cast<int>(tile_index());
  if (p >= t.length || row >= t.rows) return;
  const ConvGeometry& g = t.conv;
  const int8_t* source = source_row(t, t.first + row);
  Offset k = kernel_offset(g, (t.first + row) / t.channels);
  int64_t positions = static_cast<int64_t>(g.small[0]) * g.small[1] * g.small[2];
  char4 out = make_char4(0, 0, 0, 0);
  signed char* bytes = &out.x;
#pragma unroll
  for (int i = 0; i < kBytes; ++i) {
    int64_t b = (p + i) / positions;
    if (b >= g.batch) break;
    int rest = static_cast<int>((p + i) - b * positions);
    int w = rest % g.small[2], h = rest / g.small[2] % g.small[1];
    int d = rest / (g.small[2] * g.small[1]);
    bytes[i] =
        static_cast<signed char>(value_of(source, source_of(g, k, static_cast<int>(b), d, h, w)));
  }
  *reinterpret_cast<char4*>(t.out + row * t.length + p) = out;
}

// A thread transforms one tile of one row. What lies over the small tensor's edge is seen as any
// other position: the other operand is zero there.
__global__ void __launch_bounds__(kThreads)
    unfold_tiles_kernel(const __grid_constant__ UnfoldTask t) {
  int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  int row = static_cast<int>(tile_index());
  const ConvGeometry& g = t.conv;
  int64_t per_sample = static_cast<int64_t>(t.tiles[0]) * t.tiles[1] * t.tiles[2];
  int b = static_cast<int>(i / per_sample);
  if (b >= g.batch || row >= t.rows) return;
  int rest = static_cast<int>(i - b * per_sample);
  int d = rest / (t.tiles[2] * t.tiles[1]) * t.tile[0];
  int h = rest / t.tiles[2] % t.tiles[1] * t.tile[1];
  int w = rest % t.tiles[2] * t.tile[2];
  const int8_t* source = source_row(t, t.first + row);
  Offset k = kernel_offset(g, (t.first + row) / t.channels);
  int x[kOrder];
#pragma unroll
  for (int e = 0; e < kOrder; ++e) {
    int de = e / (t.tile[1] * t.tile[2]), he = e / t.tile[2] % t.tile[1], we = e % t.tile[2];
    x[e] = value_of(source, source_of(g, k, b, d + de, h + he, w + we));
  }
#pragma unroll
  for (int distance = 1; distance < kOrder; distance *= 2) {
#pragma unroll
    for (int e = 0; e < kOrder; ++e) {
      if (e & distance) continue;
      int low = x[e], high = x[e + distance];
      x[e] = low + high;
      x[e + distance] = low - high;
    }
  }
  int rank = __popc(t.kept);
  int8_t* out = t.out + row * t.length + i * rank;
#pragma unroll
  for (int e = 0; e < kOrder; ++e) {
    if (t.kept >> e & 1) *out++ = static_cast<int8_t>(t.narrow ? (x[e] + 8) >> 4 : x[e]);
  }
}

__global__ void __launch_bounds__(kThreads) row_sums_kernel(const __grid_constant__ RowSumTask t) {
  __shared__ long long partial[kThreads];
  const int8_t* row = t.x + blockIdx.x * t.length;
  long long sum = 0;
  for (int64_t i = threadIdx.x; i < t.length; i += kThreads) sum += row[i];
  partial[threadIdx.x] = sum;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    t.total[blockIdx.x] = __fmul_rn(static_cast<float>(partial[0]), t.scale[blockIdx.x]);
  }
}

__global__ void repeat_scale_kernel(const float* big_scale, int channels, float factor,
                                    float* scale, int n) {
  int i = blockIdx.x * kThreads + threadIdx.x;
  if (i < n) scale[i] = __fmul_rn(big_scale[i % channels], factor);
}

template <class Out>
__global__ void __launch_bounds__(kThreads) finish_kernel(const __grid_constant__ FinishTask t) {
  int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= t.small * t.columns) return;
  int64_t s = i / t.columns, j = i % t.columns, column = t.first + j;
  float y = t.part[i];
  if (t.big_zero) {
    float total = t.offset_total[s * (t.all / t.channels) + column / t.channels];
    total = __fmul_rn(total, t.offset_factor);
    y = __fadd_rn(y, __fmul_rn(total, t.big_zero[column % t.channels]));
  }
  if (t.small_zero) y = __fadd_rn(y, __fmul_rn(t.small_zero[s], t.column_total[j]));
  put(y, static_cast<Out*>(t.out) + s * t.all + column);
}

// A thread gathers one result: deterministic, nothing is added atomically.
template <class Out>
__global__ void __launch_bounds__(kThreads) fold_kernel(const __grid_constant__ FoldTask t) {
  int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const ConvGeometry& g = t.conv;
  int64_t at = i / t.channels, c = i % t.channels;
  int w = static_cast<int>(at % g.big[2]);
  int h = static_cast<int>(at / g.big[2] % g.big[1]);
  int64_t rest = at / g.big[2] / g.big[1];
  int d = static_cast<int>(rest % g.big[0]), b = static_cast<int>(rest / g.big[0]);
  if (b >= g.batch) return;
  float sum = 0.0f;
  int64_t k = 0, offsets = static_cast<int64_t>(g.kernel[0]) * g.kernel[1] * g.kernel[2];
  auto small = [&](int axis, int big, int offset) {  // the small coordinate, or -1
    int away = big + g.padding[axis] - offset * g.dilation[axis];
    bool meets = away >= 0 && away % g.stride[axis] == 0 && away / g.stride[axis] < g.small[axis];
    return meets ? away / g.stride[axis] : -1;
  };
  for (int k0 = 0; k0 < g.kernel[0]; ++k0) {
    int p0 = small(0, d, k0);
    for (int k1 = 0; k1 < g.kernel[1]; ++k1) {
      int p1 = small(1, h, k1);
      for (int k2 = 0; k2 < g.kernel[2]; ++k2, ++k) {
        int p2 = small(2, w, k2);
        if (p0 < 0 || p1 < 0 || p2 < 0) continue;
        int64_t p = ((static_cast<int64_t>(b) * g.small[0] + p0) * g.small[1] + p1) * g.small[2];
        sum += t.products[((p + p2) * offsets + k) * t.channels + c];
      }
    }
  }
  put(sum, static_cast<Out*>(t.out) + i);
}

unsigned blocks_for(int64_t threads) { return grid_size((threads + kThreads - 1) / kThreads); }

}  // namespace

void unfold(const UnfoldTask& t) {
  if (t.kept == 0) {
    int64_t threads = (t.length + kBytes - 1) / kBytes;
    unfold_kernel<<<strips_by_tiles((threads + kThreads - 1) / kThreads, t.rows), kThreads, 0,
                    t.stream>>>(t);
    return check_launch("unfold");
  }
  int64_t tiles = static_cast<int64_t>(t.conv.batch) * t.tiles[0] * t.tiles[1] * t.tiles[2];
  unfold_tiles_kernel<<<strips_by_tiles((tiles + kThreads - 1) / kThreads, t.rows), kThreads, 0,
                        t.stream>>>(t);
  check_launch("unfold_tiles");
}

void row_sums(const RowSumTask& t) {
  row_sums_kernel<<<grid_size(t.rows), kThreads, 0, t.stream>>>(t);
  check_launch("row_sums");
}

void repeat_scale(const float* big_scale, int channels, float factor, float* scale, int n,
                  cudaStream_t stream) {
  repeat_scale_kernel<<<blocks_for(n), kThreads, 0, stream>>>(big_scale, channels, factor, scale,
                                                              n);
  check_launch("repeat_scale");
}

void finish(const FinishTask& t) {
  unsigned blocks = blocks_for(t.small * t.columns);
  if (t.type == OutType::kBf16)
    finish_kernel<__nv_bfloat16><<<blocks, kThreads, 0, t.stream>>>(t);
  else if (t.type == OutType::kFp16)
    finish_kernel<__half><<<blocks, kThreads, 0, t.stream>>>(t);
  else
    finish_kernel<float><<<blocks, kThreads, 0, t.stream>>>(t);
  check_launch("finish");
}

void fold(const FoldTask& t) {
  const ConvGeometry& g = t.conv;
  unsigned blocks = blocks_for(t.channels * g.batch * g.big[0] * g.big[1] * g.big[2]);
  if (t.type == OutType::kBf16)
    fold_kernel<__nv_bfloat16><<<blocks, kThreads, 0, t.stream>>>(t);
  else if (t.type == OutType::kFp16)
    fold_kernel<__half><<<blocks, kThreads, 0, t.stream>>>(t);
  else
    fold_kernel<float><<<blocks, kThreads, 0, t.stream>>>(t);
  check_launch("fold");
}

}  // namespace hot
