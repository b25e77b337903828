// Registration of the CPU operators; schemas and fakes are in runtime/ops.py.
//
// Namespace hot_isa holds the same operators with an ISA's name as an extra last argument, so that
// tests can run every variant; its schemas are defined by the tests.

#include <torch/csrc/stable/library.h>

#include <string>

#include "cpu/ops.hpp"

namespace hot {
namespace {

const Kernels& kernels_named(const std::string& isa) {
  const Kernels* kernels = find_kernels(isa.c_str());
  STD_TORCH_CHECK(kernels != nullptr, "hot_isa: expected an ISA that this machine has of scalar, ",
                  "avx2, avx512; got ", isa, " (fastest here: ", best_kernels().name, ")");
  return *kernels;
}

std::tuple<Tensor, Tensor> rows(const Kernels& kernels, const Tensor& x, int64_t bits, bool per_row,
                                bool stochastic, bool packed, const char* op) {
  auto [q, scale] = cpu::quantize_rows(kernels, x, bits, per_row, stochastic);
  return {packed ? cpu::pack_int4(q, bits, op) : q, scale};
}

std::tuple<Tensor, Tensor, Tensor> columns(const Kernels& kernels, const Tensor& x, int64_t rank,
                                           int64_t tokens, int64_t bits, bool per_column,
                                           bool stochastic, bool packed) {
  auto [q, scale, total] =
      cpu::quantize_columns(kernels, x, rank, tokens, bits, per_column, stochastic);
  return {packed ? cpu::pack_int4(q, bits, "quantize_columns") : q, scale, total};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> grad(const Kernels& kernels,
                                                        const Tensor& grad_output, int64_t row_bits,
                                                        bool per_row, int64_t rank, int64_t tokens,
                                                        bool per_column, bool packed) {
  check_2d(grad_output, "quantize_grad", "grad_output");
  Tensor g = as_contiguous(grad_output);
  return std::tuple_cat(rows(kernels, g, row_bits, per_row, true, packed, "quantize_grad"),
                        cpu::quantize_columns(kernels, g, rank, tokens, 8, per_column, true));
}

// Boxing wants plain functions; each pair below differs in where the kernels come from.

auto quantize_rows(Tensor x, int64_t bits, bool per_row, bool stochastic, bool packed) {
  return rows(best_kernels(), x, bits, per_row, stochastic, packed, "quantize_rows");
}
auto quantize_rows_isa(Tensor x, int64_t bits, bool per_row, bool stochastic, bool packed,
                       std::string isa) {
  return rows(kernels_named(isa), x, bits, per_row, stochastic, packed, "quantize_rows");
}

auto quantize_columns(Tensor x, int64_t rank, int64_t tokens, int64_t bits, bool per_column,
                      bool stochastic, bool packed) {
  return columns(best_kernels(), x, rank, tokens, bits, per_column, stochastic, packed);
}
auto quantize_columns_isa(Tensor x, int64_t rank, int64_t tokens, int64_t bits, bool per_column,
                          bool stochastic, bool packed, std::string isa) {
  return columns(kernels_named(isa), x, rank, tokens, bits, per_column, stochastic, packed);
}

auto quantize_grad(Tensor grad_output, int64_t row_bits, bool per_row, int64_t rank, int64_t tokens,
                   bool per_column, bool packed) {
  return grad(best_kernels(), grad_output, row_bits, per_row, rank, tokens, per_column, packed);
}
auto quantize_grad_isa(Tensor grad_output, int64_t row_bits, bool per_row, int64_t rank,
                       int64_t tokens, bool per_column, bool packed, std::string isa) {
  return grad(kernels_named(isa), grad_output, row_bits, per_row, rank, tokens, per_column, packed);
}

auto compress_int4(Tensor x) { return cpu::compress_int4(best_kernels(), x); }
auto compress_int4_isa(Tensor x, std::string isa) {
  return cpu::compress_int4(kernels_named(isa), x);
}

auto expand_int4(Tensor packed, Tensor scale, Tensor minimum) {
  return cpu::expand_int4(best_kernels(), packed, scale, minimum);
}
auto expand_int4_isa(Tensor packed, Tensor scale, Tensor minimum, std::string isa) {
  return cpu::expand_int4(kernels_named(isa), packed, scale, minimum);
}

auto quantize_shared(Tensor g, int64_t rank, int64_t tokens, bool summed) {
  return cpu::quantize_shared(best_kernels(), g, rank, tokens, summed);
}
auto quantize_shared_isa(Tensor g, int64_t rank, int64_t tokens, bool summed, std::string isa) {
  return cpu::quantize_shared(kernels_named(isa), g, rank, tokens, summed);
}

auto quantize_weight(Tensor weight, Tensor equal, bool inputs_first) {
  return cpu::quantize_weight(best_kernels(), weight, equal, inputs_first);
}
auto quantize_weight_isa(Tensor weight, Tensor equal, bool inputs_first, std::string isa) {
  return cpu::quantize_weight(kernels_named(isa), weight, equal, inputs_first);
}

auto compress_int8(Tensor x, int64_t rank, int64_t tokens) {
  return cpu::compress_int8(best_kernels(), x, rank, tokens);
}
auto compress_int8_isa(Tensor x, int64_t rank, int64_t tokens, std::string isa) {
  return cpu::compress_int8(kernels_named(isa), x, rank, tokens);
}

auto rescale_int4(Tensor packed, Tensor scale, Tensor minimum, Tensor fold, Tensor peak) {
  return cpu::rescale(best_kernels(), packed, scale, &minimum, fold, peak);
}
auto rescale_int4_isa(Tensor packed, Tensor scale, Tensor minimum, Tensor fold, Tensor peak,
                      std::string isa) {
  return cpu::rescale(kernels_named(isa), packed, scale, &minimum, fold, peak);
}

auto rescale_int8(Tensor stored, Tensor scale, Tensor fold, Tensor peak) {
  return cpu::rescale(best_kernels(), stored, scale, nullptr, fold, peak);
}
auto rescale_int8_isa(Tensor stored, Tensor scale, Tensor fold, Tensor peak, std::string isa) {
  return cpu::rescale(kernels_named(isa), stored, scale, nullptr, fold, peak);
}

Tensor scaled_int_mm(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale,
                     std::optional<Tensor> row_term, std::optional<Tensor> col_term,
                     ScalarType out_dtype) {
  return cpu::scaled_int_mm(best_kernels(), a, b, a_scale, b_scale, row_term, col_term, out_dtype);
}
Tensor scaled_int_mm_isa(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale,
                         std::optional<Tensor> row_term, std::optional<Tensor> col_term,
                         ScalarType out_dtype, std::string isa) {
  return cpu::scaled_int_mm(kernels_named(isa), a, b, a_scale, b_scale, row_term, col_term,
                            out_dtype);
}

using Sizes = std::vector<int64_t>;

Tensor conv_weight(const Kernels& kernels, const Tensor& small, const Tensor& big,
                   const Tensor& small_scale, const Tensor& big_scale,
                   const std::optional<Tensor>& small_zero, const std::optional<Tensor>& big_zero,
                   int64_t batch, const Sizes& small_size, const Sizes& big_size,
                   const Sizes& kernel, const Sizes& stride, const Sizes& padding,
                   const Sizes& dilation, int64_t rank, ScalarType out_dtype) {
  Convolution conv = cpu::convolution_of("conv_grad_weight", batch, small_size, big_size, kernel,
                                         stride, padding, dilation);
  Tensor out = cpu::conv_grad_weight(kernels, small, big, small_scale, big_scale, small_zero,
                                     big_zero, conv, kernel.size(), rank, out_dtype);
  Sizes shape = kernel;
  shape.insert(shape.begin(), small.size(0));
  shape.push_back(big.size(0));
  return torch::stable::view(out, shape);
}

Tensor conv_grad_weight(Tensor small, Tensor big, Tensor small_scale, Tensor big_scale,
                        std::optional<Tensor> small_zero, std::optional<Tensor> big_zero,
                        int64_t batch, Sizes small_size, Sizes big_size, Sizes kernel, Sizes stride,
                        Sizes padding, Sizes dilation, int64_t rank, ScalarType out_dtype) {
  return conv_weight(best_kernels(), small, big, small_scale, big_scale, small_zero, big_zero,
                     batch, small_size, big_size, kernel, stride, padding, dilation, rank,
                     out_dtype);
}
Tensor conv_grad_weight_isa(Tensor small, Tensor big, Tensor small_scale, Tensor big_scale,
                            std::optional<Tensor> small_zero, std::optional<Tensor> big_zero,
                            int64_t batch, Sizes small_size, Sizes big_size, Sizes kernel,
                            Sizes stride, Sizes padding, Sizes dilation, int64_t rank,
                            ScalarType out_dtype, std::string isa) {
  return conv_weight(kernels_named(isa), small, big, small_scale, big_scale, small_zero, big_zero,
                     batch, small_size, big_size, kernel, stride, padding, dilation, rank,
                     out_dtype);
}

Tensor conv_input(const Kernels& kernels, const Tensor& rows, const Tensor& weight,
                  const Tensor& row_scale, const Tensor& weight_scale, int64_t batch,
                  const Sizes& small_size, const Sizes& big_size, const Sizes& kernel,
                  const Sizes& stride, const Sizes& padding, const Sizes& dilation,
                  ScalarType out_dtype) {
  Convolution conv = cpu::convolution_of("conv_grad_input", batch, small_size, big_size, kernel,
                                         stride, padding, dilation);
  Tensor out =
      cpu::conv_grad_input(kernels, rows, weight, row_scale, weight_scale, conv, out_dtype);
  Sizes shape = big_size;
  shape.insert(shape.begin(), batch);
  shape.push_back(out.size(1));
  return torch::stable::view(out, shape);
}

Tensor conv_grad_input(Tensor rows, Tensor weight, Tensor row_scale, Tensor weight_scale,
                       int64_t batch, Sizes small_size, Sizes big_size, Sizes kernel, Sizes stride,
                       Sizes padding, Sizes dilation, ScalarType out_dtype) {
  return conv_input(best_kernels(), rows, weight, row_scale, weight_scale, batch, small_size,
                    big_size, kernel, stride, padding, dilation, out_dtype);
}
Tensor conv_grad_input_isa(Tensor rows, Tensor weight, Tensor row_scale, Tensor weight_scale,
                           int64_t batch, Sizes small_size, Sizes big_size, Sizes kernel,
                           Sizes stride, Sizes padding, Sizes dilation, ScalarType out_dtype,
                           std::string isa) {
  return conv_input(kernels_named(isa), rows, weight, row_scale, weight_scale, batch, small_size,
                    big_size, kernel, stride, padding, dilation, out_dtype);
}

}  // namespace
}  // namespace hot

STABLE_TORCH_LIBRARY_IMPL(hot, CPU, m) {
  m.impl("quantize_rows", TORCH_BOX(&hot::quantize_rows));
  m.impl("quantize_columns", TORCH_BOX(&hot::quantize_columns));
  m.impl("quantize_grad", TORCH_BOX(&hot::quantize_grad));
  m.impl("compress_int4", TORCH_BOX(&hot::compress_int4));
  m.impl("expand_int4", TORCH_BOX(&hot::expand_int4));
  m.impl("quantize_shared", TORCH_BOX(&hot::quantize_shared));
  m.impl("quantize_weight", TORCH_BOX(&hot::quantize_weight));
  m.impl("compress_int8", TORCH_BOX(&hot::compress_int8));
  m.impl("rescale_int4", TORCH_BOX(&hot::rescale_int4));
  m.impl("rescale_int8", TORCH_BOX(&hot::rescale_int8));
  m.impl("scaled_int_mm", TORCH_BOX(&hot::scaled_int_mm));
  m.impl("conv_grad_weight", TORCH_BOX(&hot::conv_grad_weight));
  m.impl("conv_grad_input", TORCH_BOX(&hot::conv_grad_input));
}

STABLE_TORCH_LIBRARY_IMPL(hot_isa, CPU, m) {
  m.impl("quantize_rows", TORCH_BOX(&hot::quantize_rows_isa));
  m.impl("quantize_columns", TORCH_BOX(&hot::quantize_columns_isa));
  m.impl("quantize_grad", TORCH_BOX(&hot::quantize_grad_isa));
  m.impl("compress_int4", TORCH_BOX(&hot::compress_int4_isa));
  m.impl("expand_int4", TORCH_BOX(&hot::expand_int4_isa));
  m.impl("quantize_shared", TORCH_BOX(&hot::quantize_shared_isa));
  m.impl("quantize_weight", TORCH_BOX(&hot::quantize_weight_isa));
  m.impl("compress_int8", TORCH_BOX(&hot::compress_int8_isa));
  m.impl("rescale_int4", TORCH_BOX(&hot::rescale_int4_isa));
  m.impl("rescale_int8", TORCH_BOX(&hot::rescale_int8_isa));
  m.impl("scaled_int_mm", TORCH_BOX(&hot::scaled_int_mm_isa));
  m.impl("conv_grad_weight", TORCH_BOX(&hot::conv_grad_weight_isa));
  m.impl("conv_grad_input", TORCH_BOX(&hot::conv_grad_input_isa));
}
