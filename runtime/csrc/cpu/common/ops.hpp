// The CPU operators: argument checks, allocation and threads around a table of kernels.
#pragma once

#include <optional>
#include <tuple>

#include "cpu/common/register.hpp"
#include "cpu/common/tensor.hpp"
#include "cpu/isa/kernels.hpp"

namespace hot::cpu {

// Operators that others are made of.

std::tuple<Tensor, Tensor> quantize_rows(const Kernels&, const Tensor& x, int64_t bits,
                                         bool per_row, bool stochastic, bool packed,
                                         const std::optional<Tensor>& factors);
std::tuple<Tensor, Tensor> quantize_columns(const Kernels&, const Tensor& x, int64_t rank,
                                            int64_t tokens, int64_t bits, bool per_column,
                                            bool stochastic, bool packed);
/// INT4 values in int8 [rows, k] -> uint8 [rows, k / 2], the even entries in the low nibbles.
Tensor pack_int4(const Tensor& q, int64_t bits, const char* op);
Tensor unpack_int4(const Tensor& packed);

// What they share.

using Sizes = std::vector<int64_t>;

/// The geometry of dimensions `kernel.size()`, checked; -> three dimensions.
Convolution convolution_of(const char* op, int64_t batch, const Sizes& small_size,
                           const Sizes& big_size, const Sizes& kernel, const Sizes& stride,
                           const Sizes& padding, const Sizes& dilation);
inline int64_t volume(const int64_t (&size)[3]) { return size[0] * size[1] * size[2]; }

/// Longest K whose int32 sums cannot overflow even if every product is (-128)^2.
constexpr int64_t kMaxK = 131040;

/// Rows of int8, `stride` bytes apart.
struct Int8Rows {
  const int8_t* data;
  int64_t rows, stride;
};
/// out int32 [a.rows, b.rows] = a [:, :k] b [:, :k]^T, exactly; k at most kMaxK.
void int_product(const Kernels&, const Int8Rows& a, const Int8Rows& b, int64_t k, int32_t* out);

/// Bits of the coefficients of H16 that HLA(rank) keeps.
uint32_t kept_mask(int64_t rank);
/// dtype number of a float type, for empty_cpu.
int32_t dtype_of(Float type);
/// A contiguous fp32 vector of n entries.
Tensor checked_vector(const Tensor& t, int64_t n, const char* op, const char* name);

/// How the rows of x fall into units for HLA of this rank; checks both.
Grouping grouping_of(const Matrix& x, int64_t rank, int64_t tokens, const char* op);
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
