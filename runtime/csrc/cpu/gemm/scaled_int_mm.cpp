#include "cpu/common/ops.hpp"

namespace hot::cpu {
namespace {

constexpr const char* kOp = "scaled_int_mm";

/// The int32 products of slices of K, whose sum is a b^T. The first is written over `out` when that
/// has 32-bit elements.
std::vector<Tensor> products(const Kernels& kernels, const Tensor& a, const Tensor& b,
                             const Tensor& out) {
  const int64_t m = a.size(0), n = b.size(0), k = a.size(1);
  std::vector<Tensor> parts;
  for (int64_t first = 0; first < k; first += kMaxK) {
    int64_t length = std::min(kMaxK, k - first);
    bool in_place = first == 0 && out.scalar_type() == ScalarType::Float;
    Tensor part = in_place ? view_cpu(out.mutable_data_ptr(), m, n, n, ScalarType::Int)
                           : empty_cpu({m, n}, aoti_torch_dtype_int32());
    int_product(kernels, {data<int8_t>(a) + first, m, k}, {data<int8_t>(b) + first, n, k}, length,
                data<int32_t>(part));
    parts.push_back(part);
  }
  return parts;
}

bool is_packed(const Tensor& t) { return t.dim() == 2 && t.scalar_type() == ScalarType::Byte; }

void check_arguments(const Tensor& a, const Tensor& b, const Tensor& a_scale,
                     const Tensor& b_scale) {
  check_2d(a, kOp, "a");
  check_2d(b, kOp, "b");
  check_dtype(a, ScalarType::Char, kOp, "a", "int8 (or both operands uint8: packed INT4)");
  check_dtype(b, ScalarType::Char, kOp, "b", "int8 (or both operands uint8: packed INT4)");
  HOT_CHECK(a.size(1) == b.size(1), kOp, "expected a [M, K] and b [N, K] of one K; got ",
            shape_of(a), " and ", shape_of(b));
  check_dtype(a_scale, ScalarType::Float, kOp, "a_scale", "float32");
  check_dtype(b_scale, ScalarType::Float, kOp, "b_scale", "float32");
  check_shape(a_scale, {a.size(0)}, kOp, "a_scale");
  check_shape(b_scale, {b.size(0)}, kOp, "b_scale");
}

}  // namespace

Tensor scaled_int_mm(const Kernels& kernels, const Tensor& a_given, const Tensor& b_given,
                     const Tensor& a_scale, const Tensor& b_scale,
                     const std::optional<Tensor>& row_term, const std::optional<Tensor>& col_term,
                     ScalarType out_dtype) {
  const bool packed = is_packed(a_given) && is_packed(b_given);
  Tensor a_in = packed ? unpack_int4(as_contiguous(a_given)) : a_given;
  Tensor b_in = packed ? unpack_int4(as_contiguous(b_given)) : b_given;
  check_arguments(a_in, b_in, a_scale, b_scale);
  HOT_CHECK(row_term.has_value() == col_term.has_value(), kOp,
            "expected row_term and col_term both or neither; got one");
  const Float type = float_type(out_dtype, kOp, "out_dtype");
  Tensor a = as_contiguous(a_in), b = as_contiguous(b_in);
  const int64_t m = a.size(0), n = b.size(0);
  Tensor row_scale = as_contiguous(a_scale), col_scale = as_contiguous(b_scale);
  Tensor row = row_term ? checked_vector(*row_term, m, kOp, "row_term") : row_scale;
  Tensor col = col_term ? checked_vector(*col_term, n, kOp, "col_term") : col_scale;

  Tensor out = empty_cpu({m, n}, dtype_of(type));
  if (m == 0 || n == 0) return out;

  std::vector<Tensor> parts = products(kernels, a, b, out);
  std::vector<const int32_t*> pointers;
  for (const Tensor& part : parts) pointers.push_back(data<int32_t>(part));
  Epilogue epilogue{pointers.data(),
                    static_cast<int>(pointers.size()),
                    data<float>(row_scale),
                    data<float>(col_scale),
                    row_term ? data<float>(row) : nullptr,
                    row_term ? data<float>(col) : nullptr,
                    out.mutable_data_ptr(),
                    type,
                    n,
                    n};
  torch::stable::parallel_for(
      0, m, grain(n), [&](int64_t begin, int64_t end) { kernels.epilogue(epilogue, begin, end); });
  return out;
}

}  // namespace hot::cpu

HOT_REGISTER(scaled_int_mm)
