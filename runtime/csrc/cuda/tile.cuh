// The tile every transform kernel works on: 128 rows (8 groups of 16) x 256 bytes of columns, staged
// in shared memory so that rows and columns are both read at full width.
#pragma once

#include "numeric.cuh"

namespace hot {

constexpr int kThreads = 256;
constexpr int kGroups = 8;
constexpr int kTileRows = kGroups * kOrder;
constexpr int kTileBytes = 256;
constexpr int kPitch = kTileBytes + 16;  // the pad keeps row-wise and column-wise reads off one bank

// Which rows of x a tile's groups hold: group b = (g, t) takes token t of samples 16 g ... 16 g + 15.
struct Rows {
  int64_t rows, tokens, blocks;

  __device__ int64_t of(int64_t block, int lane) const {
    if (block >= blocks) return -1;
    int64_t first = tokens == 1
                        ? block * kOrder
                        : static_cast<int64_t>(static_cast<uint32_t>(block) /
                                               static_cast<uint32_t>(tokens)) *
                                  (kOrder * tokens) +
                              static_cast<uint32_t>(block) % static_cast<uint32_t>(tokens);
    int64_t row = first + lane * tokens;
    return row < rows ? row : -1;
  }
};

template <class T>
struct Tile {
  static constexpr int kColumns = kTileBytes / sizeof(T);
  static constexpr int kPerThread = 8 / sizeof(T);  // columns of one 8-byte read
  alignas(16) unsigned char data[kTileRows * kPitch];
  int64_t row[kTileRows];

  __device__ void find_rows(const Rows& rows, int64_t first_block) {
    if (threadIdx.x < kTileRows)
      row[threadIdx.x] = rows.of(first_block + threadIdx.x / kOrder, threadIdx.x % kOrder);
    __syncthreads();
  }

  // Zero where the tile leaves x. `vectors`: every row starts 16-byte aligned and has whole vectors.
  __device__ void load(const T* x, int64_t stride, int64_t columns, int64_t first, bool vectors) {
    if (vectors)
      load_vectors(x, stride, columns, first);
    else
      load_elements(x, stride, columns, first);
    __syncthreads();
  }

  __device__ void load_vectors(const T* x, int64_t stride, int64_t columns, int64_t first) {
    constexpr int kVectors = kTileBytes / 16;
    int vector = threadIdx.x % kVectors;
    int64_t column = first + vector * (16 / sizeof(T));
#pragma unroll
    for (int r = threadIdx.x / kVectors; r < kTileRows; r += kThreads / kVectors) {
      bool inside = row[r] >= 0 && column < columns;
      const T* source = inside ? x + row[r] * stride + column : x;
      uint32_t target = __cvta_generic_to_shared(data + r * kPitch + vector * 16);
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
                   "r"(inside ? 16 : 0));
    }
    asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory");
  }

  __device__ void load_elements(const T* x, int64_t stride, int64_t columns, int64_t first) {
    for (int i = threadIdx.x; i < kTileRows * kColumns; i += kThreads) {
      int r = i / kColumns, c = i % kColumns;
      bool inside = row[r] >= 0 && first + c < columns;
      reinterpret_cast<T*>(data + r * kPitch)[c] =
          inside ? x[row[r] * stride + first + c] : static_cast<T>(0.0f);
    }
  }

  // 16 columns of a row. `swapped` puts columns 8 ... 15 first: half the lanes of a warp read so,
  // which spreads a 16-byte read over all banks; the last butterfly then only changes sign.
  __device__ void read_row(int r, int block, bool swapped, float (&v)[kOrder]) const {
    constexpr int kWords = kOrder * sizeof(T) / 4, kHalf = kWords / 2;
    const unsigned char* source = data + r * kPitch + block * kOrder * sizeof(T);
    uint32_t words[kWords];
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      int word = swapped ? (i + kHalf) % kWords : i;
      *reinterpret_cast<uint4*>(words + i) = *reinterpret_cast<const uint4*>(source + word * 4);
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) unpack(words[i], v + i * Word<T>::kCount, T());
  }

  // The 16 rows of a group, kPerThread columns from column `lane` * kPerThread on.
  __device__ void read_columns(int group, int lane, float (&v)[kPerThread][kOrder]) const {
    const unsigned char* source = data + group * kOrder * kPitch + lane * 8;
#pragma unroll
    for (int i = 0; i < kOrder; ++i) read_pair(source + i * kPitch, i, v);
  }

  __device__ void read_pair(const unsigned char* source, int i,
                            float (&v)[kPerThread][kOrder]) const {
    uint2 words = *reinterpret_cast<const uint2*>(source);
    float both[kPerThread];
    unpack(words.x, both, T());
    unpack(words.y, both + Word<T>::kCount, T());
#pragma unroll
    for (int c = 0; c < kPerThread; ++c) v[c][i] = both[c];
  }
};

// The transposed tile on its way out: per column one chunk of kChunk bytes for each group, chunks
// exchanged by the column's lane so that neither side of the transposition meets one bank.
template <int kChunk, int kColumns>
struct Transposed {
  static constexpr int kLine = kGroups * kChunk;
  static constexpr int kPerLane = kColumns / 32;
  alignas(16) unsigned char data[kColumns * kLine];

  __device__ static int swizzle(int column) { return (column / kPerLane) % kGroups; }

  __device__ unsigned char* chunk(int column, int group) {
    return data + column * kLine + (group ^ swizzle(column)) * kChunk;
  }

  __device__ uint4 vector(int column, int i) const {
    const unsigned char* line = data + column * kLine;
    int swap = swizzle(column);
    if constexpr (kChunk == 16) return *reinterpret_cast<const uint4*>(line + (i ^ swap) * 16);
    uint4 v = *reinterpret_cast<const uint4*>(line + (i ^ swap / 2) * 16);
    return swap % 2 ? make_uint4(v.z, v.w, v.x, v.y) : v;
  }

  // Columns first ... of out [columns, length] bytes, from byte `offset` on.
  __device__ void store(unsigned char* out, int64_t columns, int64_t length, int64_t first,
                        int64_t offset) const {
    constexpr int kVectors = kLine / 16;
#pragma unroll
    for (int n = threadIdx.x; n < kColumns * kVectors; n += kThreads) {
      int column = n / kVectors, i = n % kVectors;
      if (first + column < columns && offset + i * 16 < length)
        *reinterpret_cast<uint4*>(out + (first + column) * length + offset + i * 16) =
            vector(column, i);
    }
  }
};

}  // namespace hot
