// What one call of compress_int*, expand_int4 or rescale_int* asks of the kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/common/stream.hpp"

namespace hot {

struct CompressTask {
  const void* x;
  int64_t rows, columns, stride;
  bool vectors;           // every row starts on 16 bytes and is whole 16-byte vectors
  uint8_t* packed;        // [columns, packed_length]
  int64_t packed_length;  // rows padded to 32, two a byte
  uint16_t* scale;        // bf16 [columns, groups]
  uint16_t* minimum;
  Stream stream;
};

struct ExpandTask {
  const uint8_t* packed;  // 16-byte aligned
  const uint16_t* scale;
  const uint16_t* minimum;
  int64_t columns, packed_length, groups;
  int8_t* q;  // [columns, 2 * packed_length]
  float* column_scale;
  float* zero;
  Stream stream;
};

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
  const void* stored;       // nibbles or bytes, [columns, contracted]
  const uint16_t* scale;    // bf16 [columns, tiles]
  const uint16_t* minimum;  // of nibbles
  const float* fold;        // [contracted]
  const float* peak;        // [units]
  int64_t columns, contracted, tiles, units;
  int tile;   // contracted rows of one
  int8_t* q;  // [columns, contracted]
  float* column_scale;
  float* reciprocal;  // [columns], workspace
  Stream stream;
};

void compress_int4_bf16(const CompressTask&);
void compress_int4_fp16(const CompressTask&);
void compress_int4_fp32(const CompressTask&);
void expand_int4(const ExpandTask&);
void compress_int8_bf16(const CompressInt8Task&);
void compress_int8_fp16(const CompressInt8Task&);
void compress_int8_fp32(const CompressInt8Task&);
void rescale_int4(const RescaleTask&);
void rescale_int8(const RescaleTask&);

}  // namespace hot
