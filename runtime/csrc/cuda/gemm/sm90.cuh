// INT8 GEMM for Hopper (wgmma fed by TMA, warp-specialised) with the dequantising epilogue.
#pragma once

#define CUTLASS_ENABLE_GDC_FOR_SM90  // kernels wait for what an overlapping launch leaves open

#include <stdexcept>
#include <string>

#include "cuda/common/launch.cuh"
#include "cuda/gemm/gemm.hpp"
#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

namespace hot {

namespace fusion = cutlass::epilogue::fusion;
using cute::_0;
using cute::_1;
using cute::Int;
using cute::Shape;
using cute::Stride;

constexpr auto kRound = cutlass::FloatRoundStyle::round_to_nearest;

// ((sum * a_scale) * b_scale) + row_term * col_term, each step fp32, as reference.py orders it.
template <class Tile, class Out>
struct ScaleEpilogue {
  using Column = fusion::Sm90ColBroadcast<0, Tile, float>;
  using Row = fusion::Sm90RowBroadcast<0, Tile, float>;
  template <class Output>
  using Multiply = fusion::Sm90Compute<cutlass::multiplies, Output, float, kRound>;
  using MultiplyAdd = fusion::Sm90Compute<cutlass::homogeneous_multiply_add, Out, float, kRound>;
  using Scaled =
      fusion::Sm90EVT<Multiply<float>,
                      fusion::Sm90EVT<Multiply<float>, fusion::Sm90AccFetch, Column>, Row>;
  using Type = fusion::Sm90EVT<MultiplyAdd, Column, Row, Scaled>;

  static typename Type::Arguments arguments(const GemmProblem& p) {
    typename Scaled::Arguments scaled = {
        {{}, {p.a_scale, 0.0f, {}}, {}}, {p.b_scale, 0.0f, {}}, {}};
    return {{p.row_term, 0.0f, {}}, {p.col_term, 0.0f, {}}, scaled, {}};
  }
};

// The int32 sums themselves: partial products of split K, or outputs that TMA cannot address.
template <class Tile>
struct ScaleEpilogue<Tile, int32_t> {
  using Identity =
      fusion::Sm90Compute<cutlass::epilogue::thread::Identity, int32_t, int32_t, kRound>;
  using Type = fusion::Sm90EVT<Identity, fusion::Sm90AccFetch>;

  static typename Type::Arguments arguments(const GemmProblem&) { return {{}, {}}; }
};

// H16 over the rows, or over the columns, of a thread's fragment of a tile: (2 columns, rows r and
// r + 8, 4 blocks of 8 columns), where wgmma leaves row lane / 4 and columns 2 (lane % 4).
template <class Fragment, bool kColumns>
struct Hadamard16 {
  CUTLASS_DEVICE Fragment operator()(Fragment v) const {
    constexpr int kCount = Fragment::kElements;
    static_assert(kCount % 8 == 0, "a fragment holds whole blocks of 16 columns");
    if (kColumns) within<1>(v);
    between(v, kColumns ? 1 : 4);
    between(v, kColumns ? 2 : 8);
    if (!kColumns) between(v, 16);
    within<kColumns ? 4 : 2>(v);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) v[i] *= 0.25f;
    return v;
  }

  template <int kDistance>
  CUTLASS_DEVICE static void within(Fragment& v) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Fragment::kElements; ++i) {
      if (i & kDistance) continue;
      float low = v[i], high = v[i + kDistance];
      v[i] = low + high;
      v[i + kDistance] = low - high;
    }
  }

  CUTLASS_DEVICE static void between(Fragment& v, int lanes) {
    float sign = threadIdx.x & lanes ? -1.0f : 1.0f;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Fragment::kElements; ++i)
      v[i] = fmaf(v[i], sign, __shfl_xor_sync(0xffffffffu, v[i], lanes));
  }
};
template <class Fragment>
using HadamardOfRows = Hadamard16<Fragment, false>;
template <class Fragment>
using HadamardOfColumns = Hadamard16<Fragment, true>;

// The same without terms, and with H16 over what one scale is constant in 16 of.
template <class Tile, class Out, template <class> class Transform>
struct TransformedEpilogue {
  using Scaled = typename ScaleEpilogue<Tile, Out>::Scaled;
  using Type = fusion::Sm90EVT<fusion::Sm90Compute<Transform, Out, float, kRound>, Scaled>;

  static typename Type::Arguments arguments(const GemmProblem& p) {
    typename Scaled::Arguments scaled = {
        {{}, {p.a_scale, 0.0f, {}}, {}}, {p.b_scale, 0.0f, {}}, {}};
    return {scaled, {}};
  }
};
template <class Tile, class Out>
using RowsEpilogue = TransformedEpilogue<Tile, Out, HadamardOfRows>;
template <class Tile, class Out>
using ColumnsEpilogue = TransformedEpilogue<Tile, Out, HadamardOfColumns>;

// The same, and what stands in the result's place is added: it is read as the epilogue's source.
template <class Tile, class Out>
struct AddEpilogue {
  using Scaled = typename ScaleEpilogue<Tile, Out>::Scaled;
  using Add = fusion::Sm90Compute<cutlass::plus, Out, float, kRound>;
  using Type = fusion::Sm90EVT<Add, fusion::Sm90SrcFetch<Out>, Scaled>;

  static typename Type::Arguments arguments(const GemmProblem& p) {
    typename Scaled::Arguments scaled = {
        {{}, {p.a_scale, 0.0f, {}}, {}}, {p.b_scale, 0.0f, {}}, {}};
    return {{}, scaled, {}};
  }
};

struct Pingpong {
  using Main = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
  using Epilogue = cutlass::epilogue::TmaWarpSpecialized;
};
struct Cooperative {
  using Main = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
  using Epilogue = cutlass::epilogue::TmaWarpSpecializedCooperative;
};

template <class Out, int TileM, int TileN, class Schedule, template <class, class> class EpilogueOf>
struct GemmSm90 {
  using Tile = Shape<Int<TileM>, Int<TileN>, Int<128>>;
  using Cluster = Shape<cute::_2, _1, _1>;
  using Epilogue = EpilogueOf<Tile, Out>;
  static constexpr bool kAdds = std::is_same_v<Epilogue, AddEpilogue<Tile, Out>>;
  using Source = std::conditional_t<kAdds, Out, void>;
  static constexpr int kOutAlign = 16 / sizeof(Out);

  using CollectiveEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, int32_t, float, Source,
      cutlass::layout::RowMajor, kOutAlign, Out, cutlass::layout::RowMajor, kOutAlign,
      typename Schedule::Epilogue, typename Epilogue::Type>::CollectiveOp;
  using CollectiveMain = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, int8_t, cutlass::layout::RowMajor, 16,
      int8_t, cutlass::layout::ColumnMajor, 16, int32_t, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename CollectiveEpilogue::SharedStorage))>,
      typename Schedule::Main>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, CollectiveMain,
                                                      CollectiveEpilogue>;
  using Device = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  static void check(cutlass::Status status) {
    if (status == cutlass::Status::kSuccess) return;
    throw std::runtime_error(
        std::string("hot::scaled_int_mm: CUTLASS sm_90 kernel failed to accept the problem: ") +
        cutlassGetStatusString(status));
  }

  // As CUTLASS does it, but that its adapter sets the kernel's attributes at each launch.
  static void launch(const typename Kernel::Params& params, const GemmProblem& p) {
    constexpr auto kKernel = &cutlass::device_kernel<Kernel>;
    allow_shared<kKernel, Kernel::SharedStorageSize>(p.device);
    Geometry grid = {Device::get_grid_shape(params), Kernel::get_block_shape().x,
                     Kernel::SharedStorageSize, cute::size(Cluster{})};
    queue_kernel("scaled_int_mm", kKernel, grid, p.stream, params);
  }

  static void run(const GemmProblem& p) {
    typename Kernel::StrideA stride_a{p.lda, _1{}, p.k};
    typename Kernel::StrideB stride_b{p.ldb, _1{}, p.k};
    typename Kernel::StrideD stride_d{p.ldo, _1{}, p.slab};
    typename Device::Arguments arguments{
        cutlass::gemm::GemmUniversalMode::kGemm,
        {p.m, p.n, p.k, p.batch},
        {p.a, stride_a, p.b, stride_b},
        {Epilogue::arguments(p), nullptr, {}, static_cast<Out*>(p.out), stride_d}};
    if constexpr (kAdds) {
      arguments.epilogue.ptr_C = static_cast<Out*>(p.out);
      arguments.epilogue.dC = stride_d;
    }
    arguments.hw_info.sm_count = p.sm_count;
    // CUTLASS asks int32 outputs for n % 4 = 0; TMA only wants the stride so, which the caller
    // pads.
    if constexpr (!std::is_same_v<Out, int32_t>) check(Device::can_implement(arguments));
    if (Device::get_workspace_size(arguments) != 0)
      throw std::runtime_error("hot::scaled_int_mm: CUTLASS sm_90 kernel wants a workspace");
    launch(Kernel::to_underlying_arguments(arguments, nullptr), p);
  }
};

}  // namespace hot
