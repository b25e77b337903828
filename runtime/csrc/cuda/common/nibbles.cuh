// INT4 operands of the product: two values a byte, the even entries in the low nibbles.
#pragma once

#include <cstdint>

namespace hot {

// The low nibbles of four bytes, side by side.
__device__ inline uint32_t nibbles(uint32_t bytes) {
  uint32_t pairs = (bytes & 0x000f000fu) | (bytes >> 4 & 0x00f000f0u);
  return (pairs & 0xffu) | (pairs >> 8 & 0xff00u);
}

__device__ inline uint2 nibbles(const uint32_t (&q)[4]) {
  return make_uint2(nibbles(q[0]) | nibbles(q[1]) << 16, nibbles(q[2]) | nibbles(q[3]) << 16);
}

}  // namespace hot
