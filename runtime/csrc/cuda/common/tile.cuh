// The tile every transform kernel works on: 128 rows (8 groups of 16) x 256 bytes of columns,
// staged in shared memory so that rows and columns are both read at full width.
#pragma once

#include "cuda/common/numeric.cuh"

namespace hot {

constexpr int kThreads = 256;
constexpr int kGroups = 8;
constexpr int kTileRows = kGroups * kOrder;
constexpr int kTileBytes = 256;
constexpr int kPitch =
    kTileBytes + 16;  // the pad keeps row-wise and column-wise reads off one bank

// x as the kernels see it. Row s * tokens + t is token t of sample s, and group b = (g, t) of a
// tile takes token t of samples 16 g ... 16 g + 15. Rows fit 31 bits, a row's bytes 32.
struct Matrix {
  const void* x;
  uint32_t rows, samples, tokens;
  uint32_t row_bytes;  // from one row to the next
  int64_t columns;
  bool vectors;                // every row starts on 16 bytes and is whole 16-byte vectors
  const uint32_t* row_absmax;  // loaded along with a row if not null: its own, or one for all
  bool per_row;
};

// Steps through the groups of a tile without dividing at each.
struct GroupWalk {
  uint32_t group, token;

  __device__ GroupWalk(const Matrix& m, uint32_t block)
      : group(m.tokens == 1 ? block : block / m.tokens),
        token(m.tokens == 1 ? 0 : block % m.tokens) {}

  // Row that lane `i` of the group takes, -1 when x has no such sample.
  __device__ int row(const Matrix& m, uint32_t i) const {
    uint32_t sample = group * kOrder + i;
    return sample < m.samples ? static_cast<int>(sample * m.tokens + token) : -1;
  }

  __device__ void next(const Matrix& m) {
    bool wrap = ++token == m.tokens;
    group += wrap;
    token = wrap ? 0 : token;
  }
};

template <class T>
struct Tile {
  static constexpr int kColumns = kTileBytes / sizeof(T);
  static constexpr int kPerThread = 8 / sizeof(T);  // columns of one 8-byte read
  alignas(16) unsigned char data[kTileRows * kPitch];
  int row[kTileRows];          // of x, -1 where the tile leaves it
  uint32_t absmax[kTileRows];  // of the row, when asked for

  // Per-column arrays in shared memory hold column lane * kPerThread + c at c * 32 + lane, so that
  // the threads which own whole columns of a group meet no bank twice.
  __device__ static int column_at(int i) { return i % 32 * kPerThread + i / 32; }

  // Starts loading, zero where the tile leaves x; all there after wait() and a barrier.
  __device__ void start(const Matrix& m, uint32_t first_block, int64_t first_column) {
    constexpr int kVectors = kTileBytes / 16;
    static_assert(kThreads / kVectors == kOrder, "a pass over the tile's threads is one group");
    int vector = threadIdx.x % kVectors, i = threadIdx.x / kVectors;
    int64_t column = first_column + vector * (16 / sizeof(T));
    int64_t left = m.columns - column;
    const unsigned char* source = static_cast<const unsigned char*>(m.x) + column * sizeof(T);
    unsigned char* target = data + i * kPitch + vector * 16;
    GroupWalk walk(m, first_block);
    if (m.vectors) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g, walk.next(m))
        copy_vector(target + g * kOrder * kPitch, source, m, note(walk.row(m, i), g, i, vector, m),
                    left);
    } else {
#pragma unroll 1
      for (int g = 0; g < kGroups; ++g, walk.next(m))
        copy_elements(target + g * kOrder * kPitch, source, m,
                      note(walk.row(m, i), g, i, vector, m), left);
    }
  }

  __device__ int note(int from, int g, int i, int vector, const Matrix& m) {
    if (vector != 0) return from;
    row[g * kOrder + i] = from;
    if (m.row_absmax != nullptr && from >= 0)
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(
                       static_cast<uint32_t>(__cvta_generic_to_shared(absmax + g * kOrder + i))),
                   "l"(m.row_absmax + (m.per_row ? from : 0)));
    return from;
  }

  __device__ static uint64_t offset(const Matrix& m, int row) {
    return static_cast<uint64_t>(static_cast<uint32_t>(row)) * m.row_bytes;
  }

  // With a size of 0 the address is not read, so it may be anything.
  __device__ static void copy_vector(unsigned char* target, const unsigned char* source,
                                     const Matrix& m, int row, int64_t left) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     static_cast<uint32_t>(__cvta_generic_to_shared(target))),
                 "l"(source + offset(m, row)), "r"(row >= 0 && left > 0 ? 16 : 0));
  }

  __device__ static void copy_elements(unsigned char* target, const unsigned char* source,
                                       const Matrix& m, int row, int64_t left) {
    const T* from = reinterpret_cast<const T*>(source + (row < 0 ? 0 : offset(m, row)));
#pragma unroll 1
    for (int e = 0; e < static_cast<int>(16 / sizeof(T)); ++e)
      reinterpret_cast<T*>(target)[e] = row >= 0 && e < left ? from[e] : static_cast<T>(0.0f);
  }

  __device__ static void wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

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

  __device__ static void read_pair(const unsigned char* source, int i,
                                   float (&v)[kPerThread][kOrder]) {
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
  __device__ void store(unsigned char* out, uint32_t columns, uint32_t length, uint32_t first,
                        uint32_t offset) const {
    constexpr int kVectors = kLine / 16;
    int i = threadIdx.x % kVectors;
    if (offset + i * 16 >= length) return;
    out += offset + i * 16;
#pragma unroll
    for (int column = threadIdx.x / kVectors; column < kColumns; column += kThreads / kVectors)
      if (first + column < columns)
        *reinterpret_cast<uint4*>(out + static_cast<uint64_t>(first + column) * length) =
            vector(column, i);
  }
};

}  // namespace hot
