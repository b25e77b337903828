// Host side of quantize_shared, quantize_weight, compress_int8 and rescale_int*.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "device.hpp"
#include "shared.hpp"
#include "tensors.hpp"

namespace hot {
namespace {

constexpr int64_t kOrder = 16, kUnitsPerTile = 8;

using Pair = std::tuple<Tensor, Tensor>;
using Seven = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// Contracted rows of a unit of 16.
int64_t unit_rows(int64_t rank) { return rank == 0 ? kOrder : rank; }

// How `rows` rows fall into units, see reference._transform_rows; rank 0 takes them as they come.
struct Units {
  int64_t samples, tokens, contracted, count;

  Units(int64_t rows, int64_t rank, int64_t tokens_wanted, const char* op) {
    STD_TORCH_CHECK(rank == 0 || rank == 8, "hot::", op, ": rank is ", rank, ", expected 0 or 8");
    tokens = rank == 0 ? 1 : tokens_wanted;
    STD_TORCH_CHECK(tokens >= 1 && rows % tokens == 0, "hot::", op, ": ", rows,
                    " rows are not a multiple of tokens = ", tokens);
    samples = rows / tokens;
    int64_t blocks = (samples + kOrder - 1) / kOrder * tokens;
    contracted = round_up(rank == 0 ? rows : rank * blocks, kContractAlign);
    STD_TORCH_CHECK(contracted <= UINT32_MAX, "hot::", op, ": ", contracted,
                    " contracted rows, expected below 2^32");
    count = contracted / unit_rows(rank);
  }
};

template <class... Tensors>
void zero_all(const Call& call, const Tensors&... tensors) {
  (call.zero(tensors.data_ptr(), tensors.numel() * tensors.element_size()), ...);
}

Seven quantize_shared(const Tensor& grad_output, int64_t rank, int64_t tokens, bool summed) {
  constexpr const char* op = "quantize_shared";
  check_matrix(grad_output, op, "grad_output");
  Units units(grad_output.size(0), rank, tokens, op);
  Call call(grad_output);
  Tensor g = with_contiguous_rows(grad_output, op);
  int64_t rows = g.size(0), columns = g.size(1), length = round_up(columns, kContractAlign);
  int64_t strips = (columns + kSampleStrip - 1) / kSampleStrip;
  Tensor row_q = empty(g, {rows, length}, ScalarType::Char);
  Tensor row_scale = empty(g, {rows}, ScalarType::Float);
  Tensor col_q = empty(g, {columns, units.contracted}, ScalarType::Char);
  Tensor fold = empty(g, {units.contracted}, ScalarType::Float);
  Tensor peak = empty(g, {units.count}, ScalarType::Float);
  Tensor equal = empty(g, {columns}, ScalarType::Float);
  int64_t tiles = (units.count + kTileUnits - 1) / kTileUnits;
  Tensor sums = empty(g, {summed ? tiles : 0, columns}, ScalarType::Float);
  if (rows == 0 || columns == 0) {
    zero_all(call, row_scale, fold, peak);
    if (columns > 0) torch::stable::fill_(equal, 1.0);
    return {row_q, row_scale, col_q, fold, peak, equal, sums};
  }
  Tensor workspace = empty(g, {columns + strips}, ScalarType::Int);
  SharedTask task = {};
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
  task.sampled = data<uint32_t>(workspace);
  task.strip_max = task.sampled + columns;
  task.row_q = data<int8_t>(row_q);
  task.row_scale = data<float>(row_scale);
  task.col_q = data<int8_t>(col_q);
  task.fold = data<float>(fold);
  task.peak = data<float>(peak);
  task.equal = data<float>(equal);
  task.sums = summed ? data<float>(sums) : nullptr;
  task.device = call.device;
  task.clusters = facts_of(call.device).hopper;
  task.stream = call.stream;
  dispatch(g, task, op, quantize_shared_bf16, quantize_shared_fp16, quantize_shared_fp32);
  return {row_q, row_scale, col_q, fold, peak, equal, sums};
}

// A float32 vector of `length`, contiguous and on 16 bytes.
Tensor factors(const Tensor& x, int64_t length, const char* op, const char* name) {
  STD_TORCH_CHECK(x.dim() == 1 && x.size(0) == length && x.scalar_type() == ScalarType::Float,
                  "hot::", op, ": ", name, " must be a float32 vector of ", length);
  return dense(x);
}

Pair quantize_weight(const Tensor& weight, const Tensor& equal, bool inputs_first) {
  constexpr const char* op = "quantize_weight";
  check_matrix(weight, op, "weight");
  Call call(weight);
  Tensor w = with_contiguous_rows(weight, op);
  int64_t outputs = w.size(inputs_first ? 1 : 0), inputs = w.size(inputs_first ? 0 : 1);
  Tensor factor = factors(equal, outputs, op, "equal");
  int64_t length = round_up(outputs, kContractAlign);
  Tensor q = empty(w, {inputs, length}, ScalarType::Char);
  Tensor scale = empty(w, {inputs}, ScalarType::Float);
  if (inputs == 0 || outputs == 0) {
    zero_all(call, q, scale);
    return {q, scale};
  }
  WeightTask task = {w.data_ptr(),
                     outputs,
                     inputs,
                     w.size(0) > 1 ? w.stride(0) : w.size(1),
                     inputs_first,
                     whole_vectors(w),
                     data<float>(factor),
                     length,
                     data<int8_t>(q),
                     data<float>(scale),
                     call.stream};
  dispatch(w, task, op, quantize_weight_bf16, quantize_weight_fp16, quantize_weight_fp32);
  return {q, scale};
}

Pair compress_int8(const Tensor& x, int64_t rank, int64_t tokens) {
  constexpr const char* op = "compress_int8";
  check_matrix(x, op, "x");
  Units units(x.size(0), rank, tokens, op);
  Call call(x);
  Tensor rows = with_contiguous_rows(x, op);
  int64_t columns = x.size(1), tiles = (units.count + kUnitsPerTile - 1) / kUnitsPerTile;
  Tensor q = empty(x, {columns, units.contracted}, ScalarType::Char);
  Tensor scale = empty(x, {columns, tiles}, ScalarType::BFloat16);
  if (x.numel() == 0) return {q, scale};
  CompressInt8Task task = {rows.data_ptr(),
                           rows.size(0),
                           columns,
                           rows.size(0) > 1 ? rows.stride(0) : columns,
                           whole_vectors(rows),
                           static_cast<int>(rank),
                           static_cast<uint32_t>(units.samples),
                           static_cast<uint32_t>(units.tokens),
                           units.contracted,
                           tiles,
                           data<int8_t>(q),
                           data<uint16_t>(scale),
                           call.stream};
  dispatch(x, task, op, compress_int8_bf16, compress_int8_fp16, compress_int8_fp32);
  return {q, scale};
}

// Storage of either kind on its columns' grids; `minimum` is null for bytes.
Pair rescale(const Tensor& stored, const Tensor& scale, const Tensor* minimum, const Tensor& fold,
             const Tensor& peak, const char* op) {
  check_matrix(stored, op, "stored");
  bool nibbles = minimum != nullptr;
  int64_t columns = stored.size(0), contracted = stored.size(1) * (nibbles ? 2 : 1);
  int64_t units = peak.numel(), tiles = (units + kUnitsPerTile - 1) / kUnitsPerTile;
  STD_TORCH_CHECK(stored.scalar_type() == (nibbles ? ScalarType::Byte : ScalarType::Char),
                  "hot::", op, ": stored must be ", nibbles ? "uint8" : "int8");
  STD_TORCH_CHECK(contracted % kContractAlign == 0, "hot::", op, ": ", contracted,
                  " stored rows, expected a multiple of 32");
  STD_TORCH_CHECK(contracted == units * kOrder || (!nibbles && contracted == units * 8),
                  "hot::", op, ": peak has ", units, " units for ", contracted,
                  " stored rows, expected 16 (or 8 of INT8) a unit");
  Call call(stored);
  Tensor source = dense(stored), f = factors(fold, contracted, op, "fold");
  Tensor p = factors(peak, units, op, "peak");
  auto grids = [&](const Tensor& t, const char* name) {
    STD_TORCH_CHECK(t.dim() == 2 && t.size(0) == columns && t.size(1) == tiles &&
                        t.scalar_type() == ScalarType::BFloat16,
                    "hot::", op, ": ", name, " must be bfloat16 [", columns, ", ", tiles, "]");
    return dense(t);
  };
  Tensor steps = grids(scale, "scale"), lows = nibbles ? grids(*minimum, "minimum") : steps;
  Tensor q = empty(stored, {columns, contracted}, ScalarType::Char);
  Tensor column_scale = empty(stored, {columns}, ScalarType::Float);
  if (columns == 0 || contracted == 0) {
    zero_all(call, column_scale);
    return {q, column_scale};
  }
  Tensor reciprocal = empty(stored, {columns}, ScalarType::Float);
  int tile = static_cast<int>(contracted / units * kUnitsPerTile);
  RescaleTask task = {source.data_ptr(),
                      data<uint16_t>(steps),
                      data<uint16_t>(lows),
                      data<float>(f),
                      data<float>(p),
                      columns,
                      contracted,
                      tiles,
                      units,
                      tile,
                      data<int8_t>(q),
                      data<float>(column_scale),
                      data<float>(reciprocal),
                      call.stream};
  nibbles ? rescale_int4(task) : rescale_int8(task);
  return {q, column_scale};
}

Pair rescale_int4_op(const Tensor& packed, const Tensor& scale, const Tensor& minimum,
                     const Tensor& fold, const Tensor& peak) {
  return rescale(packed, scale, &minimum, fold, peak, "rescale_int4");
}

Pair rescale_int8_op(const Tensor& stored, const Tensor& scale, const Tensor& fold,
                     const Tensor& peak) {
  return rescale(stored, scale, nullptr, fold, peak, "rescale_int8");
}

STABLE_TORCH_LIBRARY_IMPL(hot, CUDA, m) {
  m.impl("quantize_shared", TORCH_BOX(&quantize_shared));
  m.impl("quantize_weight", TORCH_BOX(&quantize_weight));
  m.impl("compress_int8", TORCH_BOX(&compress_int8));
  m.impl("rescale_int4", TORCH_BOX(&rescale_int4_op));
  m.impl("rescale_int8", TORCH_BOX(&rescale_int8_op));
}

}  // namespace
}  // namespace hot
