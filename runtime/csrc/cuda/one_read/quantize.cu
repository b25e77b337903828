// quantize_one_read in one read of grad_output: the 16 rows of a unit stay in the registers of one
// block (or of a cluster of blocks, each with a part of the columns) while the absmax of what they
// are transformed to, in place, is agreed on. Then the integers are written row by row, and,
// transposed in registers and collected over a tile of 4 units in shared memory, column by column
// in whole sectors.
#include "cuda/common/variant.hpp"
#include "cuda/one_read/agreement.cuh"
#include "cuda/one_read/column_buffer.cuh"
#include "cuda/one_read/patch.cuh"

namespace hot {

// Scales of the unit's rows, by one warp.
template <int kRank>
__device__ void write_scales(const OneReadTask& task, const UnitRows& rows, uint32_t unit,
                             uint32_t most, int halvings) {
  int lane = threadIdx.x % 32;
  float scale = one_read_scale_of(most);
  if (lane < kOrder && rows.has(lane)) task.row_scale[rows.row(lane)] = scale;
  if (kRank == 0) {
    scale = __fmul_rn(scale, power_of_2(halvings));
    uint32_t peak = __reduce_max_sync(~0u, lane < kOrder ? __float_as_uint(scale) : 0u);
    if (lane < kOrder) task.fold[unit * int64_t{kOrder} + lane] = scale;
    if (lane == 0) task.peak[unit] = __uint_as_float(peak);
  } else {
    scale = one_read_scale_of(bound_of_kept(most));
    if (lane < 8) task.fold[unit * int64_t{8} + lane] = scale;
    if (lane == 0) task.peak[unit] = scale;
  }
}

// Brings a unit's rows into L2, a line a thread.
template <class T>
__device__ void prefetch(const OneReadTask& task, const UnitRows& rows, int64_t first) {
  int i = threadIdx.x % kOrder;
  int64_t column = first + threadIdx.x / kOrder * (128 / sizeof(T));
  if (!rows.has(i) || column >= task.columns) return;
  const T* source = static_cast<const T*>(task.g) + rows.row(i) * task.stride + column;
  asm volatile("prefetch.global.L2 [%0];" ::"l"(source));
}

// A unit's integers and scales, from the bits of its rows' absmax in lanes below kOrder.
template <class T, int kRank>
__device__ void quantize_unit(const OneReadTask& task, const UnitRows& rows, uint32_t unit,
                              int64_t column, Patch<T>& patch, uint32_t most,
                              const Sampled& sampled, bool whole, bool writes_scales,
                              unsigned char* collected) {
  RowScale mine = {one_read_reciprocal_of(most), sampled.halvings(most)};  // of row `lane`
  if (writes_scales) write_scales<kRank>(task, rows, unit, most, mine.halvings);
  int turn = static_cast<int>(unit % kTileUnits);
  if (kRank != 0)
    patch.collect_kept(unit, column, turn, one_read_reciprocal_of(bound_of_kept(most)), collected);
  bool has_row = threadIdx.x % 32 < kOrder;
  bool full = whole && __all_sync(~0u, mine.reciprocal != 0.0f || !has_row);
  bool shorter = kRank == 0 && __any_sync(~0u, mine.halvings > 0 && has_row);
  if (shorter)
    patch.template write_rows<kRank == 0, false, kRank == 0>(task, rows, column, turn, mine,
                                                             collected);
  else if (full)
    patch.template write_rows<kRank == 0, true, false>(task, rows, column, turn, mine, collected);
  else
    patch.template write_rows<kRank == 0, false, false>(task, rows, column, turn, mine, collected);
}

// From the bits of 4 times the absmax: the transform's factor.
__device__ inline uint32_t quarter(uint32_t most) {
  return __float_as_uint(__fmul_rn(__uint_as_float(most), 0.25f));
}

// HLA holds all of a patch's values at once.
template <int kRank>
constexpr int kBlocksPerSm = kRank == 0 ? kOneReadBlocksPerSm : 1;

// A tile of units whose columns the threads of a block or cluster hold.
template <class T, int kRank, bool kSummed>
__global__ void __launch_bounds__(kOneReadThreads, kBlocksPerSm<kRank>)
    one_read_kernel(const __grid_constant__ OneReadTask task, bool cluster) {
  extern __shared__ __align__(16) unsigned char collected[];
  __shared__ Agreement agreement;
  __shared__ Sampled sampled;
  unsigned blocks = cluster_size(cluster), part = blockIdx.x % blocks;
  uint32_t tile = blockIdx.x / blocks;
  uint32_t begin = tile * kTileUnits, end = min(begin + kTileUnits, task.units);
  int64_t first = int64_t{part} * blockDim.x * kOwned<T>;
  int64_t column = first + Patch<T>::block() * kOrder;
  Patch<T> patch;
  agreement.start(cluster);
  wait_for_predecessor();
  sampled.find(task);
  patch.find_lift(task, sampled, column, tile == 0);
  UnitRows rows(task, begin), ahead = rows;
  ahead.next();
  float sum[kOwned<T>] = {};
#pragma unroll 1
  for (uint32_t unit = begin; unit < end; ++unit, rows = ahead, ahead.next()) {
    int turn = static_cast<int>(unit - begin);
    bool whole = task.vectors && rows.has(kOrder - 1);
    if (whole)
      patch.template load<true>(task, rows, column);
    else
      patch.template load<false>(task, rows, column);
    if (unit + 1 < end) prefetch<T>(task, ahead, first);
    if constexpr (kSummed) patch.add_to(sum);
    patch.transform();
    uint32_t of_row[Patch<T>::kRows];
    patch.largest(of_row);
    uint32_t most = quarter(agreement.largest(of_row, Patch<T>::first_row(), turn, blocks));
    quantize_unit<T, kRank>(task, rows, unit, column, patch, most, sampled, whole,
                            part == 0 && threadIdx.x < 32, collected);
  }
  if constexpr (kSummed) patch.write_sums(task, tile, column, sum);
  __syncthreads();
  ColumnBuffer<kRank>::template write<T>(task, tile, first, collected);
}

// Rows longer than registers hold: gone over twice, the second time from the caches.
template <class T, int kRank>
__global__ void __launch_bounds__(kOneReadThreads, kBlocksPerSm<kRank>)
    one_read_long_kernel(const __grid_constant__ OneReadTask task) {
  extern __shared__ __align__(16) unsigned char collected[];
  __shared__ uint32_t most[kTileUnits][kOrder];
  __shared__ Sampled sampled;
  uint32_t tile = blockIdx.x;
  int lane = threadIdx.x % 32;
  int units = static_cast<int>(min(task.units - tile * kTileUnits, uint32_t{kTileUnits}));
  int64_t step = int64_t{blockDim.x} * kOwned<T>, own = Patch<T>::block() * kOrder;
  Patch<T> patch;
  for (int i = threadIdx.x; i < kTileUnits * kOrder; i += blockDim.x) most[0][i] = 0;
  wait_for_predecessor();
  sampled.find(task);  // ends with the block in step
  for (int64_t first = 0; first < task.row_length; first += step) {
    patch.find_lift(task, sampled, first + own, tile == 0);
    for (int u = 0; u < units; ++u) {
      patch.template load<false>(task, UnitRows(task, tile * kTileUnits + u), first + own);
      uint32_t of_row[Patch<T>::kRows];
      patch.transform();
      patch.largest(of_row);
#pragma unroll
      for (int j = 0; j < Patch<T>::kRows; ++j)
        if (lane % Patch<T>::kBlocks == 0) atomicMax(&most[u][patch.first_row() + j], of_row[j]);
    }
  }
  __syncthreads();
  for (int64_t first = 0; first < task.row_length; first += step) {
    float sum[kOwned<T>] = {};
    patch.find_lift(task, sampled, first + own, false);
    for (int u = 0; u < units; ++u) {
      uint32_t unit = tile * kTileUnits + u;
      UnitRows rows(task, unit);
      uint32_t of_lane = lane < kOrder ? quarter(most[u][lane]) : 0;
      patch.template load<false>(task, rows, first + own);
      if (task.sums != nullptr) patch.add_to(sum);
      patch.transform();
      quantize_unit<T, kRank>(task, rows, unit, first + own, patch, of_lane, sampled, false,
                              first == 0 && threadIdx.x < 32, collected);
    }
    if (task.sums != nullptr) patch.write_sums(task, tile, first + own, sum);
    __syncthreads();
    ColumnBuffer<kRank>::template write<T>(task, tile, first, collected);
    __syncthreads();
  }
}

// How a unit's columns are spread over threads and blocks.
struct OneReadShape {
  int threads, cluster;
  bool resident;
};

inline OneReadShape one_read_shape(int64_t columns, int owned, bool clusters) {
  auto threads_of = [&](int64_t blocks) {
    int64_t threads = (columns + blocks * owned - 1) / (blocks * owned);
    return (threads + 31) / 32 * 32;
  };
  int cluster = 1;
  while (clusters && cluster < kMostCluster && threads_of(cluster) > kOneReadThreads) cluster *= 2;
  int64_t threads = threads_of(cluster);
  if (threads <= kOneReadThreads) return {static_cast<int>(threads), cluster, true};
  return {kOneReadThreads, 1, false};
}

template <class T, int kRank, bool kSummed>
void launch_one_read_form(const OneReadTask& task) {
  constexpr int kEach = kOwned<T> * ColumnBuffer<kRank>::kColumn;  // of shared memory, a thread
  OneReadShape shape = one_read_shape(task.row_length, kOwned<T>, task.clusters);
  int64_t tiles = (task.units + kTileUnits - 1) / kTileUnits;
  unsigned threads = static_cast<unsigned>(shape.threads);
  if (!shape.resident) {
    allow_shared<one_read_long_kernel<T, kRank>, kOneReadThreads * kEach>(task.device);
    return queue_kernel("quantize_one_read", one_read_long_kernel<T, kRank>,
                        {grid_size(tiles), threads, threads * kEach}, task.stream, task);
  }
  allow_shared<one_read_kernel<T, kRank, kSummed>, kOneReadThreads * kEach>(task.device);
  queue_kernel("quantize_one_read", one_read_kernel<T, kRank, kSummed>,
               {grid_size(tiles * shape.cluster), threads, threads * kEach, shape.cluster},
               task.stream, task, shape.cluster > 1);
}

template <class T, int kRank>
void launch_one_read_rank(const OneReadTask& task) {
  if (task.sums == nullptr) return launch_one_read_form<T, kRank, false>(task);
  launch_one_read_form<T, kRank, true>(task);
}

template <class T>
void launch_one_read(const OneReadTask& task) {
  queue_kernel("quantize_one_read: sample", sample_kernel<T>,
               {dim3(kEqualParts, kPartSlices), kSampleThreads}, task.stream, task);
  if (task.rank == 0) return launch_one_read_rank<T, 0>(task);
  launch_one_read_rank<T, 8>(task);
}

void HOT_VARIANT(quantize_one_read)(const OneReadTask& task) { launch_one_read<HOT_ELEMENT>(task); }

}  // namespace hot
