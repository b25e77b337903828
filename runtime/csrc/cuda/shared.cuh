// quantize_shared in one read of grad_output: the 16 rows of a unit stay in the registers of one
// block (or of a cluster of blocks, each with a part of the columns) while their absmax is agreed
// on. Then the integers are written row by row, and, transposed in registers and collected over a
// tile of 4 units in shared memory, column by column in whole sectors.
#pragma once

#include <cooperative_groups.h>

#include <algorithm>

#include "launch.cuh"
#include "numeric.cuh"
#include "shared.hpp"

namespace hot {

constexpr int kSharedThreads = 384;  // at most: more columns are spread over a cluster
constexpr int kSharedBlocksPerSm = 2;
constexpr int kMostCluster = 8;
constexpr float kSharedTiny = 0x1p-100f;  // reference_shared.SHARED_TINY
constexpr int kMostLift = 8;              // reference_shared.MOST_LIFT

// Columns that one thread owns: 8 bytes of each row.
template <class T>
constexpr int kOwned = 8 / sizeof(T);

// 8 bytes from `row` on, of which `left` elements exist.
template <class T>
__device__ inline uint2 load_owned(const T* row, int64_t left, bool vectors) {
  if (vectors) return left > 0 ? __ldcs(reinterpret_cast<const uint2*>(row)) : make_uint2(0, 0);
  alignas(8) T v[kOwned<T>];
#pragma unroll
  for (int c = 0; c < kOwned<T>; ++c) v[c] = c < left ? row[c] : static_cast<T>(0.0f);
  return *reinterpret_cast<uint2*>(v);
}

template <class T>
__device__ inline void unpack_owned(uint2 words, float (&v)[kOwned<T>]) {
  unpack(words.x, v, T());
  unpack(words.y, v + Word<T>::kCount, T());
}

// The absmax of each column over the sampled rows.
template <class T>
__global__ void __launch_bounds__(512) sample_kernel(const __grid_constant__ SharedTask task) {
  __shared__ uint32_t most[kSampleStrip], top;
  constexpr int kLanes = kSampleStrip / kOwned<T>, kRows = 512 / kLanes;
  if (threadIdx.x < kSampleStrip) most[threadIdx.x] = 0;
  if (threadIdx.x == 0) top = 0;
  __syncthreads();
  wait_for_predecessor();
  int lane = threadIdx.x % kLanes;
  int64_t first = static_cast<int64_t>(blockIdx.x) * kSampleStrip,
          column = first + lane * kOwned<T>;
  int64_t count = min(task.rows, kSampledRows);
  float mine[kOwned<T>] = {};
#pragma unroll 8
  for (int64_t i = threadIdx.x / kLanes; i < count; i += kRows) {
    const T* row = static_cast<const T*>(task.g) + i * task.rows / count * task.stride;
    float v[kOwned<T>];
    unpack_owned<T>(load_owned(row + column, task.columns - column, task.vectors), v);
#pragma unroll
    for (int c = 0; c < kOwned<T>; ++c) mine[c] = max_nan(mine[c], fabsf(v[c]));
  }
#pragma unroll
  for (int c = 0; c < kOwned<T>; ++c)
    atomicMax(most + lane * kOwned<T> + c, __float_as_uint(mine[c]));
  __syncthreads();
  if (threadIdx.x < kSampleStrip && first + threadIdx.x < task.columns)
    task.sampled[first + threadIdx.x] = most[threadIdx.x];
  if (threadIdx.x < kSampleStrip) atomicMax(&top, most[threadIdx.x]);
  __syncthreads();
  if (threadIdx.x == 0) task.strip_max[blockIdx.x] = top;
}

__device__ inline int exponent_of(uint32_t bits) { return min(static_cast<int>(bits >> 23), 254); }

// 2^exponent for -126 ... 127.
__device__ inline float power_of_2(int exponent) {
  return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
}

__device__ inline float shared_scale_of(uint32_t absmax_bits) {
  if (absmax_bits >= 0x7f800000u) return __uint_as_float(0x7fc00000u);
  float absmax = __uint_as_float(absmax_bits);
  return absmax < kSharedTiny ? 0.0f : __fmul_rn(__fdiv_rn(absmax, 127.0f), 256.0f);
}

__device__ inline float shared_reciprocal_of(uint32_t absmax_bits) {
  float absmax = __uint_as_float(absmax_bits);
  bool usable = absmax >= kSharedTiny && absmax_bits < 0x7f800000u;
  return usable ? __fdiv_rn(32512.0f, absmax) : 0.0f;
}

// reference_shared.quantize_fixed; the integer is byte 1.
__device__ inline uint32_t round_fixed(float value, float factor, uint32_t place) {
  uint32_t bits = __float_as_uint(__fmaf_rn(value, factor, 12582912.0f));
  return bits + ((bits ^ place) * kMixHash >> 24);
}

__device__ inline uint32_t second_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0051), __byte_perm(c, d, 0x0051), 0x5410);
}

// One unit's rows: i-th of 16, or -1 beyond grad_output.
struct UnitRows {
  uint32_t sample, token, samples, tokens;

  __device__ UnitRows(const SharedTask& task, uint32_t unit)
      : sample((task.tokens == 1 ? unit : unit / task.tokens) * kOrder),
        token(task.tokens == 1 ? 0 : unit % task.tokens),
        samples(task.samples),
        tokens(task.tokens) {}

  // To the next unit, without dividing.
  __device__ void next() {
    bool wrap = ++token == tokens;
    token = wrap ? 0 : token;
    sample += wrap ? kOrder : 0;
  }

  __device__ bool has(uint32_t i) const { return sample + i < samples; }
  __device__ uint32_t row(uint32_t i) const { return (sample + i) * tokens + token; }
};

// 2^-8 / equal of a thread's columns, applied to the packed words where that is exact (bf16 and
// fp32: what it loses of subnormals is far below any row's step), else to each unpacked value.
template <class T>
struct Lift {
  float by[kOwned<T>];

  __device__ void apply(uint2&) const {}
  // The largest magnitude of one row's words.
  __device__ float largest(uint2 words) const {
    float v[kOwned<T>], most = 0.0f;
    unpack_owned<T>(words, v);
#pragma unroll
    for (int c = 0; c < kOwned<T>; ++c) most = max_nan(most, fabsf(value(v[c], c)));
    return most;
  }
  __device__ float value(float x, int c) const {
    return __fmul_rn(x, c == 0 ? by[0] : c == 1 ? by[1] : c == 2 ? by[2] : by[3]);
  }
};
template <>
struct Lift<float> {
  float by[2];

  __device__ void apply(uint2& words) const {
    words.x = __float_as_uint(__fmul_rn(__uint_as_float(words.x), by[0]));
    words.y = __float_as_uint(__fmul_rn(__uint_as_float(words.y), by[1]));
  }
  __device__ float largest(uint2 words) const {
    return max_nan(fabsf(__uint_as_float(words.x)), fabsf(__uint_as_float(words.y)));
  }
  __device__ float value(float x, int) const { return x; }
};
template <>
struct Lift<__nv_bfloat16> {
  float by[4];

  __device__ static uint32_t product(uint32_t word, float low, float high) {
    __nv_bfloat162 factor = __floats2bfloat162_rn(low, high);
    __nv_bfloat162 x = __hmul2(*reinterpret_cast<__nv_bfloat162*>(&word), factor);
    return *reinterpret_cast<uint32_t*>(&x);
  }
  __device__ void apply(uint2& words) const {
    words.x = product(words.x, by[0], by[1]);
    words.y = product(words.y, by[2], by[3]);
  }
  __device__ float largest(uint2 words) const {
    uint32_t most;  // magnitudes; what signs they get does not matter
#if __CUDA_ARCH__ >= 860
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(words.x), "r"(words.y));
#else
    asm("{\n.reg .b32 a, b;\n"
        "abs.bf16x2 a, %1;\n"
        "abs.bf16x2 b, %2;\n"
        "max.NaN.bf16x2 %0, a, b;\n}"
        : "=r"(most)
        : "r"(words.x), "r"(words.y));
#endif
    float v[2];
    unpack(most, v, __nv_bfloat16());
    return max_nan(fabsf(v[0]), fabsf(v[1]));
  }
  __device__ float value(float x, int) const { return x; }
};

// 16 rows of one thread's columns. kWhole: all rows exist and are whole vectors.
template <class T>
struct Patch {
  static constexpr int kColumns = kOwned<T>;
  uint2 words[kOrder];
  Lift<T> lift;

  // equal's inverse, written by the first unit's block.
  __device__ void find_lift(const SharedTask& task, int64_t column, int highest, bool writes) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      bool inside = column + c < task.columns;
      int by = min(highest - exponent_of(inside ? task.sampled[column + c] : 0), kMostLift);
      lift.by[c] = power_of_2(by - kMostLift);
      if (writes && inside) task.equal[column + c] = power_of_2(-by);
    }
  }

  template <bool kWhole>
  __device__ void load(const SharedTask& task, const UnitRows& rows, int64_t column) {
    const T* source = static_cast<const T*>(task.g) + rows.row(0) * task.stride + column;
    int64_t step = rows.tokens * task.stride, left = task.columns - column;
#pragma unroll
    for (int i = 0; i < kOrder; ++i, source += step) {
      if (kWhole)
        words[i] = left > 0 ? __ldcs(reinterpret_cast<const uint2*>(source)) : make_uint2(0, 0);
      else
        words[i] = rows.has(i) ? load_owned(source, left, task.vectors) : make_uint2(0, 0);
    }
  }

  __device__ void apply_lift() {
#pragma unroll
    for (int i = 0; i < kOrder; ++i) lift.apply(words[i]);
  }

  // Keeps the compiler from holding unpacked values over what comes next: there is no room.
  __device__ void forget_unpacked() {
#pragma unroll
    for (int i = 0; i < kOrder; ++i)
      asm volatile("" : "+r"(words[i].x), "+r"(words[i].y) : : "memory");
  }

  __device__ void row(int i, float (&v)[kColumns]) const {
    unpack_owned<T>(words[i], v);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) v[c] = lift.value(v[c], c);
  }

  // Bits of the rows' absmax in this warp.
  __device__ void largest(uint32_t (&of_row)[kOrder]) {
    forget_unpacked();
#pragma unroll
    for (int i = 0; i < kOrder; ++i)
      of_row[i] = __reduce_max_sync(~0u, __float_as_uint(lift.largest(words[i])));
  }

  // The kept rows of the unit: 8 bytes of each column, to its place in `out`. One word's columns
  // after the other: all at once would not fit into registers.
  __device__ void collect_kept(uint32_t unit, int64_t first, float reciprocal,
                               unsigned char* out) const {
    constexpr int kCount = Word<T>::kCount;
#pragma unroll 1
    for (int word = 0; word < 2; ++word) {
      float v[kCount][kOrder];
#pragma unroll
      for (int i = 0; i < kOrder; ++i) {
        float both[kCount];
        unpack(word == 0 ? words[i].x : words[i].y, both, T());
#pragma unroll
        for (int c = 0; c < kCount; ++c) v[c][i] = lift.value(both[c], word == 0 ? c : c + kCount);
      }
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        int at = word * kCount + c;
        uint32_t place = static_cast<uint32_t>(first + at) * kColHash;
        *reinterpret_cast<uint2*>(out + at * blockDim.x * (kTileUnits * 8)) =
            keep(v[c], unit * 8, place, reciprocal);
      }
    }
  }

  __device__ static uint2 keep(float (&v)[kOrder], uint32_t first_row, uint32_t place,
                               float reciprocal) {
    constexpr uint32_t kKept = low_pass_mask(8);
    uint32_t q[8];
    hadamard_times_4(v);
    int k = 0;
#pragma unroll
    for (int n = 0; n < kOrder; ++n) {
      if (!(kKept >> n & 1)) continue;
      q[k] = round_fixed(v[n], 0.25f * reciprocal, (first_row + k) * kRowHash ^ place);
      ++k;
    }
    if (reciprocal == 0.0f) return make_uint2(0, 0);
    return make_uint2(second_bytes(q[0], q[1], q[2], q[3]), second_bytes(q[4], q[5], q[6], q[7]));
  }

  // The rows themselves, added to `sum` as well, and 16 bytes of each column to its place in `out`
  // if they are wanted too. kWhole: no row's reciprocal is 0 either.
  template <bool kColumnsToo, bool kWhole>
  __device__ void write_rows(const SharedTask& task, const UnitRows& rows, int64_t first,
                             float my_reciprocal, unsigned char* out, float (&sum)[kColumns]) {
    uint32_t columns[kColumns][4], place[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) place[c] = static_cast<uint32_t>(first + c) * kColHash;
    int8_t* target = task.row_q + rows.row(0) * task.row_length + first;
    int64_t step = rows.tokens * task.row_length;
    uint32_t row_place = rows.row(0) * kRowHash;
    bool inside = first < task.row_length;
    // differs between the forms of this code, whose common part would else be moved before both
    asm volatile("// %1" : "+r"(row_place) : "n"(static_cast<int>(kWhole)));
    forget_unpacked();
#pragma unroll
    for (int quad = 0; quad < 4; ++quad) {
      uint32_t q[4];
#pragma unroll
      for (int j = 0; j < 4; ++j, target += step, row_place += rows.tokens * kRowHash) {
        int i = 4 * quad + j;
        float reciprocal = __shfl_sync(~0u, my_reciprocal, i), v[kColumns];
        row(i, v);
        uint32_t of[4] = {};
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          sum[c] += v[c];
          if (!kWhole && reciprocal == 0.0f) v[c] = 0.0f;
          of[c] = round_fixed(v[c], reciprocal, row_place ^ place[c]);
        }
        q[j] = kColumns == 4 ? second_bytes(of[0], of[1], of[2], of[3])
                             : __byte_perm(of[0], of[1], 0x0051);
        if (inside && (kWhole || rows.has(i))) store_row(target, q[j]);
      }
      if (kColumnsToo) transpose(q, quad, columns);
    }
    if constexpr (kColumnsToo) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        *reinterpret_cast<uint4*>(out + c * blockDim.x * (kTileUnits * 16)) =
            make_uint4(columns[c][0], columns[c][1], columns[c][2], columns[c][3]);
    }
  }

  // A tile's sums, without the lift.
  __device__ void write_sums(const SharedTask& task, uint32_t tile, int64_t first,
                             const float (&sum)[kColumns]) const {
    if (task.sums == nullptr) return;
    float* out = task.sums + tile * task.columns + first;
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (first + c < task.columns) out[c] = sum[c] / lift.by[c];
  }

  __device__ static void store_row(int8_t* out, uint32_t q) {
    if (kColumns == 4)
      *reinterpret_cast<uint32_t*>(out) = q;
    else
      *reinterpret_cast<uint16_t*>(out) = static_cast<uint16_t>(q);
  }

  // Bytes of four rows to words of four columns (two, for fp32).
  __device__ static void transpose(const uint32_t (&q)[4], int quad,
                                   uint32_t (&columns)[kColumns][4]) {
    uint32_t a = __byte_perm(q[0], q[1], 0x5140), b = __byte_perm(q[2], q[3], 0x5140);
    columns[0][quad] = __byte_perm(a, b, 0x5410);
    columns[1][quad] = __byte_perm(a, b, 0x7632);
    if constexpr (kColumns == 4) {
      a = __byte_perm(q[0], q[1], 0x7362), b = __byte_perm(q[2], q[3], 0x7362);
      columns[2][quad] = __byte_perm(a, b, 0x5410);
      columns[3][quad] = __byte_perm(a, b, 0x7632);
    }
  }
};

__device__ inline uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

__device__ inline void wait_for_phase(const uint64_t& barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  uint32_t done = 0;
  while (!done)
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(&barrier)), "r"(parity)
        : "memory");
#endif
}

// How the threads of a unit agree on its rows' absmax. Blocks of a cluster send each other theirs
// as stores that count as bytes of a barrier: a barrier of the whole cluster would wait for all
// that the threads have stored to memory before. Buffers alternate: before anybody fills one for
// the second time, everybody has filled the other, so has read it.
struct Agreement {
  static constexpr int kWarps = kSharedThreads / 32;
  alignas(16) uint32_t of_warp[2][kWarps][kOrder];  // zero where the block has no such warp
  uint32_t of_block[2][kMostCluster][kOrder];
  alignas(8) uint64_t arrived[2];

  __device__ void start(bool cluster) {
    for (int i = threadIdx.x; i < 2 * kWarps * kOrder; i += blockDim.x) of_warp[0][0][i] = 0;
#if __CUDA_ARCH__ >= 900
    if (!cluster) return;
    if (threadIdx.x < 2) {
      asm volatile(
          "mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(arrived + threadIdx.x)));
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    cooperative_groups::this_cluster().sync();
#endif
  }

  // The unit's maxima from the warps', in lanes below kOrder of every warp; `turn` counts.
  __device__ uint32_t largest(const uint32_t (&of_row)[kOrder], int turn, unsigned blocks) {
    int lane = threadIdx.x % 32, buffer = turn % 2;
    uint4* mine = reinterpret_cast<uint4*>(of_warp[buffer][threadIdx.x / 32]);
    if (lane == 0)
#pragma unroll
      for (int i = 0; i < kOrder / 4; ++i)
        mine[i] =
            make_uint4(of_row[4 * i], of_row[4 * i + 1], of_row[4 * i + 2], of_row[4 * i + 3]);
    __syncthreads();
    if (blocks > 1 && threadIdx.x >= 32) return received(turn, blocks);
    uint32_t most = 0;
    if (lane < kOrder) {
#pragma unroll
      for (int w = 0; w < kWarps; ++w) most = max(most, of_warp[buffer][w][lane]);
    }
    if (blocks == 1) return most;
    send(most, buffer, blocks);
    return received(turn, blocks);
  }

  // To every block of the cluster, this one included, by its first warp.
  __device__ void send(uint32_t most, int buffer, unsigned blocks) {
#if __CUDA_ARCH__ >= 900
    int lane = threadIdx.x;
    unsigned self = cooperative_groups::this_cluster().block_rank();
    if (lane == 0)
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                       shared_address(arrived + buffer)),
                   "r"(static_cast<uint32_t>(blocks * kOrder * sizeof(uint32_t)))
                   : "memory");
    if (lane >= kOrder) return;
    for (unsigned b = 0; b < blocks; ++b) {
      uint32_t slot, barrier;
      asm("mapa.shared::cluster.u32 %0, %1, %2;"
          : "=r"(slot)
          : "r"(shared_address(&of_block[buffer][self][lane])), "r"(b));
      asm("mapa.shared::cluster.u32 %0, %1, %2;"
          : "=r"(barrier)
          : "r"(shared_address(arrived + buffer)), "r"(b));
      asm volatile(
          "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
              slot),
          "r"(most), "r"(barrier)
          : "memory");
    }
#endif
  }

  __device__ uint32_t received(int turn, unsigned blocks) {
    uint32_t most = 0;
#if __CUDA_ARCH__ >= 900
    wait_for_phase(arrived[turn % 2], turn / 2 % 2);
    for (unsigned b = 0; b < blocks && threadIdx.x % 32 < kOrder; ++b)
      most = max(most, of_block[turn % 2][b][threadIdx.x % 32]);
    __syncwarp();
#endif
    return most;
  }
};

__device__ inline unsigned cluster_size(bool cluster) {
#if __CUDA_ARCH__ >= 900
  if (cluster) return cooperative_groups::this_cluster().num_blocks();
#endif
  return 1;
}

// The exponent of the largest sampled magnitude, in all threads.
__device__ inline int highest_exponent(const SharedTask& task) {
  __shared__ uint32_t top;
  if (threadIdx.x == 0) top = 0;
  __syncthreads();
  int strips = static_cast<int>((task.columns + kSampleStrip - 1) / kSampleStrip);
  uint32_t mine = 0;
  for (int s = threadIdx.x; s < strips; s += blockDim.x) mine = max(mine, task.strip_max[s]);
  mine = __reduce_max_sync(~0u, mine);
  if (threadIdx.x % 32 == 0) atomicMax(&top, mine);
  __syncthreads();
  return exponent_of(top);
}

// A quarter of the sum of the rows' absmax, which bounds what HLA keeps: |h| <= sum |g| / 4. In all
// lanes; added as the butterflies at distance 1, 2, 4, 8 add.
__device__ inline uint32_t bound_of_kept(uint32_t most) {
  float sum = __uint_as_float(most);
#pragma unroll
  for (int d = 1; d < kOrder; d *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, d));
  return __float_as_uint(__fmul_rn(__shfl_sync(~0u, sum, 0), 0.25f));
}

// Scales of the unit's rows, by one warp.
template <int kRank>
__device__ void write_scales(const SharedTask& task, const UnitRows& rows, uint32_t unit,
                             uint32_t most) {
  int lane = threadIdx.x % 32;
  float scale = shared_scale_of(most);
  if (lane < kOrder && rows.has(lane)) task.row_scale[rows.row(lane)] = scale;
  if (kRank == 0) {
    uint32_t peak = __reduce_max_sync(~0u, lane < kOrder ? __float_as_uint(scale) : 0u);
    if (lane < kOrder) task.fold[unit * int64_t{kOrder} + lane] = scale;
    if (lane == 0) task.peak[unit] = __uint_as_float(peak);
  } else {
    scale = shared_scale_of(bound_of_kept(most));
    if (lane < 8) task.fold[unit * int64_t{8} + lane] = scale;
    if (lane == 0) task.peak[unit] = scale;
  }
}

// The buffer that collects a tile's columns: column c of thread t has kColumn bytes at
// (c * threads + t) * kColumn, a unit's part exchanged by thread so that no bank is met twice.
template <int kRank>
struct Columns {
  static constexpr int kPart = kRank == 0 ? kOrder : 8, kColumn = kTileUnits * kPart;

  __device__ static int swap(int thread) { return thread / (128 / kColumn) % kTileUnits; }

  __device__ static unsigned char* place(unsigned char* collected, int unit) {
    int t = threadIdx.x;
    return collected + t * kColumn + (unit ^ swap(t)) * kPart;
  }

  // 16 bytes of a column whose thread swaps by `s`.
  __device__ static uint4 vector(const unsigned char* column, int s, int vector) {
    if (kRank == 0) return *reinterpret_cast<const uint4*>(column + (vector ^ s) * 16);
    uint4 v = *reinterpret_cast<const uint4*>(column + (vector ^ s / 2) * 16);
    return s % 2 ? make_uint4(v.z, v.w, v.x, v.y) : v;
  }

  // Everything collected from column `first` on, as whole sectors of col_q.
  template <class T>
  __device__ static void write(const SharedTask& task, uint32_t tile, int64_t first,
                               const unsigned char* collected) {
    constexpr int kVectors = kColumn / 16;
    int at = threadIdx.x % kVectors;
    int64_t offset = tile * int64_t{kColumn} + at * 16;
    if (offset >= task.contracted) return;
#pragma unroll 1
    for (int part = 0; part < kVectors; ++part) {
      int owner = (part * blockDim.x + threadIdx.x) / kVectors, s = swap(owner);
      int64_t column = first + owner * kOwned<T>;
      int left = static_cast<int>(min(task.columns - column, int64_t{kOwned<T>}));
      const unsigned char* bytes = collected + owner * kColumn;
      int8_t* out = task.col_q + column * task.contracted + offset;
#pragma unroll
      for (int c = 0; c < kOwned<T>; ++c) {
        if (c < left) *reinterpret_cast<uint4*>(out) = vector(bytes, s, at);
        bytes += blockDim.x * kColumn;
        out += task.contracted;
      }
    }
  }
};

// Brings a unit's rows into L2, a line a thread.
template <class T>
__device__ void prefetch(const SharedTask& task, const UnitRows& rows, int64_t first) {
  int i = threadIdx.x % kOrder;
  int64_t column = first + threadIdx.x / kOrder * (128 / sizeof(T));
  if (!rows.has(i) || column >= task.columns) return;
  const T* source = static_cast<const T*>(task.g) + rows.row(i) * task.stride + column;
  asm volatile("prefetch.global.L2 [%0];" ::"l"(source));
}

template <class T, int kRank>
__device__ void quantize_unit(const SharedTask& task, const UnitRows& rows, uint32_t unit,
                              int64_t column, Patch<T>& patch, uint32_t most, bool whole,
                              unsigned char* out, float (&sum)[kOwned<T>]) {
  float reciprocal = shared_reciprocal_of(most);  // of row `lane`
  if (kRank != 0) patch.collect_kept(unit, column, shared_reciprocal_of(bound_of_kept(most)), out);
  if (whole && __all_sync(~0u, reciprocal != 0.0f || threadIdx.x % 32 >= kOrder))
    patch.template write_rows<kRank == 0, true>(task, rows, column, reciprocal, out, sum);
  else
    patch.template write_rows<kRank == 0, false>(task, rows, column, reciprocal, out, sum);
}

// A tile of units whose columns the threads of a block or cluster hold.
template <class T, int kRank>
__global__ void __launch_bounds__(kSharedThreads, kSharedBlocksPerSm)
    shared_kernel(const __grid_constant__ SharedTask task, bool cluster) {
  extern __shared__ __align__(16) unsigned char collected[];
  __shared__ Agreement agreement;
  unsigned blocks = cluster_size(cluster), part = blockIdx.x % blocks;
  uint32_t tile = blockIdx.x / blocks;
  uint32_t begin = tile * kTileUnits, end = min(begin + kTileUnits, task.units);
  int64_t first = int64_t{part} * blockDim.x * kOwned<T>;
  int64_t column = first + threadIdx.x * kOwned<T>;
  Patch<T> patch;
  agreement.start(cluster);
  wait_for_predecessor();
  patch.find_lift(task, column, highest_exponent(task), tile == 0);
  UnitRows rows(task, begin), ahead = rows;
  ahead.next();
  float sum[kOwned<T>] = {};
#pragma unroll 1
  for (uint32_t unit = begin; unit < end; ++unit, rows = ahead, ahead.next()) {
    int turn = static_cast<int>(unit - begin);
    bool whole = task.vectors && rows.has(kOrder - 1);
    if (whole)
      patch.template load<true>(task, rows, column);
    else
      patch.template load<false>(task, rows, column);
    if (unit + 1 < end) prefetch<T>(task, ahead, first);
    patch.apply_lift();
    uint32_t of_row[kOrder];
    patch.largest(of_row);
    uint32_t most = agreement.largest(of_row, turn, blocks);
    if (part == 0 && threadIdx.x < 32) write_scales<kRank>(task, rows, unit, most);
    quantize_unit<T, kRank>(task, rows, unit, column, patch, most, whole,
                            Columns<kRank>::place(collected, turn), sum);
  }
  patch.write_sums(task, tile, column, sum);
  __syncthreads();
  Columns<kRank>::template write<T>(task, tile, first, collected);
}

// Rows longer than registers hold: gone over twice, the second time from the caches.
template <class T, int kRank>
__global__ void __launch_bounds__(kSharedThreads, kSharedBlocksPerSm)
    shared_long_kernel(const __grid_constant__ SharedTask task) {
  extern __shared__ __align__(16) unsigned char collected[];
  __shared__ uint32_t most[kTileUnits][kOrder];
  uint32_t tile = blockIdx.x;
  int lane = threadIdx.x % 32;
  int units = static_cast<int>(min(task.units - tile * kTileUnits, uint32_t{kTileUnits}));
  int64_t step = int64_t{blockDim.x} * kOwned<T>, own = threadIdx.x * kOwned<T>;
  Patch<T> patch;
  for (int i = threadIdx.x; i < kTileUnits * kOrder; i += blockDim.x) most[0][i] = 0;
  wait_for_predecessor();
  int highest = highest_exponent(task);  // ends with the block in step
  for (int64_t first = 0; first < task.row_length; first += step) {
    patch.find_lift(task, first + own, highest, tile == 0);
    for (int u = 0; u < units; ++u) {
      patch.template load<false>(task, UnitRows(task, tile * kTileUnits + u), first + own);
      patch.apply_lift();
      uint32_t of_row[kOrder];
      patch.largest(of_row);
#pragma unroll
      for (int i = 0; i < kOrder; ++i)
        if (lane == i) atomicMax(&most[u][i], of_row[i]);
    }
  }
  __syncthreads();
  for (int64_t first = 0; first < task.row_length; first += step) {
    patch.find_lift(task, first + own, highest, false);
    float sum[kOwned<T>] = {};
    for (int u = 0; u < units; ++u) {
      uint32_t unit = tile * kTileUnits + u;
      UnitRows rows(task, unit);
      uint32_t of_lane = lane < kOrder ? most[u][lane] : 0;
      if (first == 0 && threadIdx.x < 32) write_scales<kRank>(task, rows, unit, of_lane);
      patch.template load<false>(task, rows, first + own);
      patch.apply_lift();
      quantize_unit<T, kRank>(task, rows, unit, first + own, patch, of_lane, false,
                              Columns<kRank>::place(collected, u), sum);
    }
    patch.write_sums(task, tile, first + own, sum);
    __syncthreads();
    Columns<kRank>::template write<T>(task, tile, first, collected);
    __syncthreads();
  }
}

// How a unit's columns are spread over threads and blocks.
struct SharedShape {
  int threads, cluster;
  bool resident;
};

inline SharedShape shared_shape(int64_t columns, int owned, bool clusters) {
  auto threads_of = [&](int64_t blocks) {
    int64_t threads = (columns + blocks * owned - 1) / (blocks * owned);
    return (threads + 31) / 32 * 32;
  };
  int cluster = 1;
  while (clusters && cluster < kMostCluster && threads_of(cluster) > kSharedThreads) cluster *= 2;
  int64_t threads = threads_of(cluster);
  if (threads <= kSharedThreads) return {static_cast<int>(threads), cluster, true};
  return {kSharedThreads, 1, false};
}

template <class T, int kRank>
void launch_shared_rank(const SharedTask& task) {
  constexpr int kEach = kOwned<T> * Columns<kRank>::kColumn;
  SharedShape shape = shared_shape(task.row_length, kOwned<T>, task.clusters);
  int64_t tiles = (task.units + kTileUnits - 1) / kTileUnits;
  unsigned threads = static_cast<unsigned>(shape.threads);
  if (!shape.resident) {
    allow_shared<shared_long_kernel<T, kRank>, kSharedThreads * kEach>(task.device);
    return queue_kernel("quantize_shared", shared_long_kernel<T, kRank>,
                        {grid_size(tiles), threads, threads * kEach}, task.stream, task);
  }
  allow_shared<shared_kernel<T, kRank>, kSharedThreads * kEach>(task.device);
  queue_kernel("quantize_shared", shared_kernel<T, kRank>,
               {grid_size(tiles * shape.cluster), threads, threads * kEach, shape.cluster},
               task.stream, task, shape.cluster > 1);
}

template <class T>
void launch_shared(const SharedTask& task) {
  unsigned strips = grid_size((task.columns + kSampleStrip - 1) / kSampleStrip);
  queue_kernel("quantize_shared: sample", sample_kernel<T>, {strips, 512}, task.stream, task);
  if (task.rank == 0) return launch_shared_rank<T, 0>(task);
  launch_shared_rank<T, 8>(task);
}

}  // namespace hot
