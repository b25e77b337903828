// Host side of compress_int4, expand_int4, compress_int8 and rescale_int*.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "cuda/common/tensors.hpp"
#include "cuda/common/units.hpp"
#include "cuda/storage/storage.hpp"

namespace hot {
namespace {

constexpr int64_t kInt4Group = 128, kUnitsPerTile = 8;

using Pair = std::tuple<Tensor, Tensor>;
using Triple = std::tuple<Tensor, Tensor, Tensor>;

Triple compress_int4(const Tensor& x) {
  check_matrix(x, "compress_int4", "x");
  Call call(x);
  Tensor rows = with_contiguous_rows(x, "compress_int4");
  int64_t length = round_up(x.size(0), kContractAlign) / 2;
  int64_t columns = x.size(1), groups = (x.size(0) + kInt4Group - 1) / kInt4Group;
  Tensor packed = empty(x, {columns, length}, ScalarType::Byte);
  Tensor scale = empty(x, {columns, groups}, ScalarType::BFloat16);
  Tensor minimum = empty(x, {columns, groups}, ScalarType::BFloat16);
  if (x.numel() == 0) return {packed, scale, minimum};
  CompressTask task = {rows.data_ptr(),
                       rows.size(0),
                       columns,
                       rows.size(0) > 1 ? rows.stride(0) : columns,
                       whole_vectors(rows),
                       data<uint8_t>(packed),
                       length,
                       data<uint16_t>(scale),
                       data<uint16_t>(minimum),
                       call.stream};
  dispatch(x, task, "compress_int4", compress_int4_bf16, compress_int4_fp16, compress_int4_fp32);
  return {packed, scale, minimum};
}

Triple expand_int4_op(const Tensor& packed, const Tensor& scale, const Tensor& minimum) {
  check_matrix(packed, "expand_int4", "packed");
  check_matrix(scale, "expand_int4", "scale");
  check_matrix(minimum, "expand_int4", "minimum");
  int64_t columns = packed.size(0), length = packed.size(1), groups = scale.size(1);
  STD_TORCH_CHECK(length % (kContractAlign / 2) == 0, "hot::expand_int4: packed rows have ", length,
                  " bytes, expected a multiple of 16");
  Call call(packed);
  Tensor source = dense(packed), steps = dense(scale), lows = dense(minimum);
  Tensor q = empty(packed, {columns, length * 2}, ScalarType::Char);
  Tensor column_scale = empty(packed, {columns}, ScalarType::Float);
  Tensor zero = empty(packed, {columns}, ScalarType::Float);
  if (columns == 0) return {q, column_scale, zero};
  if (groups == 0) {
    call.zero(column_scale.data_ptr(), columns * sizeof(float));
    call.zero(zero.data_ptr(), columns * sizeof(float));
    return {q, column_scale, zero};
  }
  expand_int4(ExpandTask{data<uint8_t>(source), data<uint16_t>(steps), data<uint16_t>(lows),
                         columns, length, groups, data<int8_t>(q), data<float>(column_scale),
                         data<float>(zero), call.stream});
  return {q, column_scale, zero};
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
  STD_TORCH_CHECK(contracted == units * kUnit || (!nibbles && contracted == units * 8), "hot::", op,
                  ": peak has ", units, " units for ", contracted,
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
  m.impl("compress_int4", TORCH_BOX(&compress_int4));
  m.impl("expand_int4", TORCH_BOX(&expand_int4_op));
  m.impl("compress_int8", TORCH_BOX(&compress_int8));
  m.impl("rescale_int4", TORCH_BOX(&rescale_int4_op));
  m.impl("rescale_int8", TORCH_BOX(&rescale_int8_op));
}

}  // namespace
}  // namespace hot
