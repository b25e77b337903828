// GEMM for Ampere and Ada (mma.sync, cp.async) of INT8 or packed INT4 operands: with the
// dequantising epilogue, or with int32 sums out, to which combine() applies the scales.
#pragma once

#include <stdexcept>
#include <string>

#include "cutlass/cutlass.h"
#include "cutlass/gemm/device/gemm_universal.h"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm_coord.h"

// After the above: the visitors need namespace cutlass::gemm declared before cute::gemm.
#include "cuda/gemm/gemm.hpp"
#include "cutlass/epilogue/threadblock/fusion/visitors.hpp"
#include "cutlass/gemm/kernel/default_gemm_universal_with_visitor.h"

namespace hot {

// Both elements fill a threadblock's step of K with 64 bytes a row: the same shared memory, INT4
// twice as many multiply-adds.
template <class Element>
struct Sm80Shape {
  static constexpr int kBits = cutlass::sizeof_bits<Element>::value, kStep = 512 / kBits;
  using Block = cutlass::gemm::GemmShape<128, 128, kStep>;
  using Warp = cutlass::gemm::GemmShape<64, 64, kStep>;
  using Instruction = cutlass::gemm::GemmShape<16, 8, kStep / 2>;
  static constexpr int kStages = 4, kAlign = 128 / kBits;
};

inline void check_sm80(cutlass::Status status, const char* step) {
  if (status == cutlass::Status::kSuccess) return;
  throw std::runtime_error(std::string("hot::scaled_int_mm: CUTLASS sm_80 kernel failed to ") +
                           step + ": " + cutlassGetStatusString(status));
}

template <class Device>
void launch_sm80(const typename Device::Arguments& arguments, cudaStream_t stream) {
  Device device;
  check_sm80(device.can_implement(arguments), "accept the problem");
  check_sm80(device.initialize(arguments, nullptr, stream), "initialise");
  check_sm80(device.run(stream), "launch");
}

// Sums of slices of K. n must be a multiple of 4: the caller pads b.
template <class Element>
struct SumsSm80 {
  using Shape = Sm80Shape<Element>;
  using Epilogue =
      cutlass::epilogue::thread::LinearCombination<int32_t, 4, int32_t, int32_t,
                                                   cutlass::epilogue::thread::ScaleType::Nothing>;
  using Device = cutlass::gemm::device::GemmUniversal<
      Element, cutlass::layout::RowMajor, Element, cutlass::layout::ColumnMajor, int32_t,
      cutlass::layout::RowMajor, int32_t, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80,
      typename Shape::Block, typename Shape::Warp, typename Shape::Instruction, Epilogue,
      cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<8>, Shape::kStages, Shape::kAlign,
      Shape::kAlign, cutlass::arch::OpMultiplyAddSaturate>;  // a slice of K never reaches the bound

  static void run(const GemmProblem& p) {
    launch_sm80<Device>({cutlass::gemm::GemmUniversalMode::kBatched,
                         {p.m, p.n, p.k},
                         p.batch,
                         {1, 0},
                         p.a,
                         p.b,
                         p.out,
                         p.out,
                         p.k,
                         p.k,
                         p.slab,
                         p.slab,
                         p.lda,
                         p.ldb,
                         p.ldo,
                         p.ldo},
                        p.stream);
  }
};

// ((sum * a_scale) * b_scale) + row_term * col_term, each step fp32, as reference.py orders it.
// n must be a multiple of 4.
template <class Element, class Out>
struct ScaledSm80 {
  using Shape = Sm80Shape<Element>;
  using Map =
      cutlass::epilogue::threadblock::OutputTileThreadLayout<typename Shape::Block,
                                                             typename Shape::Warp, float, 4, 1>;
  using Sums = cutlass::epilogue::threadblock::VisitorAccFetch;
  using Column = cutlass::epilogue::threadblock::VisitorColBroadcast<
      Map, float, cute::Stride<cute::_1, cute::_0, cute::_0>>;
  using Row = cutlass::epilogue::threadblock::VisitorRowBroadcast<
      Map, float, cute::Stride<cute::_0, cute::_1, cute::_0>>;
  using Store =
      cutlass::epilogue::threadblock::VisitorAuxStore<Map, Out,
                                                      cutlass::FloatRoundStyle::round_to_nearest,
                                                      cute::Stride<int64_t, cute::_1, cute::_0>>;
  template <template <class> class Function>
  using Compute =
      cutlass::epilogue::threadblock::VisitorCompute<Function, float, float,
                                                     cutlass::FloatRoundStyle::round_to_nearest>;
  template <class... Nodes>
  using Tree = cutlass::epilogue::threadblock::Sm80EVT<Nodes...>;

  using ByRow = Tree<Compute<cutlass::multiplies>, Sums, Column>;
  using Scaled = Tree<Compute<cutlass::multiplies>, ByRow, Row>;
  using Sum = Tree<Compute<cutlass::homogeneous_multiply_add>, Column, Row, Scaled>;
  using Epilogue = Tree<Store, Sum>;

  using Kernel = typename cutlass::gemm::kernel::DefaultGemmWithVisitor<
      Element, cutlass::layout::RowMajor, cutlass::ComplexTransform::kNone, Shape::kAlign, Element,
      cutlass::layout::ColumnMajor, cutlass::ComplexTransform::kNone, Shape::kAlign, float,
      cutlass::layout::RowMajor, 4, int32_t, float, cutlass::arch::OpClassTensorOp,
      cutlass::arch::Sm80, typename Shape::Block, typename Shape::Warp, typename Shape::Instruction,
      Epilogue, cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<8>, Shape::kStages,
      cutlass::arch::OpMultiplyAddSaturate, 1>::GemmKernel;
  using Device = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  static typename Epilogue::Arguments epilogue(const GemmProblem& p) {
    typename ByRow::Arguments by_row = {{}, {p.a_scale, 0.0f, {}}, {}};
    typename Scaled::Arguments scaled = {by_row, {p.b_scale, 0.0f, {}}, {}};
    typename Sum::Arguments sum = {{p.row_term, 0.0f, {}}, {p.col_term, 0.0f, {}}, scaled, {}};
    return {sum, {static_cast<Out*>(p.out), {p.ldo, {}, {}}}};
  }

  static void run(const GemmProblem& p) {
    launch_sm80<Device>({cutlass::gemm::GemmUniversalMode::kGemm,
                         {p.m, p.n, p.k},
                         1,
                         epilogue(p),
                         p.a,
                         p.b,
                         nullptr,
                         nullptr,
                         0,
                         0,
                         0,
                         0,
                         p.lda,
                         p.ldb,
                         p.ldo,
                         p.ldo},
                        p.stream);
  }
};

}  // namespace hot
