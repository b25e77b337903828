#include "gemm_plan.hpp"

#include <algorithm>

namespace hot {
namespace {

// |sum| of int8 products stays below 2^31: 128 * 128 * 130944 < 2^31. A multiple of the tile's 128.
constexpr int64_t kLongestSlice = 130944;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A kernel's time is waves * (tile's k steps / rate + epilogue): both fitted to measurements on the
// H200 (docs/benchmarks_cuda.md), multiply-adds a microsecond and SM, and microseconds.
struct Candidate {
  GemmKernel kernel;
  int tile_m, tile_n;
  double rate, epilogue;
};

constexpr Candidate kFused[] = {
    {gemm_sm90_bf16_128x128, 128, 128, 6.3e6, 1.1},
    {gemm_sm90_bf16_128x192, 128, 192, 6.65e6, 2.7},
    {gemm_sm90_bf16_128x256, 128, 256, 7.4e6, 8.5},
    {gemm_sm90_bf16_64x128, 64, 128, 5.8e6, 1.5},
};
constexpr Candidate kSums = {gemm_sm90_s32_128x128, 128, 128, 6.3e6, 1.1};
constexpr Candidate kSumsSm80 = {gemm_sm80_s32, 128, 128, 2.8e6, 1.0};

// combine(): launch, and the sums' way through L2.
constexpr double kCombineLaunch = 3.0, kCombineBytes = 3.0e6;
constexpr int64_t kShortestSlice = 1024;

double cost(const Candidate& c, const GemmShape& s, int64_t slices) {
  int64_t tiles = ceil_div(s.m, c.tile_m) * ceil_div(s.n, c.tile_n) * slices;
  double steps = static_cast<double>(c.tile_m) * c.tile_n * s.k / slices;
  return ceil_div(tiles, s.sm_count) * (steps / c.rate + c.epilogue);
}

double combine_cost(const GemmShape& s, int64_t slices) {
  return kCombineLaunch + 8.0 * s.m * s.n * slices / kCombineBytes;
}

// K in `slices` parts: exactly equal if TMA can step so (16 bytes), else in whole tiles of 128.
int64_t slice_of(int64_t k, int64_t slices) {
  slices = std::max(slices, ceil_div(k, kLongestSlice));
  if (k % slices == 0 && k / slices % 16 == 0) return std::max<int64_t>(k / slices, 32);
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
    double time = cost(c, s, slices) + combine_cost(s, slices);
    if (time < best.cost) best = {{c.kernel, false, slice_of(s.k, slices)}, time};
  }
  return best;
}

// TMA writes bf16 rows on 16 bytes only, and one launch must not overflow int32.
bool can_fuse(const GemmShape& s) {
  return s.type == OutType::kBf16 && s.n % 8 == 0 && s.k > 0 && s.k <= kLongestSlice;
}

GemmPlan plan_sm90(const GemmShape& s) {
  Choice best = split(kSums, s);
  if (!can_fuse(s)) return best.plan;
  for (const Candidate& c : kFused) {
    double time = cost(c, s, 1);
    if (time < best.cost) best = {{c.kernel, true, 0}, time};
  }
  return best.plan;
}

}  // namespace

GemmPlan plan_gemm(const GemmShape& s) { return s.hopper ? plan_sm90(s) : split(kSumsSm80, s).plan; }

}  // namespace hot
