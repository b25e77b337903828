// INT8 GEMM for Ampere and Ada (mma.sync, cp.async); int32 sums out, combine() applies the scales.
#include <stdexcept>
#include <string>

#include "cutlass/cutlass.h"
#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/gemm/device/gemm_universal.h"
#include "gemm.hpp"

namespace hot {
namespace {

using Epilogue =
    cutlass::epilogue::thread::LinearCombination<int32_t, 4, int32_t, int32_t,
                                                 cutlass::epilogue::thread::ScaleType::Nothing>;
using Gemm = cutlass::gemm::device::GemmUniversal<
    int8_t, cutlass::layout::RowMajor, int8_t, cutlass::layout::ColumnMajor, int32_t,
    cutlass::layout::RowMajor, int32_t, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80,
    cutlass::gemm::GemmShape<128, 128, 64>, cutlass::gemm::GemmShape<64, 64, 64>,
    cutlass::gemm::GemmShape<16, 8, 32>, Epilogue,
    cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<8>, 4, 16, 16,
    cutlass::arch::OpMultiplyAddSaturate>;  // a slice of K never reaches the bound

void check(cutlass::Status status, const char* step) {
  if (status == cutlass::Status::kSuccess) return;
  throw std::runtime_error(std::string("hot::scaled_int_mm: CUTLASS sm_80 kernel failed to ") +
                           step + ": " + cutlassGetStatusString(status));
}

}  // namespace

// n must be a multiple of 4: the caller pads b.
void gemm_sm80_s32(const GemmProblem& p) {
  typename Gemm::Arguments arguments(cutlass::gemm::GemmUniversalMode::kBatched, {p.m, p.n, p.k},
                                     p.batch, {1, 0}, p.a, p.b, p.out, p.out, p.k, p.k, p.slab,
                                     p.slab, p.lda, p.ldb, p.ldo, p.ldo);
  Gemm gemm;
  check(gemm.can_implement(arguments), "accept the problem");
  check(gemm.initialize(arguments, nullptr, p.stream), "initialise");
  check(gemm.run(p.stream), "launch");
}

}  // namespace hot
