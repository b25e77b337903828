// INT8 GEMM for Hopper (wgmma fed by TMA, warp-specialised) with the dequantising epilogue.
#pragma once

#define CUTLASS_ENABLE_GDC_FOR_SM90  // kernels wait for what an overlapping launch leaves open

#include <stdexcept>
#include <string>

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

struct Pingpong {
  using Main = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
  using Epilogue = cutlass::epilogue::TmaWarpSpecialized;
};
struct Cooperative {
  using Main = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
  using Epilogue = cutlass::epilogue::TmaWarpSpecializedCooperative;
};

template <class Out, int TileM, int TileN, class Schedule, int ClusterM = 2, int ClusterN = 1>
struct GemmSm90 {
  using Tile = Shape<Int<TileM>, Int<TileN>, Int<128>>;
  using Cluster = Shape<Int<ClusterM>, Int<ClusterN>, _1>;
  using Epilogue = ScaleEpilogue<Tile, Out>;
  static constexpr int kOutAlign = 16 / sizeof(Out);

  using CollectiveEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, int32_t, float, void,
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

  static void check(cutlass::Status status, const char* step) {
    if (status == cutlass::Status::kSuccess) return;
    throw std::runtime_error(std::string("hot::scaled_int_mm: CUTLASS sm_90 kernel failed to ") +
                             step + ": " + cutlassGetStatusString(status));
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
    arguments.hw_info.sm_count = p.sm_count;
    Device device;
    // CUTLASS asks int32 outputs for n % 4 = 0; TMA only wants the stride so, which the caller
    // pads.
    if constexpr (!std::is_same_v<Out, int32_t>)
      check(device.can_implement(arguments), "accept the problem");
    if (Device::get_workspace_size(arguments) != 0)
      throw std::runtime_error("hot::scaled_int_mm: CUTLASS sm_90 kernel wants a workspace");
    check(device.initialize(arguments, nullptr, p.stream), "initialise");
    check(device.run(p.stream, nullptr, p.stream.overlap), "launch");
  }
};

}  // namespace hot
