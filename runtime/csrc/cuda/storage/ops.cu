// Host side of compress_int8 and rescale_int8.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "cuda/common/tensors.hpp"
#include "cuda/common/units.hpp"
#include "cuda/storage/storage.hpp"

namespace hot {
namespace {

constexpr int64_t kUnitsPerTile = 8;

using Pair = std::tuple<Tensor, Tensor>;

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

// Storage on its columns' grids.
Pair rescale(const Tensor& stored, const Tensor& scale, const Tensor& fold, const Tensor& peak) {
  constexpr const char* op = "rescale_int8";
  check_matrix(stored, op, "stored");
  int64_t columns = stored.size(0), contracted = stored.size(1);
  int64_t units = peak.numel(), tiles = (units + kUnitsPerTile - 1) / kUnitsPerTile;
  STD_TORCH_CHECK(stored.scalar_type() == ScalarType::Char, "hot::", op, ": stored must be int8");
  STD_TORCH_CHECK(contracted % kContractAlign == 0, "hot::", op, ": ", contracted,
                  " stored rows, expected a multiple of 32");
  STD_TORCH_CHECK(contracted == units * kUnit || contracted == units * 8, "hot::", op,
                  ": peak has ", units, " units for ", contracted,
                  " stored rows, expected 16 or 8 a unit");
  Call call(stored);
  Tensor source = dense(stored), f = factors(fold, contracted, op, "fold");
  Tensor p = factors(peak, units, op, "peak");
  STD_TORCH_CHECK(scale.dim() == 2 && scale.size(0) == columns && scale.size(1) == tiles &&
                      scale.scalar_type() == ScalarType::BFloat16,
                  "hot::", op, ": scale must be bfloat16 [", columns, ", ", tiles, "]");
  Tensor steps = dense(scale);
  Tensor q = empty(stored, {columns, contracted}, ScalarType::Char);
  Tensor column_scale = empty(stored, {columns}, ScalarType::Float);
  if (columns == 0 || contracted == 0) {
    zero_all(call, column_scale);
    return {q, column_scale};
  }
  Tensor reciprocal = empty(stored, {columns}, ScalarType::Float);
  int tile = static_cast<int>(contracted / units * kUnitsPerTile);
  RescaleTask task = {data<int8_t>(source),
                      data<uint16_t>(steps),
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
  rescale_int8(task);
  return {q, column_scale};
}

STABLE_TORCH_LIBRARY_IMPL(hot, CUDA, m) {
  m.impl("compress_int8", TORCH_BOX(&compress_int8));
  m.impl("rescale_int8", TORCH_BOX(&rescale));
}

}  // namespace
}  // namespace hot
