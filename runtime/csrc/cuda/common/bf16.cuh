// Bits of bfloat16 numbers, as scales are stored.
#pragma once

#include <cstdint>

namespace hot {

// fp32 rounded to bf16 away from zero where `up` has x's sign, else towards zero; NaN stays NaN.
__device__ inline uint16_t bf16_outward(float x, bool up) {
  uint32_t bits = __float_as_uint(x);
  if (isnan(x)) return 0x7fc0;
  bool grow = up ? x > 0.0f : x < 0.0f;
  return static_cast<uint16_t>((bits >> 16) + (grow && (bits & 0xffffu) ? 1 : 0));
}

__device__ inline float from_bf16(uint16_t x) {
  return __uint_as_float(static_cast<uint32_t>(x) << 16);
}

}  // namespace hot
