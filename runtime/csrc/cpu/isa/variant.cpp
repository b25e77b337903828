// Every kernel compiled for one ISA, in a namespace of its own: HOT_ISA, which the build sets.
// clang-format off
#define HOT_QUOTED(text) #text
#define HOT_QUOTE(text) HOT_QUOTED(text)
#include "cpu/isa/lanes.hpp"
#include "cpu/quantize/quantize.inl"
#include "cpu/quantize/rows.inl"
#include "cpu/quantize/columns.inl"
#include "cpu/gemm/product.inl"
#include "cpu/conv/conv.inl"
// clang-format on

namespace hot::HOT_ISA {

extern const Kernels kKernels = {
    HOT_QUOTE(HOT_ISA), rows_absmax, quantize_rows, gather_columns, emit_columns,
    epilogue,           int_product, fold,          store_floats,   transform_tiles,
};

}  // namespace hot::HOT_ISA
