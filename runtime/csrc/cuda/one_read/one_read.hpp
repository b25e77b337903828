// What one call of quantize_one_read, quantize_weight, compress_int8 or rescale_int* asks of the
// kernels; the operators are defined in one_read.py.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/common/stream.hpp"

namespace hot {

constexpr int64_t kSampledRows = 256;  // one_read.SAMPLED_ROWS
constexpr int kSampleStrip = 64;       // columns of one block of the sampling kernel
constexpr int kTileUnits = 4;          // units of one block; ops.UNITS_PER_SUM

struct OneReadTask {
  const void* g;
  int64_t rows, columns, stride;  // at most 2^31 - 1 rows, 2^32 - 1 bytes from one to the next
  bool vectors;                   // every row starts on 16 bytes and is whole 16-byte vectors
  int rank;                       // 0 or 8
  uint32_t samples, tokens;       // rows are samples x tokens
  uint32_t units;                 // groups of 16 rows, those of the padding included
  int64_t row_length, contracted;

  uint32_t* sampled;    // per column, bits of the absmax over the sampled rows
  uint32_t* strip_max;  // per kSampleStrip columns, the largest of them

  int8_t* row_q;  // [rows, row_length]
  float* row_scale;
  int8_t* col_q;  // [columns, contracted]
  float* fold;    // [contracted]
  float* peak;    // [units]
  float* equal;   // [columns]
  float* sums;    // [tiles of units, columns], or null

  int device;
  bool clusters;  // the device has thread block clusters
  Stream stream;
};

struct WeightTask {
  const void* weight;
  int64_t outputs, inputs, stride;
  bool inputs_first;   // weight is [inputs, outputs], else [outputs, inputs]
  bool vectors;        // as above
  const float* equal;  // [outputs]
  int64_t length;      // outputs padded to 32
  int8_t* q;           // [inputs, length]
  float* scale;
  Stream stream;
};

void quantize_one_read_bf16(const OneReadTask&);
void quantize_one_read_fp16(const OneReadTask&);
void quantize_one_read_fp32(const OneReadTask&);
void quantize_weight_bf16(const WeightTask&);
void quantize_weight_fp16(const WeightTask&);
void quantize_weight_fp32(const WeightTask&);

}  // namespace hot
