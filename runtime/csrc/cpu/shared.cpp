// quantize_shared, quantize_weight, compress_int8, rescale_int4 and rescale_int8.
#include <cmath>
#include <cstring>
#include <memory>

#include "ops.hpp"

namespace hot::cpu {
namespace {

constexpr int64_t kSampledRows = 256;  // reference_shared.SAMPLED_ROWS
constexpr int kMostLift = 8;           // reference_shared.MOST_LIFT
constexpr float kSharedTiny = 0x1p-100f;
constexpr int64_t kUnitsPerSum = 4;  // ops.UNITS_PER_SUM

float from_bits(uint32_t b) {
  float x;
  std::memcpy(&x, &b, 4);
  return x;
}

/// reference_shared.shared_scale_of.
Scale shared_scale_of(uint32_t absmax_bits) {
  float absmax = from_bits(absmax_bits);
  if (absmax_bits >= 0x7f800000) return {from_bits(0x7fc00000), 0.0f};
  if (absmax < kSharedTiny) return {0.0f, 0.0f};
  return {absmax / 127.0f * 256.0f, 32512.0f / absmax};
}

/// The sampled rows as one strip of all columns, so that gather_columns finds their absmax.
std::vector<uint32_t> sampled_absmax(const Kernels& kernels, const Matrix& g) {
  const int64_t count = std::min(g.rows, kSampledRows);
  const int64_t row_bytes = g.cols * (g.type == Float::f32 ? 4 : 2);
  std::vector<uint32_t> absmax(round_up(g.cols, kStrip));
  std::vector<float> values(kTile * kStrip);
  const Grouping plain{0, 0, 1, 1, 1};
  for (int64_t i = 0; i < count; ++i) {
    Matrix row = g;
    row.data = static_cast<const char*>(g.data) + i * g.rows / count * row_bytes;
    row.rows = 1;
    for (int64_t column = 0; column < g.cols; column += kStrip) {
      int width = static_cast<int>(std::min<int64_t>(kStrip, g.cols - column));
      kernels.gather_columns(row, plain, {column, width, 0, 1}, values.data(),
                             absmax.data() + column);
    }
  }
  return absmax;
}

/// equal, and the lifts 2^-8 / equal padded to whole vectors.
std::vector<float> find_lifts(const Kernels& kernels, const Matrix& g, float* equal) {
  std::vector<uint32_t> absmax = sampled_absmax(kernels, g);
  std::vector<float> lifts(round_up(g.cols, kLanes));
  int highest = 0;
  auto exponent = [&](int64_t c) { return std::min<int>(absmax[c] >> 23, 254); };
  for (int64_t c = 0; c < g.cols; ++c) highest = std::max(highest, exponent(c));
  for (int64_t c = 0; c < g.cols; ++c) {
    int lift = std::min(highest - exponent(c), kMostLift);
    equal[c] = std::ldexp(1.0f, -lift);
    lifts[c] = std::ldexp(1.0f, lift - kMostLift);
  }
  return lifts;
}

/// Bits of a quarter of the sum of 16 rows' absmax, added as butterflies at distance 1, 2, 4, 8 do.
uint32_t bound_of_kept(const uint32_t* absmax) {
  float sum[kLanes];
  std::memcpy(sum, absmax, sizeof(sum));
  for (int d = 1; d < kLanes; d *= 2) {
    for (int i = 0; i < kLanes; i += 2 * d) sum[i] = sum[i] + sum[i + d];
  }
  sum[0] = sum[0] * 0.25f;
  uint32_t bits;
  std::memcpy(&bits, sum, 4);
  return bits & 0x7fffffff;
}

/// Scales of the units from `unit` on, up to 64 contracted rows, and their reciprocals.
void find_scales(const Kernels& kernels, const SharedForms& s, int64_t unit, float* row_scale,
                 float* fold, float* peak, UnitReciprocals* reciprocals) {
  for (int64_t u = 0; u < kTile / s.unit_rows && (unit + u) * s.unit_rows < s.k; ++u) {
    uint32_t absmax[kLanes], most = 0;
    kernels.shared_absmax(s, unit + u, absmax);
    float* folds = fold + (unit + u) * s.unit_rows;
    const int64_t first = s.first_row(unit + u);
    for (int i = 0; i < kLanes; ++i) {
      Scale scale = shared_scale_of(absmax[i]);
      reciprocals[u].row[i] = scale.reciprocal;
      if (i < s.valid_rows(unit + u)) row_scale[first + i * s.tokens] = scale.scale;
      if (s.unit_rows == kLanes) folds[i] = scale.scale;
      uint32_t bits;
      std::memcpy(&bits, &scale.scale, 4);
      most = std::max(most, bits);
    }
    peak[unit + u] = from_bits(most);
    if (s.unit_rows == kLanes) continue;
    Scale kept = shared_scale_of(bound_of_kept(absmax));
    reciprocals[u].kept = kept.reciprocal;
    std::fill_n(folds, s.unit_rows, kept.scale);
    peak[unit + u] = kept.scale;
  }
}

/// 0 or 8; the rows of a unit of 16 as they are contracted.
int64_t checked_unit_rows(int64_t rank, const char* op) {
  HOT_CHECK(rank == 0 || rank == 8, op, "expected rank 0 or 8; got ", rank);
  return rank == 0 ? kLanes : rank;
}

void check_factors(const Tensor& t, int64_t length, const char* op, const char* name) {
  check_dtype(t, ScalarType::Float, op, name, "float32");
  check_shape(t, {length}, op, name);
}

/// Partial sums of g's rows, `count` of them.
Tensor sums_of(const Kernels& kernels, const Matrix& g, int64_t count) {
  Tensor sums = empty_cpu({count, g.cols}, aoti_torch_dtype_float32());
  const int64_t each = count > 0 ? ceil_div(g.rows, count) : 0;
  torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      kernels.sum_rows(g, std::min(g.rows, i * each), std::min(g.rows, (i + 1) * each),
                       data<float>(sums) + i * g.cols);
  });
  return sums;
}

}  // namespace

SharedResult quantize_shared(const Kernels& kernels, const Tensor& grad_output, int64_t rank,
                             int64_t tokens, bool summed) {
  constexpr const char* op = "quantize_shared";
  check_2d(grad_output, op, "grad_output");
  const int64_t unit_rows = checked_unit_rows(rank, op);
  if (rank == 0) tokens = 1;
  Tensor contiguous = as_contiguous(grad_output);
  Matrix g = matrix_of(contiguous, op);
  Grouping groups = grouping_of(g, rank, tokens, op);
  const int64_t blocks = rank == 0 ? ceil_div(g.rows, kLanes) : groups.units;
  const int64_t k = round_up(rank == 0 ? g.rows : blocks * rank, kContractAlign);
  const int64_t padded = round_up(g.cols, kContractAlign);
  Tensor row_q = empty_cpu({g.rows, padded}, aoti_torch_dtype_int8());
  Tensor row_scale = empty_cpu({g.rows}, aoti_torch_dtype_float32());
  Tensor col_q = empty_cpu({g.cols, k}, aoti_torch_dtype_int8());
  Tensor fold = empty_cpu({k}, aoti_torch_dtype_float32());
  Tensor peak = empty_cpu({k / unit_rows}, aoti_torch_dtype_float32());
  Tensor equal = empty_cpu({g.cols}, aoti_torch_dtype_float32());
  std::vector<float> lifts = find_lifts(kernels, g, data<float>(equal));
  SharedForms s{g,
                tokens,
                g.rows / tokens,
                unit_rows,
                lifts.data(),
                data<int8_t>(row_q),
                padded,
                data<int8_t>(col_q),
                k};
  for (int64_t r = 0; r < g.rows && padded > g.cols; ++r)
    std::memset(s.row_q + r * padded + g.cols, 0, padded - g.cols);
  const int64_t at_once = kTile / unit_rows;
  torch::stable::parallel_for(0, ceil_div(k, kTile), 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      UnitReciprocals reciprocals[kUnitsPerTile] = {};
      find_scales(kernels, s, t * at_once, data<float>(row_scale), data<float>(fold),
                  data<float>(peak), reciprocals);
      kernels.shared_quantize(s, t * at_once, reciprocals);
    }
  });
  Tensor sums = sums_of(kernels, g, summed ? ceil_div(k / unit_rows, kUnitsPerSum) : 0);
  return {row_q, row_scale, col_q, fold, peak, equal, sums};
}

std::tuple<Tensor, Tensor> quantize_weight(const Kernels& kernels, const Tensor& weight,
                                           const Tensor& equal, bool inputs_first) {
  constexpr const char* op = "quantize_weight";
  check_2d(weight, op, "weight");
  Tensor contiguous = as_contiguous(weight);
  Matrix w = matrix_of(contiguous, op);
  check_factors(equal, inputs_first ? w.cols : w.rows, op, "equal");
  Tensor factor = as_contiguous(equal);
  if (!inputs_first) return quantize_scaled_columns(kernels, w, data<float>(factor));
  const int64_t padded = round_up(w.cols, kContractAlign);
  Tensor q = empty_cpu({w.rows, padded}, aoti_torch_dtype_int8());
  Tensor scale = empty_cpu({w.rows}, aoti_torch_dtype_float32());
  RowOutput out{data<int8_t>(q), data<float>(scale), padded};
  torch::stable::parallel_for(0, w.rows, grain(w.cols), [&](int64_t begin, int64_t end) {
    std::vector<float> buffer(padded);
    kernels.quantize_scaled_rows(w, data<float>(factor), begin, end, buffer.data(), out);
  });
  return {q, scale};
}

namespace {

/// bf16 bits of absmax / 127 rounded away from zero, and the reciprocal of that.
Scale granule_of(uint32_t absmax_bits, uint16_t& scale_bits) {
  scale_bits = absmax_bits >= 0x7f800000 ? 0x7fc0 : 0;
  if (absmax_bits >= 0x7f800000 || from_bits(absmax_bits) < kTiny) return {0.0f, 0.0f};
  float scale = from_bits(absmax_bits) / 127.0f;
  uint32_t bits;
  std::memcpy(&bits, &scale, 4);
  scale_bits = static_cast<uint16_t>((bits >> 16) + ((bits & 0xffff) != 0 ? 1 : 0));
  scale = from_bits(static_cast<uint32_t>(scale_bits) << 16);
  return {scale, 1.0f / scale};
}

}  // namespace

std::tuple<Tensor, Tensor> compress_int8(const Kernels& kernels, const Tensor& input, int64_t rank,
                                         int64_t tokens) {
  constexpr const char* op = "compress_int8";
  check_2d(input, op, "x");
  const int64_t unit_rows = checked_unit_rows(rank, op), tile = unit_rows * kUnitsPerTile;
  Tensor contiguous = as_contiguous(input);
  Matrix x = matrix_of(contiguous, op);
  Grouping groups = grouping_of(x, rank, rank == 0 ? 1 : tokens, op);
  const int64_t k = round_up(groups.units * rows_per_unit(groups), kContractAlign);
  const int64_t tiles = ceil_div(k, tile), strips = ceil_div(x.cols, kStrip);
  const int64_t units = tile / rows_per_unit(groups);  // as `groups` counts them
  Tensor q = empty_cpu({x.cols, k}, aoti_torch_dtype_int8());
  Tensor scale = empty_cpu({x.cols, tiles}, aoti_torch_dtype_bfloat16());
  torch::stable::parallel_for(0, tiles * strips, 1, [&](int64_t begin, int64_t end) {
    std::unique_ptr<float[]> values(new float[tile * kStrip]);
    for (int64_t t = begin; t < end; ++t) {
      const int64_t at = t / strips, column = t % strips * kStrip;
      alignas(64) uint32_t absmax[kStrip] = {};
      alignas(64) float reciprocal[kStrip] = {};
      alignas(64) int32_t sum[kStrip] = {};
      ColumnTask task{column, static_cast<int>(std::min<int64_t>(kStrip, x.cols - column)),
                      at * units, std::clamp<int64_t>(groups.units - at * units, 0, units)};
      std::memset(values.get(), 0, tile * kStrip * sizeof(float));
      kernels.gather_columns(x, groups, task, values.get(), absmax);
      for (int i = 0; i < task.width; ++i)
        reciprocal[i] =
            granule_of(absmax[i], data<uint16_t>(scale)[(column + i) * tiles + at]).reciprocal;
      kernels.emit_columns(values.get(), task, at * tile, std::min(k, (at + 1) * tile), reciprocal,
                           {127, false}, {data<int8_t>(q), k}, sum);
    }
  });
  return {q, scale};
}

std::tuple<Tensor, Tensor> rescale(const Kernels& kernels, const Tensor& stored,
                                   const Tensor& scale, const Tensor* minimum, const Tensor& fold,
                                   const Tensor& peak) {
  const char* op = minimum ? "rescale_int4" : "rescale_int8";
  check_2d(stored, op, "stored");
  check_dtype(stored, minimum ? ScalarType::Byte : ScalarType::Char, op, "stored",
              minimum ? "uint8" : "int8");
  check_dtype(scale, ScalarType::BFloat16, op, "scale", "bfloat16");
  const int64_t columns = stored.size(0), k = stored.size(1) * (minimum ? 2 : 1);
  const int64_t units = peak.numel(), tiles = ceil_div(units, kUnitsPerTile);
  HOT_CHECK(k % kContractAlign == 0, op, "expected a multiple of 32 stored rows; got ", k);
  HOT_CHECK(k == units * kLanes || (!minimum && k == units * 8), op,
            "expected 16 stored rows (or 8 of INT8) for each of ", units, " units; got ", k);
  check_factors(fold, k, op, "fold");
  check_factors(peak, units, op, "peak");
  check_shape(scale, {columns, tiles}, op, "scale");
  Tensor source = as_contiguous(stored), steps = as_contiguous(scale), lows = steps;
  if (minimum) {
    check_dtype(*minimum, ScalarType::BFloat16, op, "minimum", "bfloat16");
    check_shape(*minimum, {columns, tiles}, op, "minimum");
    lows = as_contiguous(*minimum);
  }
  Tensor folds = as_contiguous(fold), peaks = as_contiguous(peak);
  Tensor q = empty_cpu({columns, k}, aoti_torch_dtype_int8());
  Tensor column_scale = empty_cpu({columns}, aoti_torch_dtype_float32());
  std::vector<uint32_t> tile_peak(tiles);
  for (int64_t u = 0; u < units; ++u) {
    uint32_t bits;
    std::memcpy(&bits, data<float>(peaks) + u, 4);
    tile_peak[u / kUnitsPerTile] = std::max(tile_peak[u / kUnitsPerTile], bits & 0x7fffffff);
  }
  std::vector<float> tops(tiles);
  if (tiles > 0) std::memcpy(tops.data(), tile_peak.data(), tiles * sizeof(float));
  Rescaling r{data<uint8_t>(source),
              data<uint16_t>(steps),
              minimum ? data<uint16_t>(lows) : nullptr,
              data<float>(folds),
              tops.data(),
              k,
              tiles,
              units > 0 ? k / units * kUnitsPerTile : 0,
              data<int8_t>(q),
              data<float>(column_scale)};
  torch::stable::parallel_for(0, columns, grain(k),
                              [&](int64_t begin, int64_t end) { kernels.rescale(r, begin, end); });
  return {q, column_scale};
}

}  // namespace hot::cpu
