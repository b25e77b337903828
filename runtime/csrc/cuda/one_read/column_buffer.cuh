// A tile's columns on their way from registers to memory.
#pragma once

#include "cuda/one_read/arithmetic.cuh"

namespace hot {

// The buffer that collects a tile's columns: column c of thread t has kColumn bytes at
// (c * threads + t) * kColumn, a unit's part exchanged by thread so that no bank is met twice.
template <int kRank>
struct ColumnBuffer {
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
  __device__ static void write(const OneReadTask& task, uint32_t tile, int64_t first,
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

}  // namespace hot
