// What one call of compress_int8 or rescale_int8 asks of the kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/common/stream.hpp"

namespace hot {

struct CompressInt8Task {
  const void* x;
  int64_t rows, columns, stride;
  bool vectors;
  int rank;  // 0 or 8
  uint32_t samples, tokens;
  int64_t contracted, tiles;
  int8_t* q;        // [columns, contracted]
  uint16_t* scale;  // bf16 [columns, tiles]
  Stream stream;
};

struct RescaleTask {
  const int8_t* stored;   // [columns, contracted]
  const uint16_t* scale;  // bf16 [columns, tiles]
  const float* fold;      // [contracted]
  const float* peak;      // [units]
  int64_t columns, contracted, tiles, units;
  int tile;   // contracted rows of one
  int8_t* q;  // [columns, contracted]
  float* column_scale;
  float* reciprocal;  // [columns], workspace
  Stream stream;
};

void compress_int8_bf16(const CompressInt8Task&);
void compress_int8_fp16(const CompressInt8Task&);
void compress_int8_fp32(const CompressInt8Task&);
void rescale_int8(const RescaleTask&);

}  // namespace hot
