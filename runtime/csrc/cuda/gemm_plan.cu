#include "gemm_plan.hpp"

#include <algorithm>

namespace hot {
namespace {

// |sum| of int8 products stays below 2^31: 128 * 128 * 130944 < 2^31. A multiple of the tile's 128.
constexpr int64_t kLongestSlice = 130944;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// K in `slices` parts: exactly equal if TMA can step so (16 bytes), else in whole tiles of 128.
int64_t slice_of(int64_t k, int64_t slices) {
  slices = std::max(slices, ceil_div(k, kLongestSlice));
  if (k % slices == 0 && k / slices % 16 == 0) return std::max<int64_t>(k / slices, 32);
  return std::max<int64_t>(ceil_div(ceil_div(k, slices), 128) * 128, 128);
}

// Slices that fill the device when the output alone has too few tiles, at >= 1024 of K each.
int64_t slices_for(const GemmShape& s, int64_t tiles) {
  int64_t best = 1;
  double least = 1e30;
  for (int64_t slices = 1; slices <= 16 && (slices == 1 || s.k / slices >= 1024); ++slices) {
    double waves = static_cast<double>(ceil_div(tiles * slices, s.sm_count)) / slices;
    double cost = waves * s.k / 128 + 2.0 * slices;  // k steps of the last SM + combine's traffic
    if (cost < least) {
      least = cost;
      best = slices;
    }
  }
  return best;
}

GemmPlan plan_sm90(const GemmShape& s) {
  bool fused = s.type == OutType::kBf16 && s.n % 8 == 0 && s.k > 0 && s.k <= kLongestSlice;
  int64_t tiles = ceil_div(s.m, 128) * ceil_div(s.n, 256);
  if (fused && tiles >= s.sm_count)
    return {s.k >= 2048 ? gemm_sm90_bf16_128x256 : gemm_sm90_bf16_128x128, true, 0};
  int64_t slices = slices_for(s, tiles);
  if (fused && slices == 1) return {gemm_sm90_bf16_128x128, true, 0};
  return {s.n > 128 ? gemm_sm90_s32_128x256 : gemm_sm90_s32_128x128, false, slice_of(s.k, slices)};
}

}  // namespace

GemmPlan plan_gemm(const GemmShape& s) {
  if (s.hopper) return plan_sm90(s);
  int64_t tiles = ceil_div(s.m, 128) * ceil_div(s.n, 128);
  return {gemm_sm80_s32, false, slice_of(s.k, slices_for(s, tiles))};
}

}  // namespace hot
