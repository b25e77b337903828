// A unit's rows in registers.
#pragma once

#include "cuda/one_read/arithmetic.cuh"

namespace hot {

// 16 rows of one thread's columns. kWhole: all rows exist and are whole vectors.
template <class T>
struct Patch {
  static constexpr int kColumns = kOwned<T>;
  uint2 words[kOrder];
  Lift<T> lift;

  // equal's inverse, written by the first unit's block.
  __device__ void find_lift(const OneReadTask& task, int64_t column, int highest, bool writes) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      bool inside = column + c < task.columns;
      int by = min(highest - exponent_of(inside ? task.sampled[column + c] : 0), kMostLift);
      lift.by[c] = power_of_2(by - kMostLift);
      if (writes && inside) task.equal[column + c] = power_of_2(-by);
    }
  }

  template <bool kWhole>
  __device__ void load(const OneReadTask& task, const UnitRows& rows, int64_t column) {
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
  __device__ void write_rows(const OneReadTask& task, const UnitRows& rows, int64_t first,
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
  __device__ void write_sums(const OneReadTask& task, uint32_t tile, int64_t first,
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

}  // namespace hot
