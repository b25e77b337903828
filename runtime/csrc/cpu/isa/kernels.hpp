// What an ISA variant provides: plain functions on raw memory, free of torch, one table each.
#pragma once

#include <cstdint>

#include "cpu/common/scale.hpp"

namespace hot {

/// Element types of float operands. The 16-bit ones are bit patterns: no header gives them inline
/// functions, which a linker could otherwise share between ISA variants.
enum class Float : int { f32, bf16, f16 };
struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

constexpr int kLanes = 16;          // columns handled together; also the Hadamard order
constexpr int kTile = 64;           // K-elements of one column written together: a cache line
constexpr int kStrip = 64;          // widest strip of columns one task works on
constexpr int kContractAlign = 32;  // ops.CONTRACT_ALIGN

/// A contiguous float matrix.
struct Matrix {
  const void* data;
  Float type;
  int64_t rows, cols;
  const float* factors = nullptr;  // of columns, by which rows are multiplied; may be null
};

struct Rounding {
  int qmax;
  bool stochastic;
};

/// Output of quantize_rows: q [rows, padded_cols], scale [rows].
struct RowOutput {
  int8_t* q;
  float* scale;
  int64_t padded_cols;
};

/// How rows are grouped by quantize_columns. A unit is one row (rank 0) or one group of 16 rows,
/// giving `rank` rows of the contracted dimension.
struct Grouping {
  int rank;
  uint32_t kept;  // bit i: coefficient i of H16 is kept
  int64_t tokens, samples, units;
};

// static: an inline function with external linkage could be linked from another ISA's object
static inline int64_t rows_per_unit(const Grouping& g) { return g.rank == 0 ? 1 : g.rank; }

/// Columns [column, column + width) and units [unit, unit + units) of one task.
struct ColumnTask {
  int64_t column;
  int width;
  int64_t unit, units;
};

/// Width of a task's rows in a gathered buffer.
static inline int lanes_of(const ColumnTask& task) {
  return (task.width + kLanes - 1) / kLanes * kLanes;
}

/// Output of quantize_columns: q [cols, k].
struct ColumnOutput {
  int8_t* q;
  int64_t k;
};

/// Dequantisation of int32 sums [rows, n]; terms may be null together.
struct Epilogue {
  const int32_t* const* parts;  // the product is the sum of these (K is split to avoid overflow)
  int num_parts;
  const float *row_scale, *col_scale, *row_term, *col_term;
  void* out;  // may be parts[0] itself when type is f32
  Float type;
  int64_t n;
  int64_t out_stride;  // elements between rows of out
};

struct IntProduct {
  const int8_t *a, *b;  // [rows, k], [n, k]
  int64_t n, k;
  int64_t a_stride, b_stride;  // elements between rows
  int32_t* out;                // [rows, n]
};

/// A convolution in three spatial dimensions (missing ones have size 1): small position p and
/// kernel offset k meet at p * stride + k * dilation - padding of the big tensor.
struct Convolution {
  int64_t batch, small[3], big[3], kernel[3], stride[3], padding[3], dilation[3];
};

/// Adds the products of one sample's small positions to g_x.
struct Fold {
  const Convolution* conv;
  const int32_t* product;                 // [positions, kk, channels], from position `first` on
  int64_t first;                          // small position within the sample
  const float *row_scale, *column_scale;  // [positions], [kk, channels]
  float* out;                             // the sample's [big positions, channels]
  int64_t channels;
};

/// Sixteen elements of n tiles, an array each, to the kept sums of their transform, divided by 16,
/// half up.
struct Tiles {
  const int8_t* elements[16];
  int64_t n;
  uint32_t kept;
  int8_t* out;  // [kept, n]
};

struct Kernels {
  const char* name;
  /// Bits of the absmax of each transformed row [begin, end) into absmax.
  void (*rows_absmax)(const Matrix&, int64_t begin, int64_t end, uint32_t* absmax);
  /// Transforms and quantises rows [begin, end), by their own scale or, if not null, by `shared`.
  /// buffer: padded_cols zeros.
  void (*quantize_rows)(const Matrix&, int64_t begin, int64_t end, Rounding, const Scale* shared,
                        float* buffer, const RowOutput&);
  /// Transforms a task's columns into `values` [units * rows_per_unit rounded up to 64, lanes],
  /// the tail zero, and raises absmax [lanes] to the bits of the largest magnitude.
  void (*gather_columns)(const Matrix&, const Grouping&, const ColumnTask&, float* values,
                         uint32_t* absmax);
  /// Quantises gathered values, whose first row is row `first` of K and which end at `end`, into
  /// q.
  void (*emit_columns)(const float* values, const ColumnTask&, int64_t first, int64_t end,
                       const float* reciprocal, Rounding, const ColumnOutput&);
  /// Dequantises rows [begin, end).
  void (*epilogue)(const Epilogue&, int64_t begin, int64_t end);
  /// Exact product of rows [begin, end), for machines whose library product saturates.
  void (*int_product)(const IntProduct&, int64_t begin, int64_t end);
  /// Folds `positions` small positions into channels [begin, end) of g_x.
  void (*fold)(const Fold&, int64_t positions, int64_t begin, int64_t end);
  /// Rounds n floats to `type`.
  void (*store_floats)(const float* values, int64_t n, Float type, void* out);
  void (*transform_tiles)(const Tiles&);
};

/// The variants, the slowest first.
enum class Isa { scalar, avx512 };

/// The kernels of one variant; raises if this build or this machine has none such.
const Kernels& kernels_of(Isa isa);
/// Those of the fastest variant this machine runs.
const Kernels& best_kernels();
/// Whether this machine has VNNI (int8 dot products without saturation).
bool has_vnni();

}  // namespace hot
