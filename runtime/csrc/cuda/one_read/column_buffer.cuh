// A tile's columns on their way from registers to memory.
#pragma once

#include "cuda/one_read/arithmetic.cuh"

namespace hot {

// The buffer that collects a tile's columns, kColumn bytes each. The 8 blocks of 16 columns that a
// warp writes at once would meet in one bank: they exchange units, and columns with a neighbour.
template <int kRank>
struct ColumnBuffer {
  static constexpr int kPart = kRank == 0 ? kOrder : 8, kColumn = kTileUnits * kPart;

  // Byte `at` of unit `unit`'s part of column `c` of block `block`.
  __device__ static int place(int block, int c, int unit, int at) {
    return (block * kOrder + exchanged(block, c)) * kColumn +
           ((unit ^ (block & kMask) * (kRank == 0 ? 1 : 2)) * kPart) + at;
  }

  // Everything collected from column `first` on, as whole sectors of col_q.
  template <class T>
  __device__ static void write(const OneReadTask& task, uint32_t tile, int64_t first,
                               const unsigned char* collected) {
    int64_t total = (task.columns + kOrder - 1) / kOrder * kOrder;
    int at = threadIdx.x % kVectors;
    int64_t offset = tile * int64_t{kColumn} + at * 16;
    if (offset >= task.contracted) return;
    int own = static_cast<int>(blockDim.x) * kOwned<T>, step = blockDim.x / kVectors;
#pragma unroll 4
    for (int column = threadIdx.x / kVectors; column < own; column += step) {
      if (first + column >= total) break;
      int block = column / kOrder, c = exchanged(block, column % kOrder);
      const unsigned char* bytes = collected + (block * kOrder + c) * kColumn;
      *reinterpret_cast<uint4*>(task.col_q + (first + column) * task.contracted + offset) =
          *reinterpret_cast<const uint4*>(bytes + (at ^ (block & kMask)) * 16);
    }
  }

 private:
  static constexpr int kVectors = kColumn / 16, kMask = kVectors - 1;

  __device__ static int exchanged(int block, int c) { return c ^ (block >> 2 & 1); }
};

}  // namespace hot
