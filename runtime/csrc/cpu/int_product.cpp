// The exact integer product: oneDNN's where that is exact, else ours.
#include <array>

#include "ops.hpp"

namespace hot::cpu {
namespace {

/// int32 [M, N] = a [M, K] b [N, K]^T by the library, written to `out`. K must be at least 2: ATen
/// reads from strides which way a matrix lies, and takes rows of one value that lie side by side
/// (K = 1, both strides 1) for a row-major b^T whose rows overlap. BLAS refuses that, and ATen does
/// not look: `out` stays unwritten.
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

Tensor int8_view(const Int8Rows& x, int64_t k) {
  return view_cpu(const_cast<int8_t*>(x.data), x.rows, k, x.stride, ScalarType::Char);
}

}  // namespace

void int_product(const Kernels& kernels, const Int8Rows& a, const Int8Rows& b, int64_t k,
                 int32_t* out) {
  if (k > 1 && library_is_exact()) {
    return library_product(int8_view(a, k), int8_view(b, k),
                           view_cpu(out, a.rows, b.rows, b.rows, ScalarType::Int));
  }
  IntProduct product{a.data, b.data, b.rows, k, a.stride, b.stride, out};
  torch::stable::parallel_for(0, a.rows, grain(k * b.rows), [&](int64_t begin, int64_t end) {
    kernels.int_product(product, begin, end);
  });
}

}  // namespace hot::cpu
