#include <algorithm>
#include <stdexcept>

#include "cuda/gemm/plan.hpp"

namespace hot {
namespace {

// |sum| of int8 products stays below 2^31: 128 * 128 * 130944 < 2^31. A multiple of the tile's 128.
constexpr int64_t kLongestSlice = 130944;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A kernel's time is waves * (tile's k steps / rate + epilogue): both fitted to measurements on the
// H200 (docs/measured/benchmarks_cuda.md), multiply-adds a microsecond and SM, and microseconds.
struct Candidate {
  GemmKernel kernel;
  OutType type;  // of a fused kernel
  int tile_m, tile_n;
  double rate, epilogue;
};

#ifdef HOT_SM90
constexpr Candidate kFused[] = {
    {gemm_sm90_bf16_128x128, OutType::kBf16, 128, 128, 6.3e6, 1.1},
    {gemm_sm90_bf16_128x192, OutType::kBf16, 128, 192, 6.65e6, 2.7},
    {gemm_sm90_bf16_128x256, OutType::kBf16, 128, 256, 7.4e6, 8.5},
    {gemm_sm90_bf16_64x128, OutType::kBf16, 64, 128, 4.5e6, 2.0},
    {gemm_sm90_fp16_128x128, OutType::kFp16, 128, 128, 6.3e6, 1.1},
    {gemm_sm90_fp32_128x128, OutType::kFp32, 128, 128, 6.3e6, 1.8},
};
constexpr Candidate kRows[] = {
    {gemm_sm90_rows_bf16_128x128, OutType::kBf16, 128, 128, 6.3e6, 1.6},
    {gemm_sm90_rows_bf16_128x192, OutType::kBf16, 128, 192, 6.65e6, 4.0},
};
constexpr Candidate kColumns[] = {
    {gemm_sm90_columns_bf16_128x128, OutType::kBf16, 128, 128, 6.3e6, 1.6},
};
constexpr Candidate kSums = {gemm_sm90_s32_128x128, OutType::kFp32, 128, 128, 6.3e6, 1.1};
#endif
constexpr Candidate kFusedSm80[] = {
    {gemm_sm80_bf16, OutType::kBf16, 128, 128, 2.8e6, 1.0},
    {gemm_sm80_fp16, OutType::kFp16, 128, 128, 2.8e6, 1.0},
    {gemm_sm80_fp32, OutType::kFp32, 128, 128, 2.8e6, 1.0},
};
constexpr Candidate kSumsSm80 = {gemm_sm80_s32, OutType::kFp32, 128, 128, 2.8e6, 1.0};

// combine(): launch and gap, and the sums' way through L2.
constexpr double kCombineLaunch = 8.0, kCombineBytes = 3.0e6;
constexpr int64_t kShortestSlice = 1024;

double cost(const Candidate& c, const GemmShape& s, int64_t slices) {
  int64_t tiles = ceil_div(s.m, c.tile_m) * ceil_div(s.n, c.tile_n) * slices;
  double steps = static_cast<double>(c.tile_m) * c.tile_n * s.k / slices;
  return ceil_div(tiles, s.sm_count) * (steps / c.rate + c.epilogue);
}

double combine_cost(const GemmShape& s, int64_t slices) {
  return kCombineLaunch + 8.0 * s.m * s.n * slices / kCombineBytes;
}

// Equal parts that TMA can step by (16 bytes) are one launch; a shorter last one is a second.
bool divides(int64_t k, int64_t slices) { return k % slices == 0 && k / slices % 16 == 0; }

int64_t slice_of(int64_t k, int64_t slices) {
  slices = std::max(slices, ceil_div(k, kLongestSlice));
  if (divides(k, slices)) return std::max<int64_t>(k / slices, 32);
  return std::max<int64_t>(ceil_div(ceil_div(k, slices), 128) * 128, 128);
}

struct Choice {
  GemmPlan plan;
  double cost;
};

// The cheapest number of slices of at least 1024.
Choice split(const Candidate& c, const GemmShape& s) {
  Choice best = {{c.kernel, false, slice_of(s.k, 1)}, cost(c, s, 1) + combine_cost(s, 1)};
  for (int64_t slices = 2; slices <= 16 && s.k / slices >= kShortestSlice; ++slices) {
    if (!divides(s.k, slices)) continue;
    double time = cost(c, s, slices) + combine_cost(s, slices);
    if (time < best.cost) best = {{c.kernel, false, slice_of(s.k, slices)}, time};
  }
  return best;
}

// The cheapest of `best` and the fused kernels of the output's type.
template <size_t kCount>
GemmPlan cheapest(Choice best, const Candidate (&fused)[kCount], const GemmShape& s) {
  for (const Candidate& c : fused) {
    double time = cost(c, s, 1);
    if (c.type == s.type && time < best.cost) best = {{c.kernel, true, 0}, time};
  }
  return best.plan;
}

// One launch must not overflow int32, and writes whole vectors.
bool can_fuse(const GemmShape& s, int64_t vector) {
  return s.n % vector == 0 && s.k > 0 && s.k <= kLongestSlice;
}

#ifdef HOT_SM90
GemmPlan plan_sm90(const GemmShape& s) {
  Choice sums = split(kSums, s);
  int64_t vector = s.type == OutType::kFp32 ? 4 : 8;  // TMA writes rows on 16 bytes only
  return can_fuse(s, vector) ? cheapest(sums, kFused, s) : sums.plan;
}
#endif

GemmPlan plan_sm80(const GemmShape& s) {
  Choice sums = split(kSumsSm80, s);
  return can_fuse(s, kSm80Vector) ? cheapest(sums, kFusedSm80, s) : sums.plan;
}

GemmKernel fused_int4(OutType type) {
  if (type == OutType::kBf16) return gemm_sm80_int4_bf16;
  return type == OutType::kFp16 ? gemm_sm80_int4_fp16 : gemm_sm80_int4_fp32;
}

// Never split: sums of 64 at most stay below 2^31 for K up to 2^25, and g_x, which this is for, has
// rows enough to fill a device.
GemmPlan plan_int4(const GemmShape& s) {
  if (s.k > 0 && s.n % kSm80Vector == 0) return {fused_int4(s.type), true, 0};
  return {gemm_sm80_int4_s32, false, std::max<int64_t>(s.k, 32)};
}

}  // namespace

GemmPlan plan_hadamard(const GemmShape& s, bool columns, bool crops) {
#ifdef HOT_SM90
  if (s.hopper) {
    Choice sums = split(kSums, s);
    bool fuses = s.type == OutType::kBf16 && !crops && can_fuse(s, 8);
    if (!fuses) return sums.plan;
    return columns ? cheapest(sums, kColumns, s) : cheapest(sums, kRows, s);
  }
#endif
  return split(kSumsSm80, s).plan;
}

GemmKernel adding_kernel(bool hopper, int64_t k, bool first) {
#ifdef HOT_SM90
  if (hopper && k <= kLongestSlice)
    return first ? gemm_sm90_fp32_128x128 : gemm_sm90_add_fp32_128x128;
#endif
  throw std::runtime_error("hot::add_scaled_int_mm: no kernel for this device, or K too long");
}

GemmPlan plan_gemm(const GemmShape& s) {
  if (s.packed) return plan_int4(s);
#ifdef HOT_SM90
  if (s.hopper) return plan_sm90(s);
#endif
  return plan_sm80(s);
}

}  // namespace hot
