// Torch-free interface to the kernels of convolutions: unfolding int8 operands and adding products
// up where the kernel lay.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "combine.hpp"

namespace hot {

// Three spatial dimensions, missing ones of size 1: small position p and kernel offset k meet at
// p * stride + k * dilation - padding of the big tensor.
struct ConvGeometry {
  int batch, small[3], big[3], kernel[3], stride[3], padding[3], dilation[3];
};

// Rows [first, first + rows) of the unfolded big operand, row k * channels + c. source null: ones,
// the mask of what lies inside. tile: small positions of a Hadamard tile, used if kept != 0.
struct UnfoldTask {
  const int8_t* source;  // [channels, source_stride]
  int64_t source_stride;
  ConvGeometry conv;
  int channels, first, rows;
  int tile[3], tiles[3];
  uint32_t kept;  // bits of the coefficients kept of a tile's transform; 0: no transform
  bool narrow;    // sums divided by 16, half up
  int8_t* out;    // [rows, length]
  int64_t length;
  cudaStream_t stream;
};

void unfold(const UnfoldTask&);

// total[r] = scale[r] * sum of row r.
struct RowSumTask {
  const int8_t* x;
  int rows;
  int64_t length;
  const float* scale;
  float* total;
  cudaStream_t stream;
};

void row_sums(const RowSumTask&);

// scale[row] = factor * big_scale[row % channels] for n rows.
void repeat_scale(const float* big_scale, int channels, float factor, float* scale, int n,
                  cudaStream_t stream);

// out[s, first + j] = part[s, j] + its rank-1 terms; out [small, all].
struct FinishTask {
  const float* part;  // [small, columns]
  int64_t small, columns, first, all, channels;
  const float *offset_total, *big_zero;    // [small, all / channels], [channels]; or null
  const float *small_zero, *column_total;  // [small], [columns]; or null
  float offset_factor;
  void* out;
  OutType type;
  cudaStream_t stream;
};

void finish(const FinishTask&);

// out [samples, big positions, channels] = products [samples * small positions, kk * channels].
struct FoldTask {
  const float* products;
  ConvGeometry conv;  // batch: the samples of this call
  int64_t channels;
  void* out;
  OutType type;
  cudaStream_t stream;
};

void fold(const FoldTask&);

}  // namespace hot
