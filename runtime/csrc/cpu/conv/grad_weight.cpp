// g_w of a convolution: for every kernel offset one integer product over positions, see frames.hpp.

#include <bit>
#include <cstring>
#include <memory>

#include "cpu/conv/frames.hpp"

namespace hot::cpu {
namespace {

constexpr const char* kOp = "conv_grad_weight";
constexpr int64_t kWideProduct = 256 * 256;  // from here on the library's own threads do well
constexpr int64_t kShortestSlice = 1024;     // of K, below which a thread is not worth its start
constexpr int64_t kSumSlice = 65536;         // int8 times 16 still sums to below 2^31

using Bytes = std::unique_ptr<int8_t[]>;

/// The geometry of Hadamard tiles: reference/conv.py's tile_shape.
struct Tile {
  int64_t size[3];
};

Tile tile_of(int64_t rank, size_t dimensions) {
  if (rank == 0) return {{1, 1, 1}};
  if (dimensions == 1) return {{1, 1, 16}};
  return {{1, 4, 4}};
}

/// One call: operands in frames, scales, the result.
struct Call {
  const Kernels& kernels;
  const Convolution& conv;
  Frames frames;
  Tile tile;
  int64_t small_rows, channels, parts;  // parts: kept coefficients of a tile, or 1
  uint32_t kept;
  Bytes small, big, mask;  // mask: of what is inside, or of the small side's positions
  Bytes unfolded, unfolded_mask;

  int64_t length() const { return parts * frames.size(); }  // of the contraction
  int64_t big_stride() const { return frames.phases() * frames.size(); }
};

Bytes allocate(int64_t bytes, int64_t slack) {
  Bytes memory(new int8_t[bytes + slack]);
  std::memset(memory.get() + bytes, 0, slack);
  return memory;
}

void fill(Call& c, const int8_t* small, int64_t small_stride, const int8_t* big,
          int64_t big_stride) {
  const int64_t slack = c.frames.slack(), length = c.length(), stride = c.big_stride();
  c.small = allocate(c.small_rows * length, slack);
  c.big = allocate(c.channels * stride, slack);
  torch::stable::parallel_for(0, c.small_rows, grain(length), [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      c.frames.fill_small(small + s * small_stride, c.parts, c.small.get() + s * length);
    }
  });
  torch::stable::parallel_for(0, c.channels, grain(stride), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      c.frames.fill_big(big + i * big_stride, c.big.get() + i * stride);
    }
  });
}

/// What kernel offset k sees of each channel: rows of K.
Int8Rows seen(const Call& c, const int8_t* frames, int64_t channels, const int64_t (&k)[3],
              bool narrow, int8_t* unfolded) {
  const int64_t none[3] = {0, 0, 0}, stride = c.big_stride();
  if (c.kept == 0) return {frames + c.frames.start(k, none), channels, stride};
  int64_t start[16];
  for (int64_t e = 0; e < 16; ++e) {
    const int64_t in_plane = c.tile.size[1] * c.tile.size[2];
    start[e] = c.frames.start(k, {e / in_plane, e % in_plane / c.tile.size[2], e % c.tile.size[2]});
  }
  const int64_t length = c.length();
  torch::stable::parallel_for(0, channels, grain(2 * length), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      Tiles tiles{{}, c.frames.size(), c.kept, narrow, unfolded + i * length};
      for (int e = 0; e < 16; ++e) tiles.elements[e] = frames + i * stride + start[e];
      c.kernels.transform_tiles(tiles);
    }
  });
  return {unfolded, channels, length};
}

/// Sums over K of each row of a times b's one row, as floats.
void dot_rows(const Call& c, const Int8Rows& a, const int8_t* b, float* out) {
  torch::stable::parallel_for(0, a.rows, grain(c.length()), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      int64_t total = 0;
      for (int64_t first = 0; first < c.length(); first += kSumSlice) {
        int32_t sum;
        IntProduct product{a.data + r * a.stride + first,
                           b + first,
                           1,
                           std::min(kSumSlice, c.length() - first),
                           0,
                           0,
                           &sum};
        c.kernels.int_product(product, 0, 1);
        total += sum;
      }
      out[r] = static_cast<float>(total);
    }
  });
}

/// The int32 products of slices of K of the small side and `b`, whose sum is their product.
std::vector<const int32_t*> slices(const Call& c, const Int8Rows& b,
                                   std::unique_ptr<int32_t[]>& sums, int64_t& held) {
  const int64_t results = c.small_rows * c.channels, length = c.length();
  const int64_t threads = torch::stable::get_num_threads();
  int64_t count = ceil_div(length, kMaxK);
  const bool shared = results < kWideProduct && length >= threads * kShortestSlice;
  if (shared) count = std::max(count, threads);
  const int64_t slice = round_up(ceil_div(length, count), 64);
  count = ceil_div(length, slice);
  if (held < count * results) sums.reset(new int32_t[held = count * results]);
  auto run = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i * slice;
      int_product(c.kernels, {c.small.get() + first, c.small_rows, length},
                  {b.data + first, c.channels, b.stride}, std::min(slice, length - first),
                  sums.get() + i * results);
    }
  };
  if (shared) {
    torch::stable::parallel_for(0, count, 1, run);
  } else {
    run(0, count);
  }
  std::vector<const int32_t*> parts;
  for (int64_t i = 0; i < count; ++i) parts.push_back(sums.get() + i * results);
  return parts;
}

struct Scales {
  const float *small, *big, *small_zero, *big_zero;
  std::vector<float> total;  // of one kernel offset: sums over K that go with a zero point
};

void totals(const Call& c, const Int8Rows& b, const int64_t (&k)[3], Scales& s) {
  if (s.big_zero) {
    Int8Rows inside = seen(c, c.mask.get(), 1, k, false, c.unfolded_mask.get());
    dot_rows(c, {c.small.get(), c.small_rows, c.length()}, inside.data, s.total.data());
    for (int64_t i = 0; i < c.small_rows; ++i) {
      s.total[i] = c.kept ? s.total[i] * s.small[i] * 0.25f : s.total[i] * s.small[i];
    }
  } else if (s.small_zero) {
    dot_rows(c, b, c.mask.get(), s.total.data());
    for (int64_t i = 0; i < c.channels; ++i) s.total[i] *= s.big[i];
  }
}

void run_offset(const Call& c, const int64_t (&k)[3], Scales& s, std::unique_ptr<int32_t[]>& sums,
                int64_t& held, Float type, char* out, int64_t out_stride) {
  Int8Rows b = seen(c, c.big.get(), c.channels, k, true, c.unfolded.get());
  totals(c, b, k, s);
  std::vector<const int32_t*> parts = slices(c, b, sums, held);
  const float* row_term = s.big_zero ? s.total.data() : s.small_zero;
  const float* col_term = s.big_zero ? s.big_zero : s.small_zero ? s.total.data() : nullptr;
  Epilogue epilogue{parts.data(), static_cast<int>(parts.size()),
                    s.small,      s.big,
                    row_term,     col_term,
                    out,          type,
                    c.channels,   out_stride};
  torch::stable::parallel_for(0, c.small_rows, grain(c.channels), [&](int64_t begin, int64_t end) {
    c.kernels.epilogue(epilogue, begin, end);
  });
}

void check(const Tensor& small, const Tensor& big, const Convolution& conv, int64_t rank,
           int64_t contracted, bool small_zero, bool big_zero) {
  check_2d(small, kOp, "small");
  check_2d(big, kOp, "big");
  check_dtype(small, ScalarType::Char, kOp, "small", "int8");
  check_dtype(big, ScalarType::Char, kOp, "big", "int8");
  HOT_CHECK(rank >= 0 && rank <= kLanes, kOp, "expected rank in 0..16; got ", rank);
  HOT_CHECK(small.size(1) >= contracted, kOp, "expected small of at least ", contracted,
            " columns; got ", shape_of(small));
  HOT_CHECK(big.size(1) >= conv.batch * volume(conv.big), kOp, "expected big of at least ",
            conv.batch * volume(conv.big), " columns; got ", shape_of(big));
  HOT_CHECK(!small_zero || (!big_zero && rank == 0), kOp,
            "expected small_zero without big_zero and with rank 0; got them together");
}

}  // namespace

/// [S, *kernel, C].
Tensor conv_grad_weight(const Kernels& kernels, const Tensor& small_in, const Tensor& big_in,
                        const Tensor& small_scale, const Tensor& big_scale,
                        const std::optional<Tensor>& small_zero,
                        const std::optional<Tensor>& big_zero, int64_t batch,
                        const Sizes& small_size, const Sizes& big_size, const Sizes& kernel,
                        const Sizes& stride, const Sizes& padding, const Sizes& dilation,
                        int64_t rank, ScalarType out_dtype) {
  const Convolution conv =
      convolution_of(kOp, batch, small_size, big_size, kernel, stride, padding, dilation);
  const Tile tile = tile_of(rank, kernel.size());
  Frames frames(conv, tile.size);
  const int64_t parts = rank ? rank : 1;
  const int64_t tiles =
      conv.batch * frames.axes[0].count * frames.axes[1].count * frames.axes[2].count;
  check(small_in, big_in, conv, rank, parts * tiles, small_zero.has_value(), big_zero.has_value());
  const Float type = float_type(out_dtype, kOp, "out_dtype");
  Tensor small = as_contiguous(small_in), big = as_contiguous(big_in);
  const int64_t rows = small.size(0), channels = big.size(0), offsets = volume(conv.kernel);
  Tensor row_scale = checked_vector(small_scale, rows, kOp, "small_scale");
  Tensor col_scale = checked_vector(big_scale, channels, kOp, "big_scale");
  Tensor row_zero = small_zero ? checked_vector(*small_zero, rows, kOp, "small_zero") : row_scale;
  Tensor col_zero = big_zero ? checked_vector(*big_zero, channels, kOp, "big_zero") : col_scale;
  Tensor out = empty_cpu({rows, offsets * channels}, dtype_of(type));
  Sizes shape = kernel;
  shape.insert(shape.begin(), rows);
  shape.push_back(channels);
  if (rows == 0 || channels == 0 || offsets == 0) return torch::stable::view(out, shape);

  Call c{kernels, conv, frames, tile, rows, channels, parts, rank ? kept_mask(rank) : 0,
         {},      {},   {},     {},   {}};
  if (c.length() == 0) {  // an empty batch
    std::memset(out.mutable_data_ptr(), 0, out.numel() * (type == Float::f32 ? 4 : 2));
    return torch::stable::view(out, shape);
  }
  fill(c, data<int8_t>(small), small.size(1), data<int8_t>(big), big.size(1));
  if (rank) c.unfolded = allocate(channels * c.length(), 0);
  if (big_zero) {
    c.mask = allocate(c.big_stride(), frames.slack());
    frames.fill_big(nullptr, c.mask.get());
    if (rank) c.unfolded_mask = allocate(c.length(), 0);
  } else if (small_zero) {
    c.mask = allocate(c.length(), 0);
    frames.fill_small(nullptr, 1, c.mask.get());
  }

  std::vector<float> wide(data<float>(col_scale), data<float>(col_scale) + channels);
  for (float& scale : wide) scale = rank ? scale * 4.0f : scale;
  Scales scales{data<float>(row_scale), wide.data(), small_zero ? data<float>(row_zero) : nullptr,
                big_zero ? data<float>(col_zero) : nullptr,
                std::vector<float>(std::max(rows, channels))};
  std::unique_ptr<int32_t[]> sums;
  int64_t held = 0;
  char* target = static_cast<char*>(out.mutable_data_ptr());
  const int64_t element = type == Float::f32 ? 4 : 2;
  for (int64_t k0 = 0; k0 < conv.kernel[0]; ++k0) {
    for (int64_t k1 = 0; k1 < conv.kernel[1]; ++k1) {
      for (int64_t k2 = 0; k2 < conv.kernel[2]; ++k2, target += channels * element) {
        run_offset(c, {k0, k1, k2}, scales, sums, held, type, target, offsets * channels);
      }
    }
  }
  return torch::stable::view(out, shape);
}

}  // namespace hot::cpu

HOT_REGISTER(conv_grad_weight)
