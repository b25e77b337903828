#include <array>
#include <cstring>

#include "ops.hpp"

namespace hot::cpu {
namespace {

constexpr const char* kOp = "scaled_int_mm";
/// Longest K whose int32 sums cannot overflow even if every product is (-128)^2.
constexpr int64_t kMaxK = 131040;

/// int32 [M, N] = a [M, K] b [N, K]^T by the library, written to `out`.
void library_product(const Tensor& a, const Tensor& b, const Tensor& out) {
  using torch::stable::detail::from;
  Tensor b_t = torch::stable::transpose(b, 0, 1);
  std::array<StableIValue, 3> stack{from(a), from(b_t), from(out)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::_int_mm", "out", stack.data(), TORCH_ABI_VERSION));
  torch::stable::detail::to<Tensor>(stack[0]);  // takes the returned reference
}

/// Whether the library's product is exact: without VNNI (or under ONEDNN_MAX_CPU_ISA) oneDNN adds
/// pairs of int8 products in saturating 16 bits.
bool probe_library() {
  if (!has_vnni()) return false;
  constexpr int64_t m = 16, n = 16, k = 64;
  Tensor a = empty_cpu({m, k}, aoti_torch_dtype_int8());
  Tensor b = empty_cpu({n, k}, aoti_torch_dtype_int8());
  Tensor c = empty_cpu({m, n}, aoti_torch_dtype_int32());
  std::fill_n(data<int8_t>(a), m * k, int8_t{127});
  std::fill_n(data<int8_t>(b), n * k, int8_t{127});
  library_product(a, b, c);
  const int32_t* sums = data<int32_t>(c);
  return std::all_of(sums, sums + m * n, [](int32_t x) { return x == k * 127 * 127; });
}

bool library_is_exact() {
  static const bool exact = probe_library();
  return exact;
}

void own_product(const Kernels& kernels, const Tensor& a, const Tensor& b, int64_t first, int64_t k,
                 int32_t* out) {
  IntProduct product{
      data<int8_t>(a) + first, data<int8_t>(b) + first, b.size(0), k, a.size(1), out};
  torch::stable::parallel_for(0, a.size(0), grain(k * b.size(0)), [&](int64_t begin, int64_t end) {
    kernels.int_product(product, begin, end);
  });
}

/// The int32 products of slices of K, whose sum is a b^T. The first is written over `out` when that
/// has 32-bit elements.
std::vector<Tensor> products(const Kernels& kernels, const Tensor& a, const Tensor& b,
                             const Tensor& out) {
  const int64_t m = a.size(0), n = b.size(0), k = a.size(1);
  std::vector<Tensor> parts;
  for (int64_t first = 0; first < k; first += kMaxK) {
    int64_t length = std::min(kMaxK, k - first);
    bool in_place = first == 0 && out.scalar_type() == ScalarType::Float;
    const int64_t sizes[2] = {m, n}, strides[2] = {n, 1};
    Tensor part =
        in_place ? torch::stable::from_blob(
                       out.mutable_data_ptr(), {sizes, 2}, {strides, 2},
                       torch::stable::Device(torch::headeronly::DeviceType::CPU), ScalarType::Int)
                 : empty_cpu({m, n}, aoti_torch_dtype_int32());
    if (!library_is_exact()) {
      own_product(kernels, a, b, first, length, data<int32_t>(part));
    } else if (length == k) {
      library_product(a, b, part);
    } else {
      Tensor a_slice = a, b_slice = b;
      library_product(torch::stable::narrow(a_slice, 1, first, length),
                      torch::stable::narrow(b_slice, 1, first, length), part);
    }
    parts.push_back(part);
  }
  return parts;
}

void check_arguments(const Tensor& a, const Tensor& b, const Tensor& a_scale,
                     const Tensor& b_scale) {
  check_2d(a, kOp, "a");
  check_2d(b, kOp, "b");
  check_dtype(a, ScalarType::Char, kOp, "a", "int8");
  check_dtype(b, ScalarType::Char, kOp, "b", "int8");
  HOT_CHECK(a.size(1) == b.size(1), kOp, "expected a [M, K] and b [N, K] of one K; got ",
            shape_of(a), " and ", shape_of(b));
  check_dtype(a_scale, ScalarType::Float, kOp, "a_scale", "float32");
  check_dtype(b_scale, ScalarType::Float, kOp, "b_scale", "float32");
  check_shape(a_scale, {a.size(0)}, kOp, "a_scale");
  check_shape(b_scale, {b.size(0)}, kOp, "b_scale");
}

/// A term as a contiguous fp32 vector of n entries.
Tensor checked_term(const Tensor& term, int64_t n, const char* name) {
  check_dtype(term, ScalarType::Float, kOp, name, "float32");
  check_shape(term, {n}, kOp, name);
  return as_contiguous(term);
}

}  // namespace

Tensor scaled_int_mm(const Kernels& kernels, const Tensor& a_in, const Tensor& b_in,
                     const Tensor& a_scale, const Tensor& b_scale,
                     const std::optional<Tensor>& row_term, const std::optional<Tensor>& col_term,
                     ScalarType out_dtype) {
  check_arguments(a_in, b_in, a_scale, b_scale);
  HOT_CHECK(row_term.has_value() == col_term.has_value(), kOp,
            "expected row_term and col_term both or neither; got one");
  const Float type = float_type(out_dtype, kOp, "out_dtype");
  Tensor a = as_contiguous(a_in), b = as_contiguous(b_in);
  const int64_t m = a.size(0), n = b.size(0);
  Tensor row_scale = as_contiguous(a_scale), col_scale = as_contiguous(b_scale);
  Tensor row = row_term ? checked_term(*row_term, m, "row_term") : row_scale;
  Tensor col = col_term ? checked_term(*col_term, n, "col_term") : col_scale;

  const int32_t dtypes[] = {aoti_torch_dtype_float32(), aoti_torch_dtype_bfloat16(),
                            aoti_torch_dtype_float16()};
  Tensor out = empty_cpu({m, n}, dtypes[static_cast<int>(type)]);
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
                    n};
  torch::stable::parallel_for(
      0, m, grain(n), [&](int64_t begin, int64_t end) { kernels.epilogue(epilogue, begin, end); });
  return out;
}

}  // namespace hot::cpu
