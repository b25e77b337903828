// A unit's rows in registers.
#pragma once

#include <type_traits>

#include "cuda/one_read/column_buffer.cuh"
#include "cuda/one_read/sample.cuh"

namespace hot {

// What one row's integers are made with.
struct RowScale {
  float reciprocal;
  int halvings;
};

// Values as they are transformed, in place: bf16 for elements of 2 bytes, whose sums are rounded as
// they are made, else fp32.
template <class T>
using Element = std::conditional_t<sizeof(T) == 4, float, __nv_bfloat16>;

__device__ inline void butterfly(uint32_t& low, uint32_t& high, float) {
  float a = __uint_as_float(low), b = __uint_as_float(high);
  low = __float_as_uint(__fadd_rn(a, b));
  high = __float_as_uint(__fsub_rn(a, b));
}
__device__ inline void butterfly(uint32_t& low, uint32_t& high, __nv_bfloat16) {
  uint32_t sum;
  asm("{\n.reg .b32 one;\n"
      "mov.b32 one, 0x3f803f80;\n"
      "fma.rn.bf16x2 %0, %1, one, %2;\n}"
      : "=r"(sum)
      : "r"(low), "r"(high));
  asm("{\n.reg .b32 less;\n"
      "mov.b32 less, 0xbf80bf80;\n"
      "fma.rn.bf16x2 %0, %0, less, %1;\n}"
      : "+r"(high)
      : "r"(low));
  low = sum;
}
// Of a word's two halves.
__device__ inline void butterfly_within(uint32_t& word) {
  uint32_t swapped = __byte_perm(word, word, 0x1032);
  asm("{\n.reg .b32 signs;\n"
      "mov.b32 signs, 0xbf803f80;\n"
      "fma.rn.bf16x2 %0, %0, signs, %1;\n}"
      : "+r"(word)
      : "r"(swapped));
}

// The largest magnitude of some words, as a float's bits; NaN first.
template <int kWords>
__device__ inline float largest_of(const uint32_t (&w)[kWords], float) {
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < kWords; ++i) most = max_nan(most, fabsf(__uint_as_float(w[i])));
  return most;
}
template <int kWords>
__device__ inline float largest_of(const uint32_t (&w)[kWords], __nv_bfloat16) {
  uint32_t most = w[0];
#pragma unroll
  for (int i = 1; i < kWords; ++i)
#if __CUDA_ARCH__ >= 860
    asm("max.NaN.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(most) : "r"(w[i]));
#else
    asm("{\n.reg .b32 a, b;\n"
        "abs.bf16x2 a, %0;\n"
        "abs.bf16x2 b, %1;\n"
        "max.NaN.bf16x2 %0, a, b;\n}"
        : "+r"(most)
        : "r"(w[i]));
#endif
  float v[2];
  unpack(most, v, __nv_bfloat16());
  return max_nan(fabsf(v[0]), fabsf(v[1]));
}

// A block of 16 columns of some of a unit's rows: what one thread has, to transform it by itself.
// Threads of a warp whose numbers are kBlocks apart share a block's 16 rows.
template <class T>
struct Patch {
  static constexpr int kRows = 8 / sizeof(T), kSharers = kOrder / kRows, kBlocks = 32 / kSharers;
  static constexpr int kWords = 4 * sizeof(T), kEach = Word<T>::kCount;  // of a row, in a word
  uint32_t words[kRows][kWords];
  float lift;  // a power of two, equal's inverse: of what the block is transformed to

  // `writes`: the inverse to `equal`, too.
  __device__ void find_lift(const OneReadTask& task, const Sampled& sampled, int64_t column,
                            bool writes) {
    int by = sampled.lift(task, column);
    lift = power_of_2(by);
    if (!writes || first_row() != 0 || column >= task.columns) return;
#pragma unroll
    for (int c = 0; c < kOrder; ++c) task.equal[column + c] = power_of_2(-by);
  }

  // The first of its rows within the unit, and its block within the thread block.
  __device__ static int first_row() { return threadIdx.x % 32 / kBlocks * kRows; }
  __device__ static int block() { return threadIdx.x / 32 * kBlocks + threadIdx.x % kBlocks; }

  // From `column` on. kWhole: all rows exist and are whole vectors.
  template <bool kWhole>
  __device__ void load(const OneReadTask& task, const UnitRows& rows, int64_t column) {
    int64_t left = task.columns - column;
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      int i = first_row() + j;
      const T* source = static_cast<const T*>(task.g) + rows.row(i) * task.stride + column;
#pragma unroll
      for (int w = 0; w < kWords; w += 4) {
        int rest = static_cast<int>(min(left, int64_t{kOrder})) - w * kEach;
        if (!kWhole && !rows.has(i)) rest = 0;
        uint4 v = load_vector(source + w * kEach, rest, kWhole || task.vectors);
        words[j][w] = v.x, words[j][w + 1] = v.y, words[j][w + 2] = v.z, words[j][w + 3] = v.w;
      }
    }
  }

  // 16 bytes, of which `left` elements exist.
  __device__ static uint4 load_vector(const T* source, int left, bool vectors) {
    if (vectors)
      return left > 0 ? __ldcs(reinterpret_cast<const uint4*>(source)) : make_uint4(0, 0, 0, 0);
    constexpr int kCount = 16 / sizeof(T);
    alignas(16) T v[kCount];
#pragma unroll
    for (int c = 0; c < kCount; ++c) v[c] = c < left ? source[c] : static_cast<T>(0.0f);
    return *reinterpret_cast<uint4*>(v);
  }

  // Every row, from here on 4 times the orthonormal transform of it.
  __device__ void transform() {
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      if constexpr (std::is_same_v<T, __half>) to_bf16(words[j]);
      if constexpr (kEach == 2)
#pragma unroll
        for (int w = 0; w < kWords; ++w) butterfly_within(words[j][w]);
#pragma unroll
      for (int d = 1; d < kWords; d *= 2)
#pragma unroll
        for (int w = 0; w < kWords; ++w)
          if (!(w & d)) butterfly(words[j][w], words[j][w + d], Element<T>());
    }
  }

  __device__ static void to_bf16(uint32_t (&row)[kWords]) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      float v[2];
      unpack(row[w], v, __half());
      __nv_bfloat162 pair = __floats2bfloat162_rn(v[0], v[1]);
      row[w] = *reinterpret_cast<uint32_t*>(&pair);
    }
  }

  // A row's values: as they came, or transformed.
  template <class Held>
  __device__ void row(int j, float (&v)[kOrder], Held) const {
#pragma unroll
    for (int w = 0; w < kWords; ++w) unpack(words[j][w], v + w * kEach, Held());
  }

  // Keeps the compiler from holding unpacked values over what comes next: there is no room.
  __device__ void forget_unpacked() {
#pragma unroll
    for (int j = 0; j < kRows; ++j)
#pragma unroll
      for (int w = 0; w < kWords; ++w) asm volatile("" : "+r"(words[j][w]) : : "memory");
  }

  // Bits of 4 times the absmax of its rows, transformed and lifted, in this warp.
  __device__ void largest(uint32_t (&of_row)[kRows]) const {
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      float most = __fmul_rn(largest_of(words[j], Element<T>()), lift);
#pragma unroll
      for (int d = 1; d < kBlocks; d *= 2) most = max_nan(most, __shfl_xor_sync(~0u, most, d));
      of_row[j] = __float_as_uint(most);
    }
  }

  // The rows as they came, added to the sums of the kOwned columns that this thread keeps.
  __device__ void add_to(float (&sum)[kOwned<T>]) const {
    float total[kOrder];
    row(0, total, T());
#pragma unroll
    for (int j = 1; j < kRows; ++j) {
      float v[kOrder];
      row(j, v, T());
#pragma unroll
      for (int c = 0; c < kOrder; ++c) total[c] += v[c];
    }
    scatter<16, kOrder / 2>(total);
#pragma unroll
    for (int c = 0; c < kOwned<T>; ++c) sum[c] += total[c];
  }

  // Half of what is left goes to the sharer that keeps it, until each has its own.
  template <int kLanes, int kHalf>
  __device__ static void scatter(float (&total)[kOrder]) {
    bool upper = threadIdx.x & kLanes;
#pragma unroll
    for (int c = 0; c < kHalf; ++c) {
      float given = upper ? total[c] : total[c + kHalf];
      float kept = upper ? total[c + kHalf] : total[c];
      total[c] = kept + __shfl_xor_sync(~0u, given, kLanes);
    }
    if constexpr (kLanes > kBlocks) scatter<kLanes / 2, kHalf / 2>(total);
  }

  __device__ static void write_sums(const OneReadTask& task, uint32_t tile, int64_t column,
                                    const float (&sum)[kOwned<T>]) {
    int64_t first = column + threadIdx.x % 32 / kBlocks * kOwned<T>;
    float* out = task.sums + tile * task.columns + first;
#pragma unroll
    for (int c = 0; c < kOwned<T>; ++c)
      if (first + c < task.columns) out[c] = sum[c];
  }

  // The transformed rows' integers, and, for kColumnsToo, the same by columns into `collected`.
  // kWhole: all rows exist, and no row's reciprocal is 0. kShorter: columns get fewer bits of some
  // rows. mine: of row `lane`.
  template <bool kColumnsToo, bool kWhole, bool kShorter>
  __device__ void write_rows(const OneReadTask& task, const UnitRows& rows, int64_t column,
                             int unit, const RowScale& mine, unsigned char* collected) {
    uint32_t by_columns[kRows][4];
    uint32_t place = static_cast<uint32_t>(column / kOrder) * kColHash;
    // differs between the forms of this code, whose common part would else be moved before both
    asm volatile("// %1" : "+r"(place) : "n"(2 * kWhole + kShorter));
    forget_unpacked();
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      int i = first_row() + j;
      RowScale scale = {__shfl_sync(~0u, mine.reciprocal, i), 0};
      if (kShorter) scale.halvings = __shfl_sync(~0u, mine.halvings, i);
      float v[kOrder];
      uint32_t q[4];
      row(j, v, Element<T>());
      quantize_row<kWhole, kShorter>(v, scale, rows.row(i) * kRowHash ^ place, q, by_columns[j]);
      int8_t* out = task.row_q + rows.row(i) * task.row_length + column;
      if (column < task.row_length && (kWhole || rows.has(i)))
        *reinterpret_cast<uint4*>(out) = make_uint4(q[0], q[1], q[2], q[3]);
    }
    if constexpr (kColumnsToo) collect(by_columns, unit, collected);
  }

  template <bool kWhole, bool kShorter>
  __device__ void quantize_row(float (&v)[kOrder], const RowScale& scale, uint32_t place,
                               uint32_t (&q)[4], uint32_t (&shorter)[4]) const {
    uint32_t of[kOrder], less[kOrder];
    float factor = 0.25f * lift * scale.reciprocal;
#pragma unroll
    for (int c = 0; c < kOrder; ++c) {
      if (!kWhole && scale.reciprocal == 0.0f) v[c] = 0.0f;
      uint32_t bits = __float_as_uint(__fmaf_rn(v[c], factor, 12582912.0f));
      uint32_t hashed = (bits ^ place ^ c * kLaneHash) * kMixHash;
      of[c] = bits + (hashed >> 24);
      if (kShorter) less[c] = bits + (hashed >> 24 - scale.halvings) >> scale.halvings;
    }
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      q[w] = second_bytes(of[4 * w], of[4 * w + 1], of[4 * w + 2], of[4 * w + 3]);
      shorter[w] =
          kShorter ? second_bytes(less[4 * w], less[4 * w + 1], less[4 * w + 2], less[4 * w + 3])
                   : q[w];
    }
  }

  // Bytes of rows to bytes of columns.
  __device__ static void collect(const uint32_t (&q)[kRows][4], int unit,
                                 unsigned char* collected) {
    using Buffer = ColumnBuffer<0>;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      uint32_t low = __byte_perm(q[0][w], q[1][w], 0x5140);   // columns 0 and 1, two rows each
      uint32_t high = __byte_perm(q[0][w], q[1][w], 0x7362);  // columns 2 and 3
      if constexpr (kRows == 4) {
        uint32_t more = __byte_perm(q[2][w], q[3][w], 0x5140);
        uint32_t most = __byte_perm(q[2][w], q[3][w], 0x7362);
        uint32_t columns[4] = {__byte_perm(low, more, 0x5410), __byte_perm(low, more, 0x7632),
                               __byte_perm(high, most, 0x5410), __byte_perm(high, most, 0x7632)};
#pragma unroll
        for (int c = 0; c < 4; ++c)
          *reinterpret_cast<uint32_t*>(
              collected + Buffer::place(block(), 4 * w + c, unit, first_row())) = columns[c];
      } else {
#pragma unroll
        for (int c = 0; c < 4; ++c)
          *reinterpret_cast<uint16_t*>(collected +
                                       Buffer::place(block(), 4 * w + c, unit, first_row())) =
              static_cast<uint16_t>((c < 2 ? low : high) >> 16 * (c % 2));
      }
    }
  }

  // HLA: the kept rows of the unit, transformed along both, by columns into `collected`.
  __device__ void collect_kept(uint32_t unit_of_task, int64_t column, int unit, float reciprocal,
                               unsigned char* collected) const {
    constexpr uint32_t kKept = low_pass_mask(8);
    uint32_t place = static_cast<uint32_t>(column / kOrder) * kColHash;
    float v[kRows][kOrder];
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      row(j, v[j], Element<T>());
#pragma unroll
      for (int c = 0; c < kOrder; ++c) v[j][c] = __fmul_rn(v[j][c], 0.25f * lift);
    }
#pragma unroll
    for (int c = 0; c < kOrder; ++c) {
      rows_butterflies(v, c);
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        int n = first_row() + j, k = __popc(kKept & ((1u << n) - 1));
        uint32_t row_place = (unit_of_task * 8 + k) * kRowHash;
        float value = reciprocal == 0.0f ? 0.0f : v[j][c];
        uint32_t q = round_fixed(value, 0.25f * reciprocal, row_place ^ place ^ c * kLaneHash);
        if (kKept >> n & 1)
          collected[ColumnBuffer<8>::place(block(), c, unit, k)] =
              static_cast<unsigned char>(q >> 8);
      }
    }
  }

  // Of the unit's 16 values of one column, at distance 1, 2, 4 and 8: its own, then its sharers'.
  __device__ static void rows_butterflies(float (&v)[kRows][kOrder], int c) {
#pragma unroll
    for (int d = 1; d < kOrder; d *= 2) {
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        if (d >= kRows) {
          int lanes = d / kRows * kBlocks;
          float other = __shfl_xor_sync(~0u, v[j][c], lanes);
          v[j][c] = threadIdx.x & lanes ? __fsub_rn(other, v[j][c]) : __fadd_rn(v[j][c], other);
        } else if (!(j & d)) {
          float low = v[j][c], high = v[j + d][c];
          v[j][c] = __fadd_rn(low, high);
          v[j + d][c] = __fsub_rn(low, high);
        }
      }
    }
  }
};

}  // namespace hot
