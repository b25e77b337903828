// The CPU operators: argument checks, allocation and threads around a table of kernels.
#pragma once

#include <optional>
#include <tuple>

#include "../util/tensor.hpp"
#include "kernels.hpp"

namespace hot::cpu {

std::tuple<Tensor, Tensor> quantize_rows(const Kernels&, const Tensor& x, int64_t bits,
                                         bool per_row, bool stochastic);
std::tuple<Tensor, Tensor, Tensor> quantize_columns(const Kernels&, const Tensor& x, int64_t rank,
                                                    int64_t tokens, int64_t bits, bool per_column,
                                                    bool stochastic);
std::tuple<Tensor, Tensor, Tensor> compress_int4(const Kernels&, const Tensor& x);
std::tuple<Tensor, Tensor, Tensor> expand_int4(const Kernels&, const Tensor& packed,
                                               const Tensor& scale, const Tensor& minimum);
Tensor scaled_int_mm(const Kernels&, const Tensor& a, const Tensor& b, const Tensor& a_scale,
                     const Tensor& b_scale, const std::optional<Tensor>& row_term,
                     const std::optional<Tensor>& col_term, ScalarType out_dtype);

/// x as a kernel's operand; x must be contiguous and outlive the result.
Matrix matrix_of(const Tensor& x, const char* op);
Float float_type(ScalarType type, const char* op, const char* name);
/// qmax of 4 or 8 bits.
Rounding rounding_of(int64_t bits, bool stochastic, const char* op);

/// Rows (or columns) per thread so that a thread gets at least ~32k elements of work.
inline int64_t grain(int64_t elements_per_row) {
  return std::max<int64_t>(1, 32768 / std::max<int64_t>(1, elements_per_row));
}

}  // namespace hot::cpu
