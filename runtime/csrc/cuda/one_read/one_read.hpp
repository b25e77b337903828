// What one call of quantize_one_read asks of the kernels; the operator is defined in one_read.py.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/common/stream.hpp"

namespace hot {

constexpr int kTileUnits = 4;    // units of one block; sizes.UNITS_PER_SUM
constexpr int kEqualParts = 24;  // one_read.EQUAL_PARTS
constexpr int kPartSlices = 16;  // of the sampled rows

struct OneReadTask {
  const void* g;
  int64_t rows, columns, stride;  // at most 2^31 - 1 rows, 2^32 - 1 bytes from one to the next
  bool vectors;                   // every row starts on 16 bytes and is whole 16-byte vectors
  int rank;                       // 0 or 8
  uint32_t samples, tokens;       // rows are samples x tokens
  uint32_t units;                 // groups of 16 rows, those of the padding included
  int64_t row_length, contracted;
  bool fused;         // its parts are made equal
  uint32_t* sampled;  // [kEqualParts, kPartSlices], bits of the absmax over the sampled rows

  int8_t* row_q;  // [rows, row_length]
  float* row_scale;
  int8_t* col_q;  // [columns rounded up to 16, contracted]
  float* fold;    // [contracted]
  float* peak;    // [units]
  float* equal;   // [columns rounded up to 16]: what transformed values are divided by
  float* sums;    // [tiles of units, columns], or null

  int device;
  bool clusters;  // the device has thread block clusters
  Stream stream;
};

void quantize_one_read_bf16(const OneReadTask&);
void quantize_one_read_fp16(const OneReadTask&);
void quantize_one_read_fp32(const OneReadTask&);

}  // namespace hot
