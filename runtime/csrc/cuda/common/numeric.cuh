// The arithmetic that reference.py defines, one IEEE operation at a time: intrinsics keep the
// compiler from contracting a product and a sum into one rounding.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace hot {

constexpr int kOrder = 16;  // of the Walsh-Hadamard transform
constexpr uint32_t kRowHash = 0x9E3779B1u, kColHash = 0x85EBCA77u, kMixHash = 0xC2B2AE3Du;
constexpr uint32_t kLaneHash = 0x27D4EB2Fu;  // one_read.LANE_HASH
constexpr float kTiny = 0x1p-116f;

// Two elements of 2 bytes, or one of 4, from one 32-bit word of device or shared memory.
template <class T>
struct Word {
  static constexpr int kCount = 2;
};
template <>
struct Word<float> {
  static constexpr int kCount = 1;
};

__device__ inline void unpack(uint32_t word, float* v, __nv_bfloat16) {
  v[0] = __uint_as_float(word << 16);
  v[1] = __uint_as_float(word & 0xffff0000u);
}
__device__ inline void unpack(uint32_t word, float* v, __half) {
  float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&word));
  v[0] = pair.x;
  v[1] = pair.y;
}
__device__ inline void unpack(uint32_t word, float* v, float) { v[0] = __uint_as_float(word); }

// fmax with NaN propagation, as torch.amax has it; one instruction from sm_80 on.
__device__ inline float max_nan(float a, float b) {
  float m;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(a), "f"(b));
  return m;
}
__device__ inline float min_nan(float a, float b) {
  float m;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(a), "f"(b));
  return m;
}

// The smaller and the larger of the elements of two words, NaN first.
__device__ inline uint32_t min_words(uint32_t a, uint32_t b, __nv_bfloat16) {
  asm("min.NaN.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}
__device__ inline uint32_t max_words(uint32_t a, uint32_t b, __nv_bfloat16) {
  asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}
__device__ inline uint32_t min_words(uint32_t a, uint32_t b, __half) {
  asm("min.NaN.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}
__device__ inline uint32_t max_words(uint32_t a, uint32_t b, __half) {
  asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}
__device__ inline uint32_t min_words(uint32_t a, uint32_t b, float) {
  return __float_as_uint(min_nan(__uint_as_float(a), __uint_as_float(b)));
}
__device__ inline uint32_t max_words(uint32_t a, uint32_t b, float) {
  return __float_as_uint(max_nan(__uint_as_float(a), __uint_as_float(b)));
}

// A word of infinities; the sign bits make them negative.
template <class T>
struct Infinity {
  static constexpr uint32_t kWord = 0x7f800000, kSigns = 0x80000000;
};
template <>
struct Infinity<__nv_bfloat16> {
  static constexpr uint32_t kWord = 0x7f807f80, kSigns = 0x80008000;
};
template <>
struct Infinity<__half> {
  static constexpr uint32_t kWord = 0x7c007c00, kSigns = 0x80008000;
};

template <int kDistance>
__device__ inline void butterfly(float (&v)[kOrder]) {
#pragma unroll
  for (int i = 0; i < kOrder; ++i) {
    if (i & kDistance) continue;
    float low = v[i], high = v[i + kDistance];
    v[i] = __fadd_rn(low, high);
    v[i + kDistance] = __fsub_rn(low, high);
  }
}

// Four times the orthonormal transform: the factor 1/4 is a power of two, applied with the scale.
__device__ inline void hadamard_times_4(float (&v)[kOrder]) {
  butterfly<1>(v);
  butterfly<2>(v);
  butterfly<4>(v);
  butterfly<8>(v);
}

// max(|a + b|, |a - b|), each rounded: one of them has magnitude |a| + |b|.
__device__ inline float larger_of_butterfly(float a, float b) {
  return __fadd_rn(fabsf(a), fabsf(b));
}

// H16's rows by LP_L1 (reference.low_pass_order), as the bit mask of the first `rank`.
__host__ __device__ constexpr uint32_t low_pass_mask(int rank) {
  constexpr int order[kOrder] = {0, 2, 8, 10, 3, 12, 11, 14, 1, 4, 15, 6, 9, 7, 13, 5};
  uint32_t mask = 0;
  for (int i = 0; i < rank; ++i) mask |= 1u << order[i];
  return mask;
}

// reference.scale_of in two halves, from absmax as the bits of a non-negative float (NaN above
// infinity): a granule below kTiny is zeros, one with infinity or NaN has scale NaN and zeros.
__device__ inline float scale_of(uint32_t absmax_bits, float qmax) {
  float absmax = __uint_as_float(absmax_bits);
  if (absmax_bits >= 0x7f800000u) return __uint_as_float(0x7fc00000u);
  return absmax < kTiny ? 0.0f : __fdiv_rn(absmax, qmax);
}

__device__ inline float reciprocal_of(uint32_t absmax_bits, float qmax) {
  float absmax = __uint_as_float(absmax_bits);
  bool usable = absmax >= kTiny && absmax_bits < 0x7f800000u;
  return usable ? __fdiv_rn(qmax, absmax) : 0.0f;
}

// True when 4v * (r/4) has the integer of (4v/4) * r: no product that matters is subnormal.
__device__ inline bool folds_quarter(float reciprocal) {
  return reciprocal >= 0x1p-93f && reciprocal <= 0x1p90f;
}

// A float whose low byte is the rounded integer: adding 1.5 * 2^23 leaves it in the mantissa.
// Stochastic rounding is floor(fl(t + u)) - 1; only the lower clamp can bind, see
// reference.quantize.
template <bool kStochastic>
__device__ inline uint32_t round_to_byte(float t, uint32_t place, float least) {
  if (!kStochastic) return __float_as_uint(__fadd_rn(t, 12582912.0f));
  uint32_t mixed = (__float_as_uint(t) ^ place) * kMixHash, dither;
  // (mixed >> 9 & 0x7ff000) | 1.0f in one instruction: left alone, the compiler makes two of it.
  asm("lop3.b32 %0, %1, 0x7ff000, %2, 0xEA;" : "=r"(dither) : "r"(mixed >> 9), "r"(0x3f800000u));
  float s = fmaxf(__fadd_rn(t, __uint_as_float(dither)), least);
  return __float_as_uint(__fadd_rd(s, 12582911.0f));
}

__device__ inline uint32_t low_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// reference.one_read.quantize_fixed of a value times `factor` / 256; the integer is byte 1.
__device__ inline uint32_t round_fixed(float value, float factor, uint32_t place) {
  uint32_t bits = __float_as_uint(__fmaf_rn(value, factor, 12582912.0f));
  return bits + ((bits ^ place) * kMixHash >> 24);
}

__device__ inline uint32_t second_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0051), __byte_perm(c, d, 0x0051), 0x5410);
}

}  // namespace hot
