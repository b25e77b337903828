// Scales of symmetric granules: reference.py's scale_of.
#pragma once

#include <cstdint>
#include <cstring>

namespace hot {

constexpr float kTiny = 0x1p-116f;  // reference.TINY

struct Scale {
  float scale, reciprocal;
};

/// From the bits of an absmax, whose integer maximum propagates NaN. Internal linkage: every ISA
/// variant must keep its own copy.
static inline Scale scale_of(uint32_t absmax_bits, int qmax_int) {
  constexpr uint32_t inf_bits = 0x7f800000, nan_bits = 0x7fc00000;
  float absmax, nan, qmax = static_cast<float>(qmax_int);
  std::memcpy(&absmax, &absmax_bits, 4);
  std::memcpy(&nan, &nan_bits, 4);
  if (absmax_bits >= inf_bits) return {nan, 0.0f};
  if (absmax < kTiny) return {0.0f, 0.0f};
  return {absmax / qmax, qmax / absmax};
}

}  // namespace hot
