// Every kernel compiled for one ISA, in a namespace of its own; see kernels.hpp.
#define HOT_ISA avx2
// clang-format off
#include "vec_avx2.hpp"
#include "quantize.inl"
#include "rows.inl"
#include "columns.inl"
#include "int4.inl"
#include "shared.inl"
#include "product.inl"
#include "conv.inl"
// clang-format on

namespace hot {

extern const Kernels kAvx2 = {
    "avx2",
    avx2::rows_absmax,
    avx2::quantize_rows,
    avx2::gather_columns,
    avx2::emit_columns,
    avx2::compress_int4,
    avx2::expand_int4,
    avx2::shared_absmax,
    avx2::shared_quantize,
    avx2::sum_rows,
    avx2::quantize_scaled_rows,
    avx2::rescale,
    avx2::epilogue,
    avx2::int_product,
    avx2::fold,
    avx2::store_floats,
    avx2::transform_tiles,
};

}  // namespace hot
