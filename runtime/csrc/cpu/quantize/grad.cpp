#include "cpu/common/ops.hpp"

namespace hot::cpu {

std::tuple<Tensor, Tensor, Tensor, Tensor> quantize_grad(const Kernels& kernels,
                                                         const Tensor& grad_output,
                                                         int64_t row_bits, bool per_row,
                                                         int64_t rank, int64_t tokens,
                                                         bool per_column, bool packed) {
  check_2d(grad_output, "quantize_grad", "grad_output");
  Tensor g = as_contiguous(grad_output);
  return std::tuple_cat(quantize_rows(kernels, g, row_bits, per_row, true, packed, std::nullopt),
                        quantize_columns(kernels, g, rank, tokens, 8, per_column, true, false));
}

}  // namespace hot::cpu

HOT_REGISTER(quantize_grad)
