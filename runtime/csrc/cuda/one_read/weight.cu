// quantize_weight: W times `equal`, per input column, written with the outputs contiguous. One
// kernel: a block keeps its columns in registers, or reads them again where they are too long.
#include "cuda/common/launch.cuh"
#include "cuda/common/numeric.cuh"
#include "cuda/one_read/one_read.hpp"

namespace hot {

constexpr int kWeightThreads = 512;
constexpr int kWeightRows = kWeightThreads / 2;
constexpr int kKeptPasses = 12;  // of 256 outputs, in registers; longer columns are read twice
constexpr int kReadAhead = 6;

// 16 bytes of a row, zero beyond it.
template <class T>
__device__ inline uint4 load_vector(const T* row, int64_t column, int64_t columns, bool vectors) {
  if (vectors) {
    if (column >= columns) return make_uint4(0, 0, 0, 0);
    return *reinterpret_cast<const uint4*>(row + column);
  }
  constexpr int kCount = 16 / sizeof(T);
  alignas(16) T v[kCount];
#pragma unroll
  for (int c = 0; c < kCount; ++c)
    v[c] = column + c < columns ? row[column + c] : static_cast<T>(0.0f);
  return *reinterpret_cast<uint4*>(v);
}

template <class T>
struct WeightStrip {
  static constexpr int kOwn = 16 / sizeof(T), kColumns = 2 * kOwn;
  static constexpr int kPitch = kWeightRows + 16;
  uint32_t most[kColumns];
  alignas(16) int8_t q[2][kColumns * kPitch];  // of passes in turn: one barrier in each

  __device__ static uint4 load(const WeightTask& task, int64_t output, int64_t input) {
    if (output >= task.outputs) return make_uint4(0, 0, 0, 0);
    const T* row = static_cast<const T*>(task.weight) + output * task.stride;
    return load_vector(row, input, task.inputs, task.vectors);
  }

  // The values times the output's factor.
  __device__ static void values(const WeightTask& task, uint4 vector, int64_t output,
                                float (&v)[kOwn]) {
    float equal = output < task.outputs ? task.equal[output] : 0.0f;
    const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) unpack(words[i], v + i * Word<T>::kCount, T());
#pragma unroll
    for (int c = 0; c < kOwn; ++c) v[c] = __fmul_rn(v[c], equal);
  }

  // One pass: 256 outputs of the strip, through shared memory, to rows of q; `turn` counts.
  __device__ void write(const WeightTask& task, const float (&v)[kOwn],
                        const float (&reciprocal)[kOwn], int64_t first_output, int64_t strip,
                        int turn) {
    int row = threadIdx.x / 2, half = threadIdx.x % 2;
    int8_t* pass = q[turn % 2];
#pragma unroll
    for (int c = 0; c < kOwn; ++c) {
      float t = reciprocal[c] == 0.0f ? 0.0f : __fmul_rn(v[c], reciprocal[c]);
      uint32_t bits = __float_as_uint(__fadd_rn(t, 12582912.0f));
      pass[(half * kOwn + c) * kPitch + row] = static_cast<int8_t>(bits & 0xff);
    }
    __syncthreads();
    constexpr int kVectors = kWeightRows / 16;
    for (int i = threadIdx.x; i < kColumns * kVectors; i += kWeightThreads) {
      int column = i / kVectors, at = i % kVectors * 16;
      if (strip + column < task.inputs && first_output + at < task.length)
        *reinterpret_cast<uint4*>(task.q + (strip + column) * task.length + first_output + at) =
            *reinterpret_cast<const uint4*>(pass + column * kPitch + at);
    }
  }
};

// weight [outputs, inputs].
template <class T>
__global__ void __launch_bounds__(kWeightThreads)
    weight_kernel(const __grid_constant__ WeightTask task) {
  using Strip = WeightStrip<T>;
  constexpr int kOwn = Strip::kOwn;
  __shared__ Strip shared;
  int row = threadIdx.x / 2, half = threadIdx.x % 2;
  int64_t strip = static_cast<int64_t>(blockIdx.x) * Strip::kColumns, input = strip + half * kOwn;
  if (threadIdx.x < Strip::kColumns) shared.most[threadIdx.x] = 0;
  wait_for_predecessor();
  __syncthreads();
  uint4 kept[kKeptPasses];
  float most[kOwn] = {}, v[kOwn];
#pragma unroll
  for (int p = 0; p < kKeptPasses; ++p)
    kept[p] = Strip::load(task, int64_t{p} * kWeightRows + row, input);
#pragma unroll
  for (int p = 0; p < kKeptPasses; ++p) {
    Strip::values(task, kept[p], int64_t{p} * kWeightRows + row, v);
#pragma unroll
    for (int c = 0; c < kOwn; ++c) most[c] = max_nan(most[c], fabsf(v[c]));
  }
  constexpr int64_t kKept = int64_t{kKeptPasses} * kWeightRows;
  for (int64_t first = kKept; first < task.outputs; first += kReadAhead * kWeightRows) {
    uint4 ahead[kReadAhead];
#pragma unroll
    for (int p = 0; p < kReadAhead; ++p)
      ahead[p] = Strip::load(task, first + p * kWeightRows + row, input);
#pragma unroll
    for (int p = 0; p < kReadAhead; ++p) {
      Strip::values(task, ahead[p], first + p * kWeightRows + row, v);
#pragma unroll
      for (int c = 0; c < kOwn; ++c) most[c] = max_nan(most[c], fabsf(v[c]));
    }
  }
#pragma unroll
  for (int c = 0; c < kOwn; ++c) {
    uint32_t bits = __float_as_uint(most[c]);
#pragma unroll
    for (int d = 2; d < 32; d *= 2) bits = max(bits, __shfl_xor_sync(~0u, bits, d));
    if (threadIdx.x % 32 < 2) atomicMax(shared.most + half * kOwn + c, bits);
  }
  __syncthreads();
  float reciprocal[kOwn];
#pragma unroll
  for (int c = 0; c < kOwn; ++c)
    reciprocal[c] = reciprocal_of(shared.most[half * kOwn + c], 127.0f);
  if (threadIdx.x < Strip::kColumns && strip + threadIdx.x < task.inputs)
    task.scale[strip + threadIdx.x] = scale_of(shared.most[threadIdx.x], 127.0f);
#pragma unroll
  for (int p = 0; p < kKeptPasses; ++p) {
    int64_t first = int64_t{p} * kWeightRows;
    if (first >= task.length) break;
    Strip::values(task, kept[p], first + row, v);
    shared.write(task, v, reciprocal, first, strip, p);
  }
  static_assert(kKeptPasses % 2 == 0 && kReadAhead % 2 == 0, "so that turns alternate");
  for (int64_t first = kKept; first < task.length; first += kReadAhead * kWeightRows) {
    uint4 ahead[kReadAhead];
#pragma unroll
    for (int p = 0; p < kReadAhead; ++p)
      ahead[p] = Strip::load(task, first + p * kWeightRows + row, input);
#pragma unroll
    for (int p = 0; p < kReadAhead; ++p) {
      int64_t at = first + p * kWeightRows;
      if (at >= task.length) break;
      Strip::values(task, ahead[p], at + row, v);
      shared.write(task, v, reciprocal, at, strip, p);
    }
  }
}

// weight [inputs, outputs]: a block per row, four outputs a thread and step.
template <class T>
__global__ void __launch_bounds__(256) weight_rows_kernel(const __grid_constant__ WeightTask task) {
  __shared__ uint32_t most;
  wait_for_predecessor();
  int64_t input = blockIdx.x;
  const T* row = static_cast<const T*>(task.weight) + input * task.stride;
  auto value = [&](int64_t o) {
    return o < task.outputs ? __fmul_rn(static_cast<float>(row[o]), task.equal[o]) : 0.0f;
  };
  if (threadIdx.x == 0) most = 0;
  __syncthreads();
  float mine = 0.0f;
  for (int64_t o = threadIdx.x * 4; o < task.outputs; o += 1024)
#pragma unroll
    for (int c = 0; c < 4; ++c) mine = max_nan(mine, fabsf(value(o + c)));
  uint32_t bits = __reduce_max_sync(~0u, __float_as_uint(mine));
  if (threadIdx.x % 32 == 0) atomicMax(&most, bits);
  __syncthreads();
  float reciprocal = reciprocal_of(most, 127.0f);
  if (threadIdx.x == 0) task.scale[input] = scale_of(most, 127.0f);
  for (int64_t o = threadIdx.x * 4; o < task.length; o += 1024) {
    uint32_t q[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      float t = reciprocal == 0.0f ? 0.0f : __fmul_rn(value(o + c), reciprocal);
      q[c] = __float_as_uint(__fadd_rn(t, 12582912.0f));
    }
    *reinterpret_cast<uint32_t*>(task.q + input * task.length + o) =
        low_bytes(q[0], q[1], q[2], q[3]);
  }
}

template <class T>
void launch_weight(const WeightTask& task) {
  if (task.inputs_first) {
    queue_kernel("quantize_weight", weight_rows_kernel<T>, {grid_size(task.inputs), 256},
                 task.stream, task);
  } else {
    constexpr int kColumns = WeightStrip<T>::kColumns;
    unsigned strips = grid_size((task.inputs + kColumns - 1) / kColumns);
    queue_kernel("quantize_weight", weight_kernel<T>, {strips, kWeightThreads}, task.stream, task);
  }
}

void quantize_weight_bf16(const WeightTask& task) { launch_weight<__nv_bfloat16>(task); }
void quantize_weight_fp16(const WeightTask& task) { launch_weight<__half>(task); }
void quantize_weight_fp32(const WeightTask& task) { launch_weight<float>(task); }

}  // namespace hot
