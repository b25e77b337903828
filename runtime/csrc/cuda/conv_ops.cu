// Host side of conv_grad_weight and conv_grad_input: unfolded operands, chunk by chunk, through
// scaled_int_mm.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "conv.hpp"
#include "numeric.cuh"
#include "tensors.hpp"

namespace hot {
namespace {

constexpr int64_t kContractAlign = 32, kWorkspace = int64_t{512} << 20;

using Sizes = std::vector<int64_t>;

OutType out_type(ScalarType dtype, const char* op) {
  if (dtype == ScalarType::BFloat16) return OutType::kBf16;
  if (dtype == ScalarType::Half) return OutType::kFp16;
  STD_TORCH_CHECK(dtype == ScalarType::Float, "hot::", op, ": out_dtype number ",
                  static_cast<int>(dtype), ", expected bfloat16, float16 or float32");
  return OutType::kFp32;
}

ConvGeometry geometry_of(const char* op, int64_t batch, const Sizes& small, const Sizes& big,
                         const Sizes& kernel, const Sizes& stride, const Sizes& padding,
                         const Sizes& dilation) {
  const size_t n = kernel.size();
  bool same = n >= 1 && n <= 3;
  for (const Sizes* list : {&small, &big, &stride, &padding, &dilation})
    same = same && list->size() == n;
  STD_TORCH_CHECK(same, "hot::", op, ": expected a kernel of 1 to 3 dimensions and as many sizes, ",
                  "strides, paddings and dilations; got a kernel of ", n);
  ConvGeometry g = {
      static_cast<int>(batch), {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {0, 0, 0}, {1, 1, 1}};
  for (size_t i = 0; i < n; ++i) {
    const size_t d = 3 - n + i;
    bool valid = small[i] >= 0 && big[i] >= 0 && kernel[i] >= 1 && stride[i] >= 1 &&
                 padding[i] >= 0 && dilation[i] >= 1;
    STD_TORCH_CHECK(valid && batch >= 0, "hot::", op, ": expected sizes and padding >= 0, kernel, ",
                    "stride and dilation >= 1 in dimension ", i);
    g.small[d] = static_cast<int>(small[i]);
    g.big[d] = static_cast<int>(big[i]);
    g.kernel[d] = static_cast<int>(kernel[i]);
    g.stride[d] = static_cast<int>(stride[i]);
    g.padding[d] = static_cast<int>(padding[i]);
    g.dilation[d] = static_cast<int>(dilation[i]);
  }
  return g;
}

int64_t volume(const int (&size)[3]) { return static_cast<int64_t>(size[0]) * size[1] * size[2]; }

// hot::scaled_int_mm of this very library.
Tensor product(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
               ScalarType dtype) {
  using torch::stable::detail::from;
  std::optional<Tensor> none;
  std::array<StableIValue, 7> stack{from(a),    from(b),    from(a_scale), from(b_scale),
                                    from(none), from(none), from(dtype)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("hot::scaled_int_mm", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor vector_of(const Tensor& x, int64_t n, const char* op, const char* name) {
  STD_TORCH_CHECK(x.dim() == 1 && x.size(0) == n && x.scalar_type() == ScalarType::Float,
                  "hot::", op, ": ", name, " must be a float32 vector of ", n);
  return dense(x);
}

void check_int8(const Tensor& x, const char* op, const char* name) {
  check_matrix(x, op, name);
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Char, "hot::", op, ": ", name, " is not int8");
}

UnfoldTask unfold_task(const Tensor& big, const ConvGeometry& g, size_t dimensions, int64_t rank,
                       const Call& call) {
  UnfoldTask t = {};
  t.source = data<int8_t>(big);
  t.source_stride = big.size(1);
  t.conv = g;
  t.channels = static_cast<int>(big.size(0));
  const bool line = dimensions == 1;
  const int tile[3] = {1, line ? 1 : 4, line ? 16 : 4};
  for (int d = 0; d < 3; ++d) {
    t.tile[d] = rank ? tile[d] : 1;
    t.tiles[d] = (g.small[d] + t.tile[d] - 1) / t.tile[d];
  }
  t.kept = rank ? low_pass_mask(static_cast<int>(rank)) : 0;
  t.narrow = true;
  int64_t contracted = g.batch * volume(t.tiles) * (rank ? rank : 1);
  t.length = round_up(contracted, kContractAlign);
  t.stream = call.stream;
  return t;
}

// [rows, length] of what kernel offsets see, from row `first` of all on.
Tensor unfolded(UnfoldTask t, int64_t first, int64_t rows, const Tensor& like, const Call& call) {
  Tensor out = torch::stable::new_empty(like, {rows, t.length}, ScalarType::Char);
  t.first = static_cast<int>(first);
  t.rows = static_cast<int>(rows);
  t.out = data<int8_t>(out);
  if (t.kept) call.zero(t.out, rows * t.length);  // the padding of K
  unfold(t);
  return out;
}

struct Weight {
  Tensor small, big, small_scale;
  std::optional<Tensor> small_zero, big_zero;
};

Tensor ones(int64_t n, const Tensor& like) {
  Tensor x = torch::stable::new_empty(like, {n}, ScalarType::Float);
  return torch::stable::fill_(x, 1.0);
}

// [S, kk] sums of the small side over what lies inside, times its scale.
Tensor offset_totals(const Weight& w, UnfoldTask t, int64_t offsets, const Call& call) {
  t.source = nullptr;
  t.channels = 1;
  t.narrow = false;
  Tensor mask = unfolded(t, 0, offsets, w.small, call);
  return product(w.small, mask, w.small_scale, ones(offsets, w.small), ScalarType::Float);
}

void weight_chunk(const Weight& w, const UnfoldTask& t, const Tensor& scale, int64_t first,
                  int64_t rows, FinishTask finish_task, const Call& call) {
  Tensor seen = unfolded(t, first, rows, w.small, call);
  Tensor chunk_scale = scale;
  chunk_scale = torch::stable::narrow(chunk_scale, 0, first, rows);
  Tensor part = product(w.small, seen, w.small_scale, chunk_scale, ScalarType::Float);
  std::optional<Tensor> total;
  if (w.small_zero) {
    total = torch::stable::new_empty(w.small, {rows}, ScalarType::Float);
    row_sums({data<int8_t>(seen), static_cast<int>(rows), t.length, data<float>(chunk_scale),
              data<float>(*total), call.stream});
    finish_task.column_total = data<float>(*total);
  }
  finish_task.part = data<float>(part);
  finish_task.columns = rows;
  finish_task.first = first;
  finish(finish_task);
}

Tensor conv_grad_weight(Tensor small, Tensor big, Tensor small_scale, Tensor big_scale,
                        std::optional<Tensor> small_zero, std::optional<Tensor> big_zero,
                        int64_t batch, Sizes small_size, Sizes big_size, Sizes kernel, Sizes stride,
                        Sizes padding, Sizes dilation, int64_t rank, ScalarType out_dtype) {
  constexpr const char* op = "conv_grad_weight";
  ConvGeometry g = geometry_of(op, batch, small_size, big_size, kernel, stride, padding, dilation);
  check_int8(small, op, "small");
  check_int8(big, op, "big");
  STD_TORCH_CHECK(rank >= 0 && rank <= 16, "hot::conv_grad_weight: rank is ", rank,
                  ", expected 0 to 16");
  STD_TORCH_CHECK(!small_zero || (!big_zero && rank == 0),
                  "hot::conv_grad_weight: expected small_zero without big_zero and with rank 0");
  Call call(small);
  Tensor source = dense(big);
  UnfoldTask t = unfold_task(source, g, kernel.size(), rank, call);
  const int64_t rows = small.size(0), channels = big.size(0), offsets = volume(g.kernel);
  STD_TORCH_CHECK(small.size(1) == t.length, "hot::conv_grad_weight: small has ", small.size(1),
                  " columns, expected ", t.length);
  STD_TORCH_CHECK(big.size(1) >= batch * volume(g.big), "hot::conv_grad_weight: big has ",
                  big.size(1), " columns, expected at least ", batch * volume(g.big));
  Sizes shape = kernel;
  shape.insert(shape.begin(), rows);
  shape.push_back(channels);
  Tensor out = torch::stable::new_empty(small, shape, out_dtype);
  OutType type = out_type(out_dtype, op);
  if (out.numel() == 0) return out;
  if (t.length == 0) {
    call.zero(out.data_ptr(), out.numel() * out.element_size());
    return out;
  }
  Weight w{dense(small), source, vector_of(small_scale, rows, op, "small_scale"), {}, {}};
  Tensor column_scale = vector_of(big_scale, channels, op, "big_scale");
  if (small_zero) w.small_zero = vector_of(*small_zero, rows, op, "small_zero");
  if (big_zero) w.big_zero = vector_of(*big_zero, channels, op, "big_zero");

  const int64_t all = offsets * channels;
  Tensor scale = torch::stable::new_empty(small, {all}, ScalarType::Float);
  repeat_scale(data<float>(column_scale), static_cast<int>(channels), rank ? 4.0f : 1.0f,
               data<float>(scale), static_cast<int>(all), call.stream);
  FinishTask f = {};
  f.small = rows;
  f.all = all;
  f.channels = channels;
  f.offset_factor = rank ? 0.25f : 1.0f;
  f.out = out.data_ptr();
  f.type = type;
  f.stream = call.stream;
  std::optional<Tensor> totals;
  if (w.big_zero) {
    totals = offset_totals(w, t, offsets, call);
    f.offset_total = data<float>(*totals);
    f.big_zero = data<float>(*w.big_zero);
  }
  if (w.small_zero) f.small_zero = data<float>(*w.small_zero);
  const int64_t chunk = std::clamp<int64_t>(kWorkspace / t.length, 1, all);
  for (int64_t first = 0; first < all; first += chunk)
    weight_chunk(w, t, scale, first, std::min(chunk, all - first), f, call);
  return out;
}

Tensor conv_grad_input(Tensor rows, Tensor weight, Tensor row_scale, Tensor weight_scale,
                       int64_t batch, Sizes small_size, Sizes big_size, Sizes kernel, Sizes stride,
                       Sizes padding, Sizes dilation, ScalarType out_dtype) {
  constexpr const char* op = "conv_grad_input";
  ConvGeometry g = geometry_of(op, batch, small_size, big_size, kernel, stride, padding, dilation);
  check_int8(rows, op, "rows");
  check_int8(weight, op, "weight");
  const int64_t positions = volume(g.small), offsets = volume(g.kernel);
  STD_TORCH_CHECK(rows.size(0) == batch * positions, "hot::conv_grad_input: got ", rows.size(0),
                  " rows, expected ", batch * positions);
  STD_TORCH_CHECK(weight.size(0) % offsets == 0, "hot::conv_grad_input: weight has ",
                  weight.size(0), " rows, expected a multiple of ", offsets, " kernel offsets");
  const int64_t columns = weight.size(0), channels = columns / offsets;
  Call call(rows);
  Tensor scale = vector_of(row_scale, rows.size(0), op, "row_scale");
  Tensor column = vector_of(weight_scale, columns, op, "weight_scale");
  Sizes shape = big_size;
  shape.insert(shape.begin(), batch);
  shape.push_back(channels);
  Tensor out = torch::stable::new_empty(rows, shape, out_dtype);
  OutType type = out_type(out_dtype, op);
  if (out.numel() == 0) return out;
  if (positions == 0) {
    call.zero(out.data_ptr(), out.numel() * out.element_size());
    return out;
  }
  const int64_t bytes = positions * columns * static_cast<int64_t>(sizeof(float));
  const int64_t chunk = std::clamp<int64_t>(kWorkspace / bytes, 1, batch);
  const int64_t sample = volume(g.big) * channels * static_cast<int64_t>(out.element_size());
  for (int64_t first = 0; first < batch; first += chunk) {
    const int64_t samples = std::min(chunk, batch - first);
    Tensor part_rows = rows, part_scale = scale;
    part_rows = torch::stable::narrow(part_rows, 0, first * positions, samples * positions);
    part_scale = torch::stable::narrow(part_scale, 0, first * positions, samples * positions);
    Tensor products = product(part_rows, weight, part_scale, column, ScalarType::Float);
    FoldTask t = {
        data<float>(products), g, channels, data<char>(out) + first * sample, type, call.stream};
    t.conv.batch = static_cast<int>(samples);
    fold(t);
  }
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(hot, CUDA, m) {
  m.impl("conv_grad_weight", TORCH_BOX(&conv_grad_weight));
  m.impl("conv_grad_input", TORCH_BOX(&conv_grad_input));
}

}  // namespace
}  // namespace hot
