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
  Bytes small, big, unfolded;

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
              int8_t* unfolded) {
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
      Tiles tiles{{}, c.frames.size(), c.kept, unfolded + i * length};
      for (int e = 0; e < 16; ++e) tiles.elements[e] = frames + i * stride + start[e];
      c.kernels.transform_tiles(tiles);
    }
  });
  return {unfolded, channels, length};
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

void run_offset(const Call& c, const int64_t (&k)[3], const float* small, const float* big,
                std::unique_ptr<int32_t[]>& sums, int64_t& held, Float type, char* out,
                int64_t out_stride) {
  Int8Rows b = seen(c, c.big.get(), c.channels, k, c.unfolded.get());
  std::vector<const int32_t*> parts = slices(c, b, sums, held);
  Epilogue epilogue{parts.data(), static_cast<int>(parts.size()),
                    small,        big,
                    nullptr,      nullptr,
                    out,          type,
                    c.channels,   out_stride};
  torch::stable::parallel_for(0, c.small_rows, grain(c.channels), [&](int64_t begin, int64_t end) {
    c.kernels.epilogue(epilogue, begin, end);
  });
}

void check(const Tensor& small, const Tensor& big, const Convolution& conv, int64_t rank,
           int64_t contracted) {
  check_2d(small, kOp, "small");
  check_2d(big, kOp, "big");
  check_dtype(small, ScalarType::Char, kOp, "small", "int8");
  check_dtype(big, ScalarType::Char, kOp, "big", "int8");
  HOT_CHECK(rank >= 0 && rank <= kLanes, kOp, "expected rank in 0..16; got ", rank);
  HOT_CHECK(small.size(1) >= contracted, kOp, "expected small of at least ", contracted,
            " columns; got ", shape_of(small));
  HOT_CHECK(big.size(1) >= conv.batch * volume(conv.big), kOp, "expected big of at least ",
            conv.batch * volume(conv.big), " columns; got ", shape_of(big));
}

}  // namespace

/// [S, *kernel, C].
Tensor conv_grad_weight(const Kernels& kernels, const Tensor& small_in, const Tensor& big_in,
                        const Tensor& small_scale, const Tensor& big_scale, int64_t batch,
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
  check(small_in, big_in, conv, rank, parts * tiles);
  const Float type = float_type(out_dtype, kOp, "out_dtype");
  Tensor small = as_contiguous(small_in), big = as_contiguous(big_in);
  const int64_t rows = small.size(0), channels = big.size(0), offsets = volume(conv.kernel);
  Tensor row_scale = checked_vector(small_scale, rows, kOp, "small_scale");
  Tensor col_scale = checked_vector(big_scale, channels, kOp, "big_scale");
  Tensor out = empty_cpu({rows, offsets * channels}, dtype_of(type));
  Sizes shape = kernel;
  shape.insert(shape.begin(), rows);
  shape.push_back(channels);
  if (rows == 0 || channels == 0 || offsets == 0) return torch::stable::view(out, shape);

  Call c{kernels, conv, frames, tile, rows, channels, parts, rank ? kept_mask(rank) : 0,
         {},      {},   {}};
  if (c.length() == 0) {  // an empty batch
    std::memset(out.mutable_data_ptr(), 0, out.numel() * (type == Float::f32 ? 4 : 2));
    return torch::stable::view(out, shape);
  }
  fill(c, data<int8_t>(small), small.size(1), data<int8_t>(big), big.size(1));
  if (rank) c.unfolded = allocate(channels * c.length(), 0);

  std::vector<float> wide(data<float>(col_scale), data<float>(col_scale) + channels);
  for (float& scale : wide) scale = rank ? scale * 4.0f : scale;
  std::unique_ptr<int32_t[]> sums;
  int64_t held = 0;
  char* target = static_cast<char*>(out.mutable_data_ptr());
  const int64_t element = type == Float::f32 ? 4 : 2;
  for (int64_t k0 = 0; k0 < conv.kernel[0]; ++k0) {
    for (int64_t k1 = 0; k1 < conv.kernel[1]; ++k1) {
      for (int64_t k2 = 0; k2 < conv.kernel[2]; ++k2, target += channels * element) {
        run_offset(c, {k0, k1, k2}, data<float>(row_scale), wide.data(), sums, held, type, target,
                   offsets * channels);
      }
    }
  }
  return torch::stable::view(out, shape);
}

}  // namespace hot::cpu

HOT_REGISTER(conv_grad_weight)
