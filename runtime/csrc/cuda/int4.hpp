// What one call of compress_int4 or expand_int4 asks of the kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "stream.hpp"

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

void compress_int4_bf16(const CompressTask&);
void compress_int4_fp16(const CompressTask&);
void compress_int4_fp32(const CompressTask&);
void expand_int4(const ExpandTask&);

// `count` int8 values, a multiple of 16, to two a byte: operands of the INT4 product.
void pack_int4(const int8_t* q, uint8_t* packed, int64_t count, cudaStream_t stream);

}  // namespace hot
