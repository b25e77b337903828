// Host side of quantize_one_read.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "cuda/common/device.hpp"
#include "cuda/common/numeric.cuh"
#include "cuda/common/tensors.hpp"
#include "cuda/common/units.hpp"
#include "cuda/one_read/one_read.hpp"

namespace hot {
namespace {

using Seven = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Seven quantize_one_read(const Tensor& grad_output, int64_t rank, int64_t tokens, bool summed,
                        bool fused) {
  constexpr const char* op = "quantize_one_read";
  check_matrix(grad_output, op, "grad_output");
  Units units(grad_output.size(0), rank, tokens, op);
  Call call(grad_output);
  Tensor g = with_contiguous_rows(grad_output, op);
  int64_t rows = g.size(0), columns = g.size(1), length = round_up(columns, kContractAlign);
  Tensor row_q = empty(g, {rows, length}, ScalarType::Char);
  Tensor row_scale = empty(g, {rows}, ScalarType::Float);
  Tensor col_q = empty(g, {round_up(columns, kOrder), units.contracted}, ScalarType::Char);
  Tensor fold = empty(g, {units.contracted}, ScalarType::Float);
  Tensor peak = empty(g, {units.count}, ScalarType::Float);
  Tensor equal = empty(g, {round_up(columns, kOrder)}, ScalarType::Float);
  int64_t tiles = (units.count + kTileUnits - 1) / kTileUnits;
  Tensor sums = empty(g, {summed ? tiles : 0, columns}, ScalarType::Float);
  if (rows == 0 || columns == 0) {
    zero_all(call, row_scale, fold, peak);
    if (columns > 0) torch::stable::fill_(equal, 1.0);
    return {row_q, row_scale, col_q, fold, peak, equal, sums};
  }
  Tensor sampled = empty(g, {kEqualParts * kPartSlices}, ScalarType::Int);
  OneReadTask task = {};
  task.g = g.data_ptr();
  task.rows = rows;
  task.columns = columns;
  task.stride = rows > 1 ? g.stride(0) : columns;
  task.vectors = whole_vectors(g);
  task.rank = static_cast<int>(rank);
  task.samples = static_cast<uint32_t>(units.samples);
  task.tokens = static_cast<uint32_t>(units.tokens);
  task.units = static_cast<uint32_t>(units.count);
  task.row_length = length;
  task.contracted = units.contracted;
  task.fused = fused;
  task.sampled = data<uint32_t>(sampled);
  task.equal = data<float>(equal);
  task.row_q = data<int8_t>(row_q);
  task.row_scale = data<float>(row_scale);
  task.col_q = data<int8_t>(col_q);
  task.fold = data<float>(fold);
  task.peak = data<float>(peak);
  task.sums = summed ? data<float>(sums) : nullptr;
  task.device = call.device;
  task.clusters = facts_of(call.device).hopper;
  task.stream = call.stream;
  dispatch(g, task, op, quantize_one_read_bf16, quantize_one_read_fp16, quantize_one_read_fp32);
  return {row_q, row_scale, col_q, fold, peak, equal, sums};
}

STABLE_TORCH_LIBRARY_IMPL(hot, CUDA, m) {
  m.impl("quantize_one_read", TORCH_BOX(&quantize_one_read));
}

}  // namespace
}  // namespace hot
