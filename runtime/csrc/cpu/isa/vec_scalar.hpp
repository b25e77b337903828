// Sixteen lanes as arrays: the portable variant, which the compiler vectorises as it can.
// Every vec_<isa>.hpp defines the same names; see there for what each does.
#pragma once

#include <cstring>

#include "cpu/isa/kernels.hpp"

namespace hot::HOT_ISA {

struct F {
  float v[16];
};
struct I {
  int32_t v[16];
};

template <class R, class Op>
inline R lanes(Op op) {
  R r;
  for (int i = 0; i < 16; ++i) r.v[i] = op(i);
  return r;
}

inline int32_t bits_of(float x) {
  int32_t b;
  std::memcpy(&b, &x, 4);
  return b;
}
inline float float_of(uint32_t b) {
  float x;
  std::memcpy(&x, &b, 4);
  return x;
}

inline float widen(float x) { return x; }
inline float widen(BFloat16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }
inline float widen(Half h) {
  uint32_t sign = static_cast<uint32_t>(h.bits & 0x8000) << 16, rest = h.bits & 0x7fff;
  if (rest >= 0x7c00) return float_of(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  if (rest >= 0x0400) return float_of(sign | ((rest << 13) + 0x38000000));
  float magnitude = static_cast<float>(rest) * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}

inline BFloat16 narrow_bf16(float x) {
  uint32_t b = bits_of(x);
  if ((b & 0x7fffffff) > 0x7f800000) return {static_cast<uint16_t>((b >> 16) | 0x40)};
  return {static_cast<uint16_t>((b + 0x7fff + ((b >> 16) & 1)) >> 16)};
}
inline Half narrow_f16(float x) {
  uint32_t b = bits_of(x), sign = (b >> 16) & 0x8000, rest = b & 0x7fffffff;
  if (rest > 0x7f800000) return {static_cast<uint16_t>(sign | 0x7e00)};
  if (rest >= 0x477ff000) return {static_cast<uint16_t>(sign | 0x7c00)};  // rounds to >= 65520
  if (rest < 0x38800000) {  // subnormal: let the float adder round at 2^-24
    uint32_t q = bits_of(float_of(rest) + 0.5f) - 0x3f000000;
    return {static_cast<uint16_t>(sign | q)};
  }
  uint32_t odd = (rest >> 13) & 1;
  return {static_cast<uint16_t>(sign | ((rest - 0x38000000 + 0xfff + odd) >> 13))};
}

template <class T>
inline F load(const T* p) {
  return lanes<F>([&](int i) { return widen(p[i]); });
}
template <class T>
inline F load_n(const T* p, int n) {
  return lanes<F>([&](int i) { return i < n ? widen(p[i]) : 0.0f; });
}
inline void store(float* p, F x) { std::memcpy(p, x.v, 64); }
inline void store_n(float* p, F x, int n) { std::memcpy(p, x.v, 4 * n); }
inline void store_n(BFloat16* p, F x, int n) {
  for (int i = 0; i < n; ++i) p[i] = narrow_bf16(x.v[i]);
}
inline void store_n(Half* p, F x, int n) {
  for (int i = 0; i < n; ++i) p[i] = narrow_f16(x.v[i]);
}
inline I load_int(const void* p) {
  I r;
  std::memcpy(r.v, p, 64);
  return r;
}
inline I load_int_n(const int32_t* p, int n) {
  return lanes<I>([&](int i) { return i < n ? p[i] : 0; });
}
inline void store_int(void* p, I x) { std::memcpy(p, x.v, 64); }

inline F set(float x) {
  return lanes<F>([&](int) { return x; });
}
inline I set_int(uint32_t x) {
  return lanes<I>([&](int) { return static_cast<int32_t>(x); });
}
inline I lane_index() {
  return lanes<I>([](int i) { return i; });
}

inline F add(F a, F b) {
  return lanes<F>([&](int i) { return a.v[i] + b.v[i]; });
}
inline F sub(F a, F b) {
  return lanes<F>([&](int i) { return a.v[i] - b.v[i]; });
}
inline F mul(F a, F b) {
  return lanes<F>([&](int i) { return a.v[i] * b.v[i]; });
}
inline F min(F a, F b) {
  return lanes<F>([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline F max(F a, F b) {
  return lanes<F>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline I bits(F x) {
  I r;
  std::memcpy(&r, &x, 64);
  return r;
}
inline F from_bits(I x) {
  F r;
  std::memcpy(&r, &x, 64);
  return r;
}
inline F to_float(I x) {
  return lanes<F>([&](int i) { return static_cast<float>(x.v[i]); });
}
inline I floor_to_int(F x) {
  return lanes<I>([&](int i) {
    int32_t whole = static_cast<int32_t>(x.v[i]);
    return whole - (static_cast<float>(whole) > x.v[i]);
  });
}
inline I nearest_to_int(F x) {  // ties to even, for |x| < 2^22
  return lanes<I>([&](int i) { return static_cast<int32_t>((x.v[i] + 0x1.8p23f) - 0x1.8p23f); });
}

inline I add_int(I a, I b) {
  return lanes<I>([&](int i) { return static_cast<int32_t>(uint32_t(a.v[i]) + uint32_t(b.v[i])); });
}
inline I mul_int(I a, I b) {
  return lanes<I>([&](int i) { return static_cast<int32_t>(uint32_t(a.v[i]) * uint32_t(b.v[i])); });
}
inline I and_int(I a, I b) {
  return lanes<I>([&](int i) { return a.v[i] & b.v[i]; });
}
inline I or_int(I a, I b) {
  return lanes<I>([&](int i) { return a.v[i] | b.v[i]; });
}
inline I xor_int(I a, I b) {
  return lanes<I>([&](int i) { return a.v[i] ^ b.v[i]; });
}
inline I max_int(I a, I b) {
  return lanes<I>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
template <int N>
inline I shift_right(I a) {
  return lanes<I>([&](int i) { return static_cast<int32_t>(uint32_t(a.v[i]) >> N); });
}

inline F hadamard_lanes(F x) {
  for (int distance = 1; distance < 16; distance *= 2) {
    F y;
    for (int i = 0; i < 16; ++i) {
      float low = x.v[i & ~distance], high = x.v[i | distance];
      y.v[i] = (i & distance) ? low - high : low + high;
    }
    x = y;
  }
  return x;
}

template <bool Signed>
inline int32_t saturate(int32_t x) {
  constexpr int32_t low = Signed ? -128 : 0, high = Signed ? 127 : 255;
  return (x < low ? low : x > high ? high : x) & 0xff;
}
template <bool Signed>
inline I pack_lanes(I a, I b, I c, I d) {
  return lanes<I>([&](int i) {
    return static_cast<int32_t>(
        uint32_t(saturate<Signed>(a.v[i])) | uint32_t(saturate<Signed>(b.v[i])) << 8 |
        uint32_t(saturate<Signed>(c.v[i])) << 16 | uint32_t(saturate<Signed>(d.v[i])) << 24);
  });
}
inline I pack_sequence(I a, I b, I c, I d) {
  int8_t bytes[64];
  for (int i = 0; i < 16; ++i) {
    bytes[i] = static_cast<int8_t>(saturate<true>(a.v[i]));
    bytes[i + 16] = static_cast<int8_t>(saturate<true>(b.v[i]));
    bytes[i + 32] = static_cast<int8_t>(saturate<true>(c.v[i]));
    bytes[i + 48] = static_cast<int8_t>(saturate<true>(d.v[i]));
  }
  return load_int(bytes);
}
template <class Op>
inline I bytewise(I x, Op op) {
  int8_t b[64];
  std::memcpy(b, x.v, 64);
  for (int i = 0; i < 64; ++i) b[i] = op(b[i]);
  return load_int(b);
}
inline I clamp_bytes(I x, int qmax) {
  return bytewise(x, [=](int8_t b) {
    return static_cast<int8_t>(b < -qmax ? -qmax : b > qmax ? qmax : b);
  });
}

inline void transpose(I (&x)[16]) {
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < i; ++j) {
      int32_t t = x[i].v[j];
      x[i].v[j] = x[j].v[i];
      x[j].v[i] = t;
    }
  }
}
inline void store_bytes(void* p, I x, int n) { std::memcpy(p, x.v, n); }

inline int32_t dot(const int8_t* a, const int8_t* b, int64_t n) {
  int32_t sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += static_cast<int32_t>(a[i]) * b[i];
  return sum;
}

}  // namespace hot::HOT_ISA
