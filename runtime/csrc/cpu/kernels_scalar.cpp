// Every kernel compiled for one ISA, in a namespace of its own; see kernels.hpp.
#define HOT_ISA scalar
// clang-format off
#include "vec_scalar.hpp"
#include "quantize.inl"
#include "rows.inl"
#include "columns.inl"
#include "int4.inl"
#include "shared.inl"
#include "product.inl"
#include "conv.inl"
// clang-format on

namespace hot {

extern const Kernels kScalar = {
    "scalar",
    scalar::rows_absmax,
    scalar::quantize_rows,
    scalar::gather_columns,
    scalar::emit_columns,
    scalar::compress_int4,
    scalar::expand_int4,
    scalar::shared_absmax,
    scalar::shared_quantize,
    scalar::sum_rows,
    scalar::quantize_scaled_rows,
    scalar::rescale,
    scalar::epilogue,
    scalar::int_product,
    scalar::fold,
    scalar::store_floats,
    scalar::transform_tiles,
};

}  // namespace hot
