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
  /// Rows whose products stay in cache: part of a sample, or several samples.
  int64_t chunk() const {
    return std::clamp(kChunkBytes / (4 * offsets() * channels), kFewestRows, kMostRows);
  }
  /// Samples that share a product.
  int64_t group() const { return std::clamp<int64_t>(chunk() / positions(), 1, conv.batch); }
};

struct Buffers {
  std::unique_ptr<int32_t[]> products;
  std::unique_ptr<float[]> sums;  // fp32 results of a group, unless these go to out

  explicit Buffers(const Call& c)
      : products(
            new int32_t[std::max(c.chunk(), c.group() * c.positions()) * c.offsets() * c.channels]),
        sums(c.type == Float::f32 ? nullptr : new float[c.group() * c.results()]) {}
};

void fold(const Call& c, const Fold& f, int64_t count, bool split) {
  if (!split) return c.kernels.fold(f, count, 0, c.channels);
  torch::stable::parallel_for(0, ceil_div(c.channels, kLanes), 1, [&](int64_t begin, int64_t end) {
    c.kernels.fold(f, count, begin * kLanes, std::min(end * kLanes, c.channels));
  });
}

/// Samples [sample, sample + count). With `split`, threads share each chunk; otherwise the caller
/// is one of several threads.
void run_group(const Call& c, int64_t sample, int64_t count, bool split, const Buffers& buffers) {
  char* out = c.out + sample * c.results() * c.element();
  float* target = c.type == Float::f32 ? reinterpret_cast<float*>(out) : buffers.sums.get();
  std::memset(target, 0, count * c.results() * sizeof(float));
  const int64_t columns = c.offsets() * c.channels;
  const int64_t chunk = count > 1 ? count * c.positions() : std::min(c.chunk(), c.positions());
  for (int64_t first = 0; first < count * c.positions(); first += chunk) {
    const int64_t rows = std::min(chunk, count * c.positions() - first);
    const int64_t row = sample * c.positions() + first;
    int_product(c.kernels, {c.rows + row * c.k, rows, c.k}, {c.weight, columns, c.k}, c.k,
                buffers.products.get());
    const int64_t each = count > 1 ? c.positions() : rows;  // of one sample
    for (int64_t done = 0; done < rows; done += each) {
      Fold f{&c.conv,
             buffers.products.get() + done * columns,
             first % c.positions(),
             c.row_scale + row + done,
             c.weight_scale,
             target + (first + done) / c.positions() * c.results(),
             c.channels};
      fold(c, f, each, split);
    }
  }
  if (c.type != Float::f32) c.kernels.store_floats(target, count * c.results(), c.type, out);
}

void run(const Call& c) {
  const int64_t batch = c.conv.batch, group = c.group(), groups = ceil_div(batch, group);
  auto some = [&](bool split, int64_t begin, int64_t end) {
    Buffers buffers(c);
    for (int64_t g = begin; g < end; ++g) {
      run_group(c, g * group, std::min(group, batch - g * group), split, buffers);
    }
  };
  if (groups < torch::stable::get_num_threads()) return some(true, 0, groups);
  torch::stable::parallel_for(0, groups, 1,
                              [&](int64_t begin, int64_t end) { some(false, begin, end); });
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
    std::fill_n(c.out, out.numel() * c.element(), char{0});
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
