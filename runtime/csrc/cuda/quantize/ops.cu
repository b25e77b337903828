// Host side of quantize_rows, quantize_columns and quantize_grad.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>

#include "cuda/common/device.hpp"
#include "cuda/common/tensors.hpp"
#include "cuda/quantize/quantize.hpp"

namespace hot {
namespace {

constexpr int64_t kOrder = 16;

using Pair = std::tuple<Tensor, Tensor>;

float qmax_of(int64_t bits, const char* op) {
  STD_TORCH_CHECK(bits >= 2 && bits <= 8, "hot::", op, ": bits is ", bits, ", expected 2 to 8");
  return static_cast<float>((1 << (bits - 1)) - 1);
}

QuantizeTask task_of(const Tensor& x, const Call& call) {
  QuantizeTask task = {};
  task.x = x.data_ptr();
  task.rows = x.size(0);
  task.columns = x.size(1);
  task.stride = x.size(0) > 1 ? x.stride(0) : x.size(1);
  task.vectors = whole_vectors(x);
  task.samples = x.size(0);
  task.tokens = 1;
  task.blocks = (x.size(0) + kOrder - 1) / kOrder;
  task.device = call.device;
  task.sm_count = facts_of(call.device).sm_count;
  task.stream = call.stream;
  return task;
}

void check_packed(bool packed, int64_t bits, const char* op) {
  STD_TORCH_CHECK(!packed || bits <= 4, "hot::", op, ": packed with bits ", bits,
                  ", expected at most 4");
}

Pair want_rows(QuantizeTask& task, const Tensor& x, float qmax, bool per_row, bool packed) {
  task.want_rows = true;
  task.per_row = per_row;
  task.row_qmax = qmax;
  task.row_length = round_up(task.columns, kContractAlign);
  task.row_packed = packed;
  Tensor q = empty(x, {task.rows, packed ? task.row_length / 2 : task.row_length},
                   packed ? ScalarType::Byte : ScalarType::Char);
  Tensor scale = empty(x, {task.rows}, ScalarType::Float);
  task.row_q = data<int8_t>(q);
  task.row_scale = data<float>(scale);
  return {q, scale};
}

Pair want_columns(QuantizeTask& task, const Tensor& x, int64_t rank, int64_t tokens, float qmax,
                  bool per_column, const char* op) {
  STD_TORCH_CHECK(rank >= 0 && rank <= kOrder, "hot::", op, ": rank is ", rank,
                  ", expected 0 to 16");
  STD_TORCH_CHECK(tokens >= 1 && (rank == 0 || task.rows % tokens == 0), "hot::", op, ": ",
                  task.rows, " rows are not a multiple of tokens = ", tokens);
  task.want_columns = true;
  task.per_column = per_column;
  task.column_qmax = qmax;
  task.rank = static_cast<int>(rank);
  if (rank > 0) {
    task.samples = task.rows / tokens;
    task.tokens = tokens;
    task.blocks = (task.samples + kOrder - 1) / kOrder * tokens;
  }
  task.contracted = round_up(rank == 0 ? task.rows : rank * task.blocks, kContractAlign);
  STD_TORCH_CHECK(task.contracted <= UINT32_MAX, "hot::", op, ": ", task.contracted,
                  " contracted rows, expected below 2^32");
  Tensor q = empty(x, {task.columns, task.contracted}, ScalarType::Char);
  Tensor scale = empty(x, {task.columns}, ScalarType::Float);
  task.column_q = data<int8_t>(q);
  task.column_scale = data<float>(scale);
  return {q, scale};
}

// An empty x launches nothing; what its outputs still hold is zero.
void zero_outputs(const QuantizeTask& task, const Call& call) {
  if (task.want_rows) {
    call.zero(task.row_q, task.rows * task.row_length / (task.row_packed ? 2 : 1));
    call.zero(task.row_scale, task.rows * sizeof(float));
  }
  if (task.want_columns) {
    call.zero(task.column_q, task.columns * task.contracted);
    call.zero(task.column_scale, task.columns * sizeof(float));
  }
}

// Zeroed memory of what takes two passes.
Tensor workspace_of(QuantizeTask& task, const Tensor& x, const Call& call) {
  int64_t rows = task.want_rows ? (task.per_row ? task.rows : 1) : 0;
  int64_t columns = task.want_columns ? (task.per_column ? task.columns : 1) : 0;
  Tensor workspace = empty(x, {rows + columns}, ScalarType::Int);
  uint32_t* next = data<uint32_t>(workspace);
  call.zero(next, (rows + columns) * sizeof(uint32_t));
  task.row_absmax = next;
  task.column_absmax = next + rows;
  return workspace;
}

void run(QuantizeTask& task, const Tensor& x, const Call& call, const char* op) {
  if (task.rows == 0 || task.columns == 0) return zero_outputs(task, call);
  if (!task.want_columns && rows_in_one_pass(task))
    return dispatch(x, task, op, quantize_rows_bf16, quantize_rows_fp16, quantize_rows_fp32);
  Tensor workspace = workspace_of(task, x, call);
  if (!task.want_columns)
    dispatch(x, task, op, quantize_rows_bf16, quantize_rows_fp16, quantize_rows_fp32);
  else if (task.want_rows)
    dispatch(x, task, op, quantize_grad_bf16, quantize_grad_fp16, quantize_grad_fp32);
  else
    dispatch(x, task, op, quantize_columns_bf16, quantize_columns_fp16, quantize_columns_fp32);
}

Pair quantize_rows(const Tensor& x, int64_t bits, bool per_row, bool stochastic, bool packed,
                   const std::optional<Tensor>& column_factors) {
  check_matrix(x, "quantize_rows", "x");
  check_packed(packed, bits, "quantize_rows");
  float qmax = qmax_of(bits, "quantize_rows");
  Call call(x);
  Tensor rows = with_contiguous_rows(x, "quantize_rows");
  QuantizeTask task = task_of(rows, call);
  task.stochastic = stochastic;
  Pair out = want_rows(task, x, qmax, per_row, packed);
  std::optional<Tensor> by_column;
  if (column_factors) {
    STD_TORCH_CHECK(rows_in_one_pass(task) && !stochastic, "hot::quantize_rows: factors of ",
                    task.columns, " columns, expected at most 24576, with a scale per row and ",
                    "rounding to nearest");
    by_column = factors(*column_factors, task.columns, "quantize_rows", "factors");
    task.factors = data<float>(*by_column);
  }
  run(task, rows, call, "quantize_rows");
  return out;
}

Pair quantize_columns(const Tensor& x, int64_t rank, int64_t tokens, int64_t bits, bool per_column,
                      bool stochastic, bool packed) {
  check_matrix(x, "quantize_columns", "x");
  check_packed(packed, bits, "quantize_columns");
  float qmax = qmax_of(bits, "quantize_columns");
  Call call(x);
  Tensor rows = with_contiguous_rows(x, "quantize_columns");
  QuantizeTask task = task_of(rows, call);
  task.stochastic = stochastic;
  Pair out = want_columns(task, x, rank, tokens, qmax, per_column, "quantize_columns");
  run(task, rows, call, "quantize_columns");
  if (!packed) return out;
  // A pass of its own: this is for W, which is small beside the rows of g_y.
  Tensor pairs = empty(x, {task.columns, task.contracted / 2}, ScalarType::Byte);
  pack_int4(task.column_q, data<uint8_t>(pairs), task.columns * task.contracted, call.stream);
  return {pairs, std::get<1>(out)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> quantize_grad(const Tensor& grad_output,
                                                         int64_t row_bits, bool per_row,
                                                         int64_t rank, int64_t tokens,
                                                         bool per_column, bool packed) {
  check_matrix(grad_output, "quantize_grad", "grad_output");
  check_packed(packed, row_bits, "quantize_grad");
  float qmax = qmax_of(row_bits, "quantize_grad");
  Call call(grad_output);
  Tensor rows = with_contiguous_rows(grad_output, "quantize_grad");
  QuantizeTask task = task_of(rows, call);
  task.stochastic = true;
  Pair row = want_rows(task, grad_output, qmax, per_row, packed);
  Pair column = want_columns(task, grad_output, rank, tokens, 127.0f, per_column, "quantize_grad");
  run(task, rows, call, "quantize_grad");
  return std::tuple_cat(row, column);
}

STABLE_TORCH_LIBRARY_IMPL(hot, CUDA, m) {
  m.impl("quantize_rows", TORCH_BOX(&quantize_rows));
  m.impl("quantize_columns", TORCH_BOX(&quantize_columns));
  m.impl("quantize_grad", TORCH_BOX(&quantize_grad));
}

}  // namespace
}  // namespace hot
