// What one call of quantize_rows, quantize_columns or quantize_grad asks of the kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace hot {

struct QuantizeTask {
  const void* x;
  int64_t rows, columns, stride;  // at most 2^31 - 1 rows, 2^32 - 1 bytes from one to the next
  bool vectors;                   // every row starts on 16 bytes and is whole 16-byte vectors
  bool stochastic;
  int device, sm_count;

  bool want_rows;
  bool per_row;
  float row_qmax;
  int64_t row_length;  // of row_q, the columns padded to 32
  bool row_packed;     // INT4, two values a byte
  int8_t* row_q;
  float* row_scale;
  const float* factors;  // of columns, by which they are multiplied; may be null

  bool want_columns;
  bool per_column;
  float column_qmax;
  int rank;
  int64_t samples, tokens;  // rows are samples x tokens, see reference._transform_rows
  int64_t blocks;           // groups of 16 rows
  int64_t contracted;       // length of a row of column_q
  int8_t* column_q;
  float* column_scale;

  // For the ways in two passes, zeroed by the caller. absmax: bits of non-negative floats, one for
  // all when not per row/column.
  uint32_t* row_absmax;
  uint32_t* column_absmax;

  cudaStream_t stream;
};

// Rows in one pass: a block's 256 threads hold a row, 6 blocks of 16 columns each.
constexpr int kRowThreads = 256, kMostRowBlocks = 6;

inline bool rows_in_one_pass(const QuantizeTask& task) {
  return task.per_row && task.row_length <= int64_t{16} * kRowThreads * kMostRowBlocks;
}

void quantize_rows_bf16(const QuantizeTask&);
void quantize_rows_fp16(const QuantizeTask&);
void quantize_rows_fp32(const QuantizeTask&);
void quantize_grad_bf16(const QuantizeTask&);
void quantize_grad_fp16(const QuantizeTask&);
void quantize_grad_fp32(const QuantizeTask&);
void quantize_columns_bf16(const QuantizeTask&);
void quantize_columns_fp16(const QuantizeTask&);
void quantize_columns_fp32(const QuantizeTask&);

// `count` int8 values, a multiple of 16, to two a byte: operands of the INT4 product.
void pack_int4(const int8_t* q, uint8_t* packed, int64_t count, cudaStream_t stream);

}  // namespace hot
