// Quantisation of one vector: reference.py's quantize and _dither.

namespace hot::HOT_ISA {

constexpr uint32_t kRowHash = 0x9E3779B1, kColHash = 0x85EBCA77, kMixHash = 0xC2B2AE3D;

/// Rounds t; place = row * kRowHash + column * kColHash of each lane. Not yet clamped.
template <bool Stochastic>
inline I round(F t, I place) {
  if constexpr (!Stochastic) return nearest_to_int(t);
  I mixed = mul_int(xor_int(bits(t), place), set_int(kMixHash));
  // 1 + (mixed >> 21) / 2048, put together as the bits of a float in [1, 2)
  I dither = or_int(and_int(shift_right<9>(mixed), set_int(0x007ff000)), set_int(0x3f800000));
  return add_int(floor_to_int(add(t, from_bits(dither))), set_int(~0u));
}

inline I magnitude(F x) { return and_int(bits(x), set_int(0x7fffffff)); }

/// memset may not be given the null pointer of a tensor without elements.
inline void clear(int8_t* q, int64_t n) {
  if (n > 0) std::memset(q, 0, n);
}

inline uint32_t largest_lane(I x) {
  uint32_t lane[16], top = 0;
  store_int(lane, x);
  for (uint32_t v : lane) top = v > top ? v : top;
  return top;
}

}  // namespace hot::HOT_ISA
