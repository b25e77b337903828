#include "cpu/common/ops.hpp"

namespace hot::cpu {

std::tuple<Tensor, Tensor, Tensor> compress_int4(const Kernels& kernels, const Tensor& input) {
  constexpr const char* op = "compress_int4";
  check_2d(input, op, "x");
  Tensor contiguous_x = as_contiguous(input);
  Matrix x = matrix_of(contiguous_x, op);
  const int64_t groups = ceil_div(x.rows, kInt4Group);
  const int64_t bytes = round_up(x.rows, kContractAlign) / 2;
  Tensor packed = empty_cpu({x.cols, bytes}, aoti_torch_dtype_uint8());
  Tensor scale = empty_cpu({x.cols, groups}, aoti_torch_dtype_bfloat16());
  Tensor minimum = empty_cpu({x.cols, groups}, aoti_torch_dtype_bfloat16());
  Int4Storage out{data<uint8_t>(packed), data<uint16_t>(scale), data<uint16_t>(minimum), bytes,
                  groups};

  const int64_t strips = ceil_div(x.cols, kStrip);
  torch::stable::parallel_for(0, groups * strips, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      int64_t column = t % strips * kStrip;
      int width = static_cast<int>(std::min<int64_t>(kStrip, x.cols - column));
      kernels.compress_int4(x, t / strips, column, width, out);
    }
  });
  return {packed, scale, minimum};
}

std::tuple<Tensor, Tensor, Tensor> expand_int4(const Kernels& kernels, const Tensor& packed,
                                               const Tensor& scale, const Tensor& minimum) {
  constexpr const char* op = "expand_int4";
  check_2d(packed, op, "packed");
  check_dtype(packed, ScalarType::Byte, op, "packed", "uint8");
  check_dtype(scale, ScalarType::BFloat16, op, "scale", "bfloat16");
  check_dtype(minimum, ScalarType::BFloat16, op, "minimum", "bfloat16");
  const int64_t cols = packed.size(0), bytes = packed.size(1);
  HOT_CHECK(bytes % (kContractAlign / 2) == 0, op,
            "expected rows of packed to be a multiple of 16 bytes, as compress_int4 writes them; "
            "got ",
            bytes);
  const int64_t groups = ceil_div(bytes, kInt4Group / 2);
  check_shape(scale, {cols, groups}, op, "scale");
  check_shape(minimum, {cols, groups}, op, "minimum");

  Tensor p = as_contiguous(packed), s = as_contiguous(scale), m = as_contiguous(minimum);
  Tensor q = empty_cpu({cols, bytes * 2}, aoti_torch_dtype_int8());
  Tensor col_scale = empty_cpu({cols}, aoti_torch_dtype_float32());
  Tensor zero = empty_cpu({cols}, aoti_torch_dtype_float32());
  if (groups == 0) {
    std::fill_n(data<float>(col_scale), cols, 0.0f);
    std::fill_n(data<float>(zero), cols, 0.0f);
    return {q, col_scale, zero};
  }
  Int4Storage in{data<uint8_t>(p), data<uint16_t>(s), data<uint16_t>(m), bytes, groups};
  Int8Columns out{data<int8_t>(q), data<float>(col_scale), data<float>(zero)};
  torch::stable::parallel_for(0, cols, grain(bytes), [&](int64_t begin, int64_t end) {
    kernels.expand_int4(in, begin, end, out);
  });
  return {q, col_scale, zero};
}

}  // namespace hot::cpu

HOT_REGISTER(compress_int4)
HOT_REGISTER(expand_int4)
