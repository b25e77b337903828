// Sixteen lanes as one AVX-512 register (F, BW, VL, DQ).
#pragma once

#include <immintrin.h>

#include <cstring>

#include "cpu/isa/kernels.hpp"

namespace hot::HOT_ISA {

using F = __m512;
using I = __m512i;

inline __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1); }
inline F widen(__m256i x, BFloat16) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
inline F widen(__m256i x, Half) { return _mm512_cvtph_ps(x); }

// load: 16 values as fp32; load_n: the first n, other lanes zero. Likewise store, store_n.
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline F load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
template <class T>
inline F load(const T* p) {
  return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), T{});
}
template <class T>
inline F load_n(const T* p, int n) {
  return widen(_mm256_maskz_loadu_epi16(first(n), p), T{});
}
inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
inline void store_n(float* p, F x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
inline void store_n(BFloat16* p, F x, int n) {
  I b = _mm512_castps_si512(x);
  I odd = _mm512_and_si512(_mm512_srli_epi32(b, 16), _mm512_set1_epi32(1));
  I rounded = _mm512_add_epi32(_mm512_add_epi32(b, _mm512_set1_epi32(0x7fff)), odd);
  I quiet = _mm512_or_si512(b, _mm512_set1_epi32(0x400000));
  rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), quiet);
  _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
inline void store_n(Half* p, F x, int n) {
  _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
inline I load_int(const void* p) { return _mm512_loadu_si512(p); }
inline I load_int_n(const int32_t* p, int n) { return _mm512_maskz_loadu_epi32(first(n), p); }
inline void store_int(void* p, I x) { _mm512_storeu_si512(p, x); }

inline F set(float x) { return _mm512_set1_ps(x); }
inline I set_int(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
inline I lane_index() {
  return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline I bits(F x) { return _mm512_castps_si512(x); }
inline F from_bits(I x) { return _mm512_castsi512_ps(x); }
inline F to_float(I x) { return _mm512_cvtepi32_ps(x); }
inline I floor_to_int(F x) {
  return _mm512_cvt_roundps_epi32(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}
inline I nearest_to_int(F x) {  // ties to even
  return _mm512_cvt_roundps_epi32(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

inline I add_int(I a, I b) { return _mm512_add_epi32(a, b); }
inline I mul_int(I a, I b) { return _mm512_mullo_epi32(a, b); }
inline I and_int(I a, I b) { return _mm512_and_si512(a, b); }
inline I or_int(I a, I b) { return _mm512_or_si512(a, b); }
inline I xor_int(I a, I b) { return _mm512_xor_si512(a, b); }
inline I max_int(I a, I b) { return _mm512_max_epi32(a, b); }
template <int N>
inline I shift_right(I a) {
  return _mm512_srli_epi32(a, N);
}

inline F butterfly(F x, F partner, __mmask16 high) {
  return _mm512_mask_sub_ps(_mm512_add_ps(x, partner), high, partner, x);
}
// Walsh-Hadamard butterflies across the 16 lanes, unscaled.
inline F hadamard_lanes(F x) {
  x = butterfly(x, _mm512_permute_ps(x, 0xB1), 0xAAAA);
  x = butterfly(x, _mm512_permute_ps(x, 0x4E), 0xCCCC);
  x = butterfly(x, _mm512_shuffle_f32x4(x, x, 0xB1), 0xF0F0);
  return butterfly(x, _mm512_shuffle_f32x4(x, x, 0x4E), 0xFF00);
}

// 64 saturated bytes in the order 4 lanes of a, of b, of c, of d, per 128 bits.
template <bool Signed>
inline I pack(I a, I b, I c, I d) {
  if constexpr (Signed) {
    return _mm512_packs_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d));
  } else {
    return _mm512_packus_epi16(_mm512_packus_epi32(a, b), _mm512_packus_epi32(c, d));
  }
}
// Lane i: the saturated bytes of lane i of a, b, c, d, lowest first.
template <bool Signed>
inline I pack_lanes(I a, I b, I c, I d) {
  I order = _mm512_set4_epi32(0x0f0b0703, 0x0e0a0602, 0x0d090501, 0x0c080400);
  return _mm512_shuffle_epi8(pack<Signed>(a, b, c, d), order);
}
// The saturated bytes of a, then of b, c, d.
inline I pack_sequence(I a, I b, I c, I d) {
  I order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, pack<true>(a, b, c, d));
}
inline I clamp_bytes(I x, int qmax) {
  x = _mm512_max_epi8(x, _mm512_set1_epi8(static_cast<char>(-qmax)));
  return _mm512_min_epi8(x, _mm512_set1_epi8(static_cast<char>(qmax)));
}

// Transposes a 16 x 16 matrix of 32-bit elements.
inline void transpose(I (&x)[16]) {
  I y[16];
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {  // x[i + j]: column 4 l + j of rows i ... i + 3, per lane l
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
  for (int j = 0; j < 4; ++j) {
    I low01 = _mm512_shuffle_i32x4(x[j], x[4 + j], 0x44);
    I high01 = _mm512_shuffle_i32x4(x[j], x[4 + j], 0xEE);
    I low23 = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0x44);
    I high23 = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0xEE);
    y[j] = _mm512_shuffle_i32x4(low01, low23, 0x88);
    y[4 + j] = _mm512_shuffle_i32x4(low01, low23, 0xDD);
    y[8 + j] = _mm512_shuffle_i32x4(high01, high23, 0x88);
    y[12 + j] = _mm512_shuffle_i32x4(high01, high23, 0xDD);
  }
  for (int i = 0; i < 16; ++i) x[i] = y[i];
}
// The first n bytes, n a multiple of 4.
inline void store_bytes(void* p, I x, int n) { _mm512_mask_storeu_epi32(p, first(n / 4), x); }

inline int32_t dot(const int8_t* a, const int8_t* b, int64_t n) {
  I sum = _mm512_setzero_si512();
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    auto wide = [](const int8_t* p) {
      return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    };
    sum = _mm512_add_epi32(sum, _mm512_madd_epi16(wide(a + i), wide(b + i)));
  }
  int32_t total = _mm512_reduce_add_epi32(sum);
  for (; i < n; ++i) total += static_cast<int32_t>(a[i]) * b[i];
  return total;
}

}  // namespace hot::HOT_ISA
