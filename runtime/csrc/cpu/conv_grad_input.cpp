// g_x of a convolution: integer products of g_y's rows with W, chunk by chunk, added up in cache.

#include <cstring>
#include <memory>

#include "ops.hpp"

namespace hot::cpu {
namespace {

constexpr const char* kOp = "conv_grad_input";
constexpr int64_t kChunkBytes = 1 << 20;  // of products that stay in L2
constexpr int64_t kFewestRows = 48, kMostRows = 1024;

struct Call {
  const Kernels& kernels;
  const Convolution& conv;
  const int8_t *rows, *weight;
  const float *row_scale, *weight_scale;
  int64_t k, channels;
  Float type;
  char* out;

  int64_t offsets() const { return volume(conv.kernel); }
  int64_t positions() const { return volume(conv.small); }
  int64_t results() const { return volume(conv.big) * channels; }  // of a sample
  int64_t element() const { return type == Float::f32 ? 4 : 2; }
  int64_t chunk() const {
    int64_t rows = kChunkBytes / (4 * offsets() * channels);
    return std::min(positions(), std::clamp(rows, kFewestRows, kMostRows));
  }
};

/// One sample; `products` holds a chunk, `sums` a sample's fp32 results unless these go to out.
/// With `split`, threads share each chunk; otherwise the caller is one of several threads.
void run_sample(const Call& c, int64_t sample, bool split, int32_t* products, float* sums) {
  char* out = c.out + sample * c.results() * c.element();
  float* target = c.type == Float::f32 ? reinterpret_cast<float*>(out) : sums;
  std::memset(target, 0, c.results() * sizeof(float));
  const int64_t columns = c.offsets() * c.channels, chunk = c.chunk();
  for (int64_t first = 0; first < c.positions(); first += chunk) {
    const int64_t count = std::min(chunk, c.positions() - first);
    const int64_t row = sample * c.positions() + first;
    int_product(c.kernels, {c.rows + row * c.k, count, c.k}, {c.weight, columns, c.k}, c.k,
                products);
    Fold fold{&c.conv, products, first, c.row_scale + row, c.weight_scale, target, c.channels};
    if (!split) {
      c.kernels.fold(fold, count, 0, c.channels);
      continue;
    }
    torch::stable::parallel_for(
        0, ceil_div(c.channels, kLanes), 1, [&](int64_t begin, int64_t end) {
          c.kernels.fold(fold, count, begin * kLanes, std::min(end * kLanes, c.channels));
        });
  }
  if (c.type != Float::f32) c.kernels.store_floats(target, c.results(), c.type, out);
}

void run(const Call& c) {
  const int64_t batch = c.conv.batch;
  auto samples = [&](bool split, int64_t begin, int64_t end) {
    std::unique_ptr<int32_t[]> products(new int32_t[c.chunk() * c.offsets() * c.channels]);
    std::unique_ptr<float[]> sums(c.type == Float::f32 ? nullptr : new float[c.results()]);
    for (int64_t s = begin; s < end; ++s) run_sample(c, s, split, products.get(), sums.get());
  };
  if (batch < torch::stable::get_num_threads()) return samples(true, 0, batch);
  torch::stable::parallel_for(0, batch, 1,
                              [&](int64_t begin, int64_t end) { samples(false, begin, end); });
}

}  // namespace

Tensor conv_grad_input(const Kernels& kernels, const Tensor& rows_in, const Tensor& weight_in,
                       const Tensor& row_scale, const Tensor& weight_scale, const Convolution& conv,
                       ScalarType out_dtype) {
  check_2d(rows_in, kOp, "rows");
  check_2d(weight_in, kOp, "weight");
  check_dtype(rows_in, ScalarType::Char, kOp, "rows", "int8");
  check_dtype(weight_in, ScalarType::Char, kOp, "weight", "int8");
  const int64_t positions = conv.batch * volume(conv.small), offsets = volume(conv.kernel);
  HOT_CHECK(rows_in.size(0) == positions, kOp, "expected ", positions, " rows; got ",
            shape_of(rows_in));
  HOT_CHECK(rows_in.size(1) == weight_in.size(1) && rows_in.size(1) <= kMaxK, kOp,
            "expected rows [L, K] and weight [kk * C, K] of one K up to ", kMaxK, "; got ",
            shape_of(rows_in), " and ", shape_of(weight_in));
  HOT_CHECK(weight_in.size(0) % offsets == 0, kOp, "expected rows of weight to be a multiple of ",
            offsets, " kernel offsets; got ", shape_of(weight_in));
  const Float type = float_type(out_dtype, kOp, "out_dtype");
  Tensor rows = as_contiguous(rows_in), weight = as_contiguous(weight_in);
  Tensor row = checked_vector(row_scale, positions, kOp, "row_scale");
  Tensor column = checked_vector(weight_scale, weight.size(0), kOp, "weight_scale");
  const int64_t channels = weight.size(0) / offsets;
  Tensor out = empty_cpu({conv.batch * volume(conv.big), channels}, dtype_of(type));
  Call c{kernels,
         conv,
         data<int8_t>(rows),
         data<int8_t>(weight),
         data<float>(row),
         data<float>(column),
         rows.size(1),
         channels,
         type,
         static_cast<char*>(out.mutable_data_ptr())};
  if (out.numel() > 0 && positions > 0) {
    run(c);
  } else {
    std::memset(c.out, 0, out.numel() * c.element());
  }
  return out;
}

Convolution convolution_of(const char* op, int64_t batch, const std::vector<int64_t>& small_size,
                           const std::vector<int64_t>& big_size, const std::vector<int64_t>& kernel,
                           const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
                           const std::vector<int64_t>& dilation) {
  const size_t n = kernel.size();
  HOT_CHECK(n >= 1 && n <= 3, op, "expected a kernel of 1 to 3 dimensions; got ", n);
  for (const auto* list : {&small_size, &big_size, &stride, &padding, &dilation}) {
    HOT_CHECK(list->size() == n, op, "expected ", n, " sizes, strides, paddings and dilations each",
              "; got ", list->size());
  }
  Convolution c{batch, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {0, 0, 0}, {1, 1, 1}};
  for (size_t i = 0; i < n; ++i) {
    const size_t d = 3 - n + i;
    c.small[d] = small_size[i];
    c.big[d] = big_size[i];
    c.kernel[d] = kernel[i];
    c.stride[d] = stride[i];
    c.padding[d] = padding[i];
    c.dilation[d] = dilation[i];
    HOT_CHECK(batch >= 0 && small_size[i] >= 0 && big_size[i] >= 0 && kernel[i] >= 1 &&
                  stride[i] >= 1 && padding[i] >= 0 && dilation[i] >= 1,
              op, "expected sizes and padding >= 0, kernel, stride and dilation >= 1; got a ",
              "dimension of small ", small_size[i], ", big ", big_size[i], ", kernel ", kernel[i],
              ", stride ", stride[i], ", padding ", padding[i], ", dilation ", dilation[i]);
  }
  return c;
}

}  // namespace hot::cpu
