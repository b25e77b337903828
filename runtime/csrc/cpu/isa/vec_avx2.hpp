// Sixteen lanes as two AVX2 registers (with F16C). See vec_avx512.hpp for what each function does.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "cpu/isa/kernels.hpp"

namespace hot::HOT_ISA {

struct F {
  __m256 a, b;
};
struct I {
  __m256i a, b;
};

inline __m128i half_register(const void* p) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p));
}
inline __m256 widen(__m128i x, BFloat16) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
inline __m256 widen(__m128i x, Half) { return _mm256_cvtph_ps(x); }

inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
template <class T>
inline F load(const T* p) {
  return {widen(half_register(p), T{}), widen(half_register(p + 8), T{})};
}
template <class T>
inline F load_n(const T* p, int n) {
  T copy[16] = {};
  std::memcpy(copy, p, n * sizeof(T));
  return load(copy);
}
inline void store(float* p, F x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline void store_n(float* p, F x, int n) {
  if (n == 16) return store(p, x);
  float copy[16];
  store(copy, x);
  std::memcpy(p, copy, 4 * n);
}
inline __m256i round_bf16(__m256 x) {
  __m256i b = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(b, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(b, _mm256_set1_epi32(0x7fff)), odd);
  __m256i quiet = _mm256_or_si256(b, _mm256_set1_epi32(0x400000));
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
}
inline void store_n(BFloat16* p, F x, int n) {
  __m256i packed = _mm256_packus_epi32(round_bf16(x.a), round_bf16(x.b));
  packed = _mm256_permute4x64_epi64(packed, 0xD8);
  std::memcpy(p, &packed, 2 * n);
}
inline void store_n(Half* p, F x, int n) {
  __m128i copy[2] = {_mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT),
                     _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT)};
  std::memcpy(p, copy, 2 * n);
}
inline I load_int(const void* p) {
  auto* x = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(x), _mm256_loadu_si256(x + 1)};
}
inline I load_int_n(const int32_t* p, int n) {
  int32_t copy[16] = {};
  std::memcpy(copy, p, 4 * n);
  return load_int(copy);
}
inline void store_int(void* p, I x) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), x.a);
  _mm256_storeu_si256(static_cast<__m256i*>(p) + 1, x.b);
}

inline F set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline I set_int(uint32_t x) {
  __m256i r = _mm256_set1_epi32(static_cast<int>(x));
  return {r, r};
}
inline I lane_index() {
  return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
          _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}

inline F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline I bits(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
inline F from_bits(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I floor_to_int(F x) {
  return {_mm256_cvttps_epi32(_mm256_floor_ps(x.a)), _mm256_cvttps_epi32(_mm256_floor_ps(x.b))};
}
inline I nearest_to_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }

inline I add_int(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I mul_int(I x, I y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
inline I and_int(I x, I y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
inline I or_int(I x, I y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
inline I xor_int(I x, I y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
inline I max_int(I x, I y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
template <int N>
inline I shift_right(I x) {
  return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)};
}

inline __m256 butterfly(__m256 x, __m256 partner, __m256 sign) {
  return _mm256_add_ps(partner, _mm256_xor_ps(x, sign));  // partner - x where sign is set
}
inline __m256 hadamard_eight(__m256 x) {
  const float n = -0.0f;
  x = butterfly(x, _mm256_permute_ps(x, 0xB1), _mm256_setr_ps(0, n, 0, n, 0, n, 0, n));
  x = butterfly(x, _mm256_permute_ps(x, 0x4E), _mm256_setr_ps(0, 0, n, n, 0, 0, n, n));
  __m256 sign = _mm256_setr_ps(0, 0, 0, 0, n, n, n, n);
  return butterfly(x, _mm256_permute2f128_ps(x, x, 1), sign);
}
inline F hadamard_lanes(F x) {
  __m256 a = hadamard_eight(x.a), b = hadamard_eight(x.b);
  return {_mm256_add_ps(a, b), _mm256_sub_ps(a, b)};
}

template <bool Signed>
inline __m256i pack(__m256i a, __m256i b, __m256i c, __m256i d) {
  if constexpr (Signed) {
    return _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
  } else {
    return _mm256_packus_epi16(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d));
  }
}
template <bool Signed>
inline I pack_lanes(I a, I b, I c, I d) {
  __m256i order =
      _mm256_broadcastsi128_si256(_mm_setr_epi32(0x0c080400, 0x0d090501, 0x0e0a0602, 0x0f0b0703));
  return {_mm256_shuffle_epi8(pack<Signed>(a.a, b.a, c.a, d.a), order),
          _mm256_shuffle_epi8(pack<Signed>(a.b, b.b, c.b, d.b), order)};
}
inline I pack_sequence(I a, I b, I c, I d) {
  __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  return {_mm256_permutevar8x32_epi32(pack<true>(a.a, a.b, b.a, b.b), order),
          _mm256_permutevar8x32_epi32(pack<true>(c.a, c.b, d.a, d.b), order)};
}
inline I clamp_bytes(I x, int qmax) {
  __m256i low = _mm256_set1_epi8(static_cast<char>(-qmax));
  __m256i high = _mm256_set1_epi8(static_cast<char>(qmax));
  return {_mm256_min_epi8(_mm256_max_epi8(x.a, low), high),
          _mm256_min_epi8(_mm256_max_epi8(x.b, low), high)};
}

inline void transpose_eight(__m256i (&x)[8]) {
  __m256i y[8];
  for (int i = 0; i < 8; i += 2) {
    y[i] = _mm256_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm256_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    x[i] = _mm256_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm256_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm256_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm256_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
  for (int j = 0; j < 4; ++j) {
    y[j] = _mm256_permute2x128_si256(x[j], x[4 + j], 0x20);
    y[4 + j] = _mm256_permute2x128_si256(x[j], x[4 + j], 0x31);
  }
  for (int i = 0; i < 8; ++i) x[i] = y[i];
}
inline void transpose(I (&x)[16]) {
  __m256i top_left[8], top_right[8], bottom_left[8], bottom_right[8];
  for (int i = 0; i < 8; ++i) {
    top_left[i] = x[i].a, top_right[i] = x[i].b;
    bottom_left[i] = x[8 + i].a, bottom_right[i] = x[8 + i].b;
  }
  transpose_eight(top_left), transpose_eight(top_right);
  transpose_eight(bottom_left), transpose_eight(bottom_right);
  for (int i = 0; i < 8; ++i) {
    x[i] = {top_left[i], bottom_left[i]};
    x[8 + i] = {top_right[i], bottom_right[i]};
  }
}
inline void store_bytes(void* p, I x, int n) {
  if (n == 64) return store_int(p, x);
  std::memcpy(p, &x, n);
}

inline int32_t dot(const int8_t* a, const int8_t* b, int64_t n) {
  __m256i sum = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    __m256i x = _mm256_cvtepi8_epi16(half_register(a + i));
    __m256i y = _mm256_cvtepi8_epi16(half_register(b + i));
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(x, y));
  }
  alignas(32) int32_t parts[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(parts), sum);
  int32_t total = 0;
  for (int32_t part : parts) total += part;
  for (; i < n; ++i) total += static_cast<int32_t>(a[i]) * b[i];
  return total;
}

}  // namespace hot::HOT_ISA
