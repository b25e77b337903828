// Every kernel compiled for one ISA, in a namespace of its own; see kernels.hpp.
#define HOT_ISA avx512
// clang-format off
#include "vec_avx512.hpp"
#include "quantize.inl"
#include "rows.inl"
#include "columns.inl"
#include "int4.inl"
#include "shared.inl"
#include "product.inl"
#include "conv.inl"
// clang-format on

namespace hot {

extern const Kernels kAvx512 = {
    "avx512",
    avx512::rows_absmax,
    avx512::quantize_rows,
    avx512::gather_columns,
    avx512::emit_columns,
    avx512::compress_int4,
    avx512::expand_int4,
    avx512::shared_absmax,
    avx512::shared_quantize,
    avx512::sum_rows,
    avx512::quantize_scaled_rows,
    avx512::rescale,
    avx512::epilogue,
    avx512::int_product,
    avx512::fold,
    avx512::store_floats,
    avx512::transform_tiles,
};

}  // namespace hot
