#include <cstring>
#include <memory>

#include "cpu/common/ops.hpp"

namespace hot::cpu {

/// Coefficients of H16 by LP_L1, reference.low_pass_order(): |i| + |j|, then max, then index.
static constexpr int kLowPass[16] = {0, 2, 8, 10, 3, 12, 11, 14, 1, 4, 15, 6, 9, 7, 13, 5};

uint32_t kept_mask(int64_t rank) {
  uint32_t mask = 0;
  for (int64_t i = 0; i < rank; ++i) mask |= 1u << kLowPass[i];
  return mask;
}

Grouping grouping_of(const Matrix& x, int64_t rank, int64_t tokens, const char* op) {
  HOT_CHECK(rank >= 0 && rank <= kLanes, op, "expected rank in 0..16; got ", rank);
  HOT_CHECK(tokens >= 1 && x.rows % tokens == 0, op,
            "expected tokens >= 1 that divides the rows of x; got tokens ", tokens, " for ", x.rows,
            " rows");
  int64_t samples = x.rows / tokens;
  int64_t units = rank == 0 ? x.rows : ceil_div(samples, kLanes) * tokens;
  return {static_cast<int>(rank), kept_mask(rank), tokens, samples, units};
}

namespace {

constexpr int64_t kCacheBudget = 512 << 10;  // bytes of a gathered strip that stay in L2
constexpr int64_t kGatherLimit = 8 << 20;    // a strip larger than this is worked on in chunks
constexpr int64_t kChunkUnits = 64;          // a multiple of 64 rows of K for every rank

/// One call's operands and results.
struct Columns {
  const Kernels& kernels;
  Matrix x;
  Grouping groups;
  Rounding rounding;
  ColumnOutput out;
  float* scale;

  int64_t strips(int64_t width) const { return ceil_div(x.cols, width); }

  ColumnTask task(int64_t strip, int64_t width, int64_t unit, int64_t units) const {
    int64_t column = strip * width;
    return {column, static_cast<int>(std::min(width, x.cols - column)), unit,
            std::min(units, groups.units - unit)};
  }

  /// Floats that gathering `units` units of `width` columns takes.
  int64_t gathered(int64_t units, int64_t width) const {
    return round_up(std::min(units, groups.units) * rows_per_unit(groups), kTile) * width;
  }
};

struct Strip {
  alignas(64) uint32_t absmax[kStrip] = {};
  alignas(64) float reciprocal[kStrip] = {};
};

/// Scales per column, one task per strip: x is read once, the second look finds it in cache.
void by_strips(const Columns& c, int64_t width) {
  torch::stable::parallel_for(0, c.strips(width), 1, [&](int64_t begin, int64_t end) {
    std::unique_ptr<float[]> values(new float[c.gathered(c.groups.units, width)]);
    for (int64_t s = begin; s < end; ++s) {
      Strip strip;
      ColumnTask task = c.task(s, width, 0, c.groups.units);
      c.kernels.gather_columns(c.x, c.groups, task, values.get(), strip.absmax);
      for (int i = 0; i < task.width; ++i) {
        Scale scale = scale_of(strip.absmax[i], c.rounding.qmax);
        c.scale[task.column + i] = scale.scale;
        strip.reciprocal[i] = scale.reciprocal;
      }
      c.kernels.emit_columns(values.get(), task, 0, c.out.k, strip.reciprocal, c.rounding, c.out);
    }
  });
}

/// Runs f(task, chunk, buffer) over strips of 64 columns x chunks of 64 units.
template <class Fn>
void over_chunks(const Columns& c, int64_t chunks, const Fn& f) {
  const int64_t strips = c.strips(kStrip);
  torch::stable::parallel_for(0, chunks * strips, 1, [&](int64_t begin, int64_t end) {
    std::unique_ptr<float[]> values(new float[c.gathered(kChunkUnits, kStrip)]);
    for (int64_t t = begin; t < end; ++t) {
      int64_t chunk = t / strips;
      ColumnTask task = c.task(t % strips, kStrip, chunk * kChunkUnits, kChunkUnits);
      f(task, chunk, values.get());
    }
  });
}

/// Scales from all chunks' absmax [chunks, cols] into c.scale and `reciprocal` [cols].
void reduce_scales(const Columns& c, int64_t chunks, const uint32_t* absmax, bool per_column,
                   float* reciprocal) {
  uint32_t top_of_all = 0;
  for (int64_t i = 0; i < chunks * c.x.cols; ++i) top_of_all = std::max(top_of_all, absmax[i]);
  for (int64_t column = 0; column < c.x.cols; ++column) {
    uint32_t top = per_column ? 0 : top_of_all;
    for (int64_t chunk = 0; per_column && chunk < chunks; ++chunk) {
      top = std::max(top, absmax[chunk * c.x.cols + column]);
    }
    Scale scale = scale_of(top, c.rounding.qmax);
    c.scale[column] = scale.scale;
    reciprocal[column] = scale.reciprocal;
  }
}

/// One scale for all columns, or columns too few or too long for by_strips: two looks at x.
void by_chunks(const Columns& c, bool per_column) {
  const int64_t chunks = ceil_div(c.groups.units, kChunkUnits), cols = c.x.cols;
  std::vector<uint32_t> absmax(chunks * cols);
  over_chunks(c, chunks, [&](const ColumnTask& task, int64_t chunk, float* values) {
    Strip strip;
    c.kernels.gather_columns(c.x, c.groups, task, values, strip.absmax);
    std::copy_n(strip.absmax, task.width, absmax.data() + chunk * cols + task.column);
  });
  std::vector<float> reciprocal(cols);
  reduce_scales(c, chunks, absmax.data(), per_column, reciprocal.data());

  const int64_t chunk_rows = kChunkUnits * rows_per_unit(c.groups);
  over_chunks(c, chunks, [&](const ColumnTask& task, int64_t chunk, float* values) {
    Strip strip;
    c.kernels.gather_columns(c.x, c.groups, task, values, strip.absmax);
    std::copy_n(reciprocal.data() + task.column, task.width, strip.reciprocal);
    int64_t first = chunk * chunk_rows;
    int64_t end = chunk + 1 == chunks ? c.out.k : first + chunk_rows;
    c.kernels.emit_columns(values, task, first, end, strip.reciprocal, c.rounding, c.out);
  });
}

/// Widest strip that leaves every thread work and whose gathered values stay in cache, or 0.
int64_t strip_width(const Columns& c, int64_t threads) {
  for (int64_t width = kStrip; width >= kLanes; width /= 2) {
    int64_t bytes = c.gathered(c.groups.units, width) * 4;
    if (bytes <= kCacheBudget && c.strips(width) >= 2 * threads) return width;
  }
  bool fits = c.gathered(c.groups.units, kLanes) * 4 <= kGatherLimit;
  return fits && c.strips(kLanes) >= threads ? kLanes : 0;
}

void run(const Columns& c, bool per_column) {
  if (c.x.rows == 0) {
    std::fill_n(c.scale, c.x.cols, 0.0f);
  } else if (c.x.cols > 0) {
    int64_t width = per_column ? strip_width(c, torch::stable::get_num_threads()) : 0;
    width ? by_strips(c, width) : by_chunks(c, per_column);
  }
}

}  // namespace

std::tuple<Tensor, Tensor> quantize_columns(const Kernels& kernels, const Tensor& input,
                                            int64_t rank, int64_t tokens, int64_t bits,
                                            bool per_column, bool stochastic, bool packed) {
  constexpr const char* op = "quantize_columns";
  check_2d(input, op, "x");
  Rounding rounding = rounding_of(bits, stochastic, op);
  Tensor contiguous_x = as_contiguous(input);
  Matrix x = matrix_of(contiguous_x, op);
  Grouping groups = grouping_of(x, rank, tokens, op);
  const int64_t k = round_up(groups.units * rows_per_unit(groups), kContractAlign);
  Tensor q = empty_cpu({x.cols, k}, aoti_torch_dtype_int8());
  Tensor scale = empty_cpu({x.cols}, aoti_torch_dtype_float32());
  Columns c{kernels, x, groups, rounding, {data<int8_t>(q), k}, data<float>(scale)};
  run(c, per_column);
  return {packed ? pack_int4(q, bits, op) : q, scale};
}

}  // namespace hot::cpu

HOT_REGISTER(quantize_columns)
