// quantize_rows with a scale per row in one pass: 16 to 256 lanes hold a whole row in registers, so
// its absmax is known before its first integer and x is read once.
#include "cuda/common/launch.cuh"
#include "cuda/common/variant.hpp"
#include "cuda/quantize/quantize.cuh"

namespace hot {

static_assert(kThreads == kRowThreads);

template <class T>
struct RowBlock {
  static constexpr int kWords = kOrder * sizeof(T) / 4;

  // 16 columns from `column` on, zero beyond x.
  __device__ static void load(const QuantizeTask& task, const T* row, int64_t column,
                              uint32_t (&words)[kWords]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = 0;
    if (task.vectors) {
#pragma unroll
      for (int i = 0; i < kWords; i += 4)
        if (column + i * 4 / static_cast<int>(sizeof(T)) < task.columns)
          *reinterpret_cast<uint4*>(words + i) =
              *reinterpret_cast<const uint4*>(row + column + i * 4 / sizeof(T));
    } else {
      load_elements(row + column, task.columns - column, words);
    }
  }

  __device__ static void load_elements(const T* source, int64_t left, uint32_t (&words)[kWords]) {
    alignas(4) T pair[Word<T>::kCount];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
#pragma unroll
      for (int j = 0; j < Word<T>::kCount; ++j)
        pair[j] =
            i * Word<T>::kCount + j < left ? source[i * Word<T>::kCount + j] : static_cast<T>(0.0f);
      words[i] = *reinterpret_cast<uint32_t*>(pair);
    }
  }
};

// The 16 values of `column` on, each times its column's factor.
__device__ inline void times_factors(const QuantizeTask& task, int64_t column, float (&v)[kOrder]) {
#pragma unroll
  for (int i = 0; i < kOrder; i += 4) {
    float4 f = make_float4(0.0f, 0.0f, 0.0f, 0.0f);  // beyond x, where values are 0
    const float* source = task.factors + column + i;
    if (column + i + 4 <= task.columns)
      f = __ldg(reinterpret_cast<const float4*>(source));
    else if (column + i < task.columns)
      f = {source[0], column + i + 1 < task.columns ? source[1] : 0.0f,
           column + i + 2 < task.columns ? source[2] : 0.0f, 0.0f};
    v[i] = __fmul_rn(v[i], f.x);
    v[i + 1] = __fmul_rn(v[i + 1], f.y);
    v[i + 2] = __fmul_rn(v[i + 2], f.z);
    v[i + 3] = __fmul_rn(v[i + 3], f.w);
  }
}

// The largest of `most` over the lanes of a row; `lanes` is a power of two from 16 to 256.
__device__ inline float row_absmax(float most, int lanes) {
  __shared__ float of_warp[kThreads / 32];
#pragma unroll
  for (int d = 1; d < 16; d *= 2) most = max_nan(most, __shfl_xor_sync(~0u, most, d));
  if (lanes == 16) return most;
  most = max_nan(most, __shfl_xor_sync(~0u, most, 16));
  if (lanes == 32) return most;
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = most;
  __syncthreads();
  int warps = lanes / 32, first = threadIdx.x / 32 / warps * warps;
  for (int w = 0; w < warps; ++w) most = max_nan(most, of_warp[first + w]);
  return most;
}

template <class T, int kBlocks, bool kStochastic, bool kFactors>
__global__ void __launch_bounds__(kThreads, kBlocks <= 3 ? 3 : 2)
    rows_kernel(const __grid_constant__ QuantizeTask task, int lanes) {
  int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / lanes) + threadIdx.x / lanes;
  int lane = threadIdx.x % lanes;
  bool inside = row < task.rows;
  const T* source = static_cast<const T*>(task.x) + (inside ? row * task.stride : 0);
  uint32_t words[kBlocks][RowBlock<T>::kWords];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b)
    RowBlock<T>::load(task, source, static_cast<int64_t>(b * lanes + lane) * kOrder, words[b]);
  float v[kBlocks][kOrder], most = 0.0f;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int i = 0; i < RowBlock<T>::kWords; ++i)
      unpack(words[b][i], v[b] + i * Word<T>::kCount, T());
    if constexpr (kFactors) times_factors(task, (b * lanes + lane) * kOrder, v[b]);
    hadamard_times_4(v[b]);
#pragma unroll
    for (int i = 0; i < kOrder; ++i) most = max_nan(most, fabsf(v[b][i]));
  }
  uint32_t absmax = __float_as_uint(__fmul_rn(row_absmax(most, lanes), 0.25f));
  if (!inside) return;
  float reciprocal = reciprocal_of(absmax, task.row_qmax), least = 1.0f - task.row_qmax;
  if (lane == 0) task.row_scale[row] = scale_of(absmax, task.row_qmax);
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    int column = (b * lanes + lane) * kOrder;
    if (column >= task.row_length) break;
    float factor = prepare<true>(v[b], reciprocal);
    uint32_t place = static_cast<uint32_t>(row) * kRowHash + column * kColHash;
    uint32_t q[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      q[i] = quantize_four<kStochastic>(v[b] + 4 * i, factor, place + 4 * i * kColHash, least);
    put_row_block(task, row * task.row_length + column, q);
  }
}

template <class T, int kBlocks>
void launch_rows_of(const QuantizeTask& task, int lanes) {
  int64_t per_block = kThreads / lanes;
  unsigned blocks = grid_size((task.rows + per_block - 1) / per_block);
  if (task.factors)
    rows_kernel<T, kBlocks, false, true><<<blocks, kThreads, 0, task.stream>>>(task, lanes);
  else if (task.stochastic)
    rows_kernel<T, kBlocks, true, false><<<blocks, kThreads, 0, task.stream>>>(task, lanes);
  else
    rows_kernel<T, kBlocks, false, false><<<blocks, kThreads, 0, task.stream>>>(task, lanes);
  check_launch("quantize_rows");
}

template <class T>
void launch_rows(const QuantizeTask& task) {
  int64_t blocks = (task.row_length + kOrder - 1) / kOrder;
  int lanes = 16;
  while (lanes < kThreads && blocks > int64_t{lanes} * kMostRowBlocks) lanes *= 2;
  switch ((blocks + lanes - 1) / lanes) {
    case 1:
      return launch_rows_of<T, 1>(task, lanes);
    case 2:
      return launch_rows_of<T, 2>(task, lanes);
    case 3:
      return launch_rows_of<T, 3>(task, lanes);
    case 4:
      return launch_rows_of<T, 4>(task, lanes);
    case 5:
      return launch_rows_of<T, 5>(task, lanes);
    default:
      return launch_rows_of<T, 6>(task, lanes);
  }
}

void HOT_VARIANT(quantize_rows)(const QuantizeTask& task) {
  if (rows_in_one_pass(task)) return launch_rows<HOT_ELEMENT>(task);
  if (task.stochastic) return launch_quantize<HOT_ELEMENT, true, kNone, true>(task);
  launch_quantize<HOT_ELEMENT, true, kNone, false>(task);
}

}  // namespace hot
