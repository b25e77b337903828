#include <cstring>

#include "cpu/common/ops.hpp"

namespace hot::cpu {

Float float_type(ScalarType type, const char* op, const char* name) {
  if (type == ScalarType::Float) return Float::f32;
  if (type == ScalarType::BFloat16) return Float::bf16;
  HOT_CHECK(type == ScalarType::Half, op, "expected ", name,
            " of dtype float32, bfloat16 or float16; got ", static_cast<int>(type),
            " (c10::ScalarType)");
  return Float::f16;
}

Matrix matrix_of(const Tensor& x, const char* op) {
  return {x.const_data_ptr(), float_type(x.scalar_type(), op, "x"), x.size(0), x.size(1)};
}

int32_t dtype_of(Float type) {
  if (type == Float::f32) return aoti_torch_dtype_float32();
  return type == Float::bf16 ? aoti_torch_dtype_bfloat16() : aoti_torch_dtype_float16();
}

Tensor checked_vector(const Tensor& t, int64_t n, const char* op, const char* name) {
  check_dtype(t, ScalarType::Float, op, name, "float32");
  check_shape(t, {n}, op, name);
  return as_contiguous(t);
}

Rounding rounding_of(int64_t bits, bool stochastic, const char* op) {
  HOT_CHECK(bits == 4 || bits == 8, op, "expected bits 4 or 8; got ", bits);
  return {(1 << (bits - 1)) - 1, stochastic};
}

namespace {

/// The one scale of all rows; uses `absmax` [rows] as scratch.
Scale tensor_scale(const Kernels& kernels, const Matrix& x, int qmax, uint32_t* absmax) {
  torch::stable::parallel_for(0, x.rows, grain(x.cols), [&](int64_t begin, int64_t end) {
    kernels.rows_absmax(x, begin, end, absmax);
  });
  uint32_t top = 0;
  for (int64_t r = 0; r < x.rows; ++r) top = std::max(top, absmax[r]);
  return scale_of(top, qmax);
}

}  // namespace

std::tuple<Tensor, Tensor> quantize_rows(const Kernels& kernels, const Tensor& input, int64_t bits,
                                         bool per_row, bool stochastic, bool packed,
                                         const std::optional<Tensor>& factors) {
  constexpr const char* op = "quantize_rows";
  check_2d(input, op, "x");
  Rounding rounding = rounding_of(bits, stochastic, op);
  Tensor contiguous_x = as_contiguous(input);
  Matrix x = matrix_of(contiguous_x, op);
  std::optional<Tensor> by_column;
  if (factors) by_column = checked_vector(*factors, x.cols, op, "factors");
  if (by_column) x.factors = data<float>(*by_column);
  const int64_t padded = round_up(x.cols, kContractAlign);
  Tensor q = empty_cpu({x.rows, padded}, aoti_torch_dtype_int8());
  Tensor scale = empty_cpu({x.rows}, aoti_torch_dtype_float32());
  RowOutput out{data<int8_t>(q), data<float>(scale), padded};

  Scale shared;
  if (!per_row) shared = tensor_scale(kernels, x, rounding.qmax, data<uint32_t>(scale));
  torch::stable::parallel_for(0, x.rows, grain(x.cols), [&](int64_t begin, int64_t end) {
    std::vector<float> buffer(padded);
    kernels.quantize_rows(x, begin, end, rounding, per_row ? nullptr : &shared, buffer.data(), out);
  });
  return {packed ? pack_int4(q, bits, op) : q, scale};
}

}  // namespace hot::cpu

HOT_REGISTER(quantize_rows)
