// Sixteen lanes as the compiler's own vectors (GCC, Clang): it splits them into what the ISA has.
#pragma once

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include <cstring>

#include "cpu/isa/kernels.hpp"

namespace hot::HOT_ISA {

using F = float __attribute__((vector_size(64)));
using I = int32_t __attribute__((vector_size(64)));
using U = uint32_t __attribute__((vector_size(64)));
using Shorts = uint16_t __attribute__((vector_size(32)));
using Bytes = int8_t __attribute__((vector_size(16)));

inline F set(float x) { return x - F{}; }
inline I set_int(uint32_t x) { return static_cast<int32_t>(x) - I{}; }
inline I lane_index() { return I{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
inline I bits(F x) { return reinterpret_cast<I&>(x); }
inline F from_bits(I x) { return reinterpret_cast<F&>(x); }

// Lanes of a and then of b, by number.
#ifdef __clang__
#define HOT_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define HOT_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, I{__VA_ARGS__})
#endif

inline I extended(Shorts x) {
#ifdef __AVX512F__  // one instruction, where GCC finds several
  return reinterpret_cast<I>(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(x)));
#else
  return __builtin_convertvector(x, I);
#endif
}
inline F widened(Shorts x, BFloat16) { return from_bits(extended(x) << 16); }
inline F widened(Shorts x, Half) {
  I b = extended(x), sign = (b & 0x8000) << 16, rest = b & 0x7fff;
  I usual = (rest << 13) + 0x38000000, special = 0x7f800000 | (rest & 0x3ff) << 13;
  I tiny = bits(__builtin_convertvector(rest, F) * 0x1p-24f);
  return from_bits(sign | (rest >= 0x7c00 ? special : rest >= 0x0400 ? usual : tiny));
}
inline Shorts narrowed(F x, BFloat16) {
  U b = reinterpret_cast<U&>(x);
  U rounded = (b + 0x7fff + (b >> 16 & 1)) >> 16, quiet = b >> 16 | 0x40;
  return __builtin_convertvector(x == x ? rounded : quiet, Shorts);
}
inline Shorts narrowed(F x, Half) {
  I b = bits(x), rest = b & 0x7fffffff;
  I usual = (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13;
  I tiny = bits(from_bits(rest) + 0.5f) - 0x3f000000;  // the float adder rounds at 2^-24
  I large = rest > 0x7f800000 ? set_int(0x7e00) : set_int(0x7c00);
  I half = rest >= 0x477ff000 ? large : rest < 0x38800000 ? tiny : usual;
  return __builtin_convertvector((b >> 16 & 0x8000) | half, Shorts);
}

// load: 16 values as fp32; load_n: the first n, other lanes zero. Likewise store, store_n.
template <class V>
inline V read(const void* p, size_t bytes = sizeof(V)) {
  V x{};
  std::memcpy(&x, p, bytes);
  return x;
}
inline F load(const float* p) { return read<F>(p); }
inline F load_n(const float* p, int n) { return read<F>(p, 4 * n); }
template <class T>
inline F load(const T* p) {
  return widened(read<Shorts>(p), T{});
}
template <class T>
inline F load_n(const T* p, int n) {
  return widened(read<Shorts>(p, 2 * n), T{});
}
inline I load_int(const void* p) { return read<I>(p); }
inline I load_int_n(const int32_t* p, int n) { return read<I>(p, 4 * n); }
template <class V>
inline void write(void* p, V x, int64_t bytes) {
  // a size that the compiler knows makes one instruction of it
  if (bytes == sizeof(V)) {
    std::memcpy(p, &x, sizeof(V));
  } else {
    std::memcpy(p, &x, bytes);
  }
}
inline void store(float* p, F x) { std::memcpy(p, &x, 64); }
inline void store_int(void* p, I x) { std::memcpy(p, &x, 64); }
inline void store_n(float* p, F x, int n) { write(p, x, 4 * n); }
template <class T>
inline void store_n(T* p, F x, int n) {
  write(p, narrowed(x, T{}), 2 * n);
}
inline void store_bytes(void* p, I x, int n) { write(p, x, n); }

inline F to_float(I x) { return __builtin_convertvector(x, F); }
inline I max_int(I a, I b) { return a > b ? a : b; }
inline I floor_to_int(F x) {
#ifdef __AVX512F__
  return reinterpret_cast<I>(
      _mm512_cvt_roundps_epi32(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
#else
  I whole = __builtin_convertvector(x, I);
  return whole + (to_float(whole) > x);  // a comparison that holds is -1
#endif
}
inline I nearest_to_int(F x) {  // ties to even, for |x| < 2^22
  return __builtin_convertvector((x + 0x1.8p23f) - 0x1.8p23f, I);
}

/// Walsh-Hadamard butterflies across the 16 lanes, unscaled.
inline F hadamard_lanes(F x) {
  const I n = set_int(0x80000000);
#define HOT_BUTTERFLY(distance, ...) \
  x = from_bits(bits(x) ^ (((lane_index() & distance) != 0) & n)) + HOT_SHUFFLE(x, x, __VA_ARGS__)
  HOT_BUTTERFLY(1, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  HOT_BUTTERFLY(2, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  HOT_BUTTERFLY(4, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  HOT_BUTTERFLY(8, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
#undef HOT_BUTTERFLY
  return x;
}

inline I clamp(I x, int limit) {
  I high = set_int(limit), low = -high;
  x = x > high ? high : x;
  return x < low ? low : x;
}
/// Lane i: the lowest bytes of lane i of a, b, c, d, lowest first.
inline I pack_lanes(I a, I b, I c, I d) {
  return (a & 0xff) | (b & 0xff) << 8 | (c & 0xff) << 16 | d << 24;
}
/// Sixteen lowest bytes.
inline void store_narrow(int8_t* p, I x) {
  Bytes low = __builtin_convertvector(x, Bytes);
  std::memcpy(p, &low, 16);
}

/// Transposes a 16 x 16 matrix of 32-bit elements: blocks change places, ever smaller ones.
inline void transpose(I (&x)[16]) {
#define HOT_SWAP(distance, low, high)                     \
  _Pragma("GCC unroll 16") for (int i = 0; i < 16; ++i) { \
    if (i & distance) continue;                           \
    I a = x[i], b = x[i + distance];                      \
    x[i] = HOT_SHUFFLE(a, b, HOT_LIST low);               \
    x[i + distance] = HOT_SHUFFLE(a, b, HOT_LIST high);   \
  }
#define HOT_LIST(...) __VA_ARGS__
  HOT_SWAP(8, (0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
           (8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
  HOT_SWAP(4, (0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
           (4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
  HOT_SWAP(2, (0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
           (2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
  HOT_SWAP(1, (0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
           (1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
#undef HOT_LIST
#undef HOT_SWAP
}

inline int32_t dot(const int8_t* a, const int8_t* b, int64_t n) {
  int32_t sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += static_cast<int32_t>(a[i]) * b[i];
  return sum;
}

}  // namespace hot::HOT_ISA
