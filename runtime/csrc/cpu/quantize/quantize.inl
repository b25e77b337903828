// Quantisation of one vector: reference.py's quantize and _dither.

namespace hot::HOT_ISA {

constexpr uint32_t kRowHash = 0x9E3779B1, kColHash = 0x85EBCA77, kMixHash = 0xC2B2AE3D;

/// Rounds t; place = row * kRowHash + column * kColHash of each lane. Not yet clamped.
template <bool Stochastic>
inline I round(F t, I place) {
  if constexpr (!Stochastic) return nearest_to_int(t);
  I mixed = (bits(t) ^ place) * set_int(kMixHash);
  // 1 + (mixed >> 21) / 2048, put together as the bits of a float in [1, 2)
  I dither = (mixed >> 9 & 0x007ff000) | 0x3f800000;
  return floor_to_int(t + from_bits(dither)) - 1;
}

inline I magnitude(F x) { return bits(x) & 0x7fffffff; }

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
