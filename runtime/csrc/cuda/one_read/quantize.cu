// quantize_one_read in one read of grad_output: the 16 rows of a unit stay in the registers of one
// block (or of a cluster of blocks, each with a part of the columns) while their absmax is agreed
// on. Then the integers are written row by row, and, transposed in registers and collected over a
// tile of 4 units in shared memory, column by column in whole sectors.
#include "cuda/common/variant.hpp"
#include "cuda/one_read/agreement.cuh"
#include "cuda/one_read/column_buffer.cuh"
#include "cuda/one_read/patch.cuh"

namespace hot {

// Scales of the unit's rows, by one warp.
template <int kRank>
__device__ void write_scales(const OneReadTask& task, const UnitRows& rows, uint32_t unit,
                             uint32_t most) {
  int lane = threadIdx.x % 32;
  float scale = one_read_scale_of(most);
  if (lane < kOrder && rows.has(lane)) task.row_scale[rows.row(lane)] = scale;
  if (kRank == 0) {
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

template <class T, int kRank>
__device__ void quantize_unit(const OneReadTask& task, const UnitRows& rows, uint32_t unit,
                              int64_t column, Patch<T>& patch, uint32_t most, bool whole,
                              unsigned char* out, float (&sum)[kOwned<T>]) {
  float reciprocal = one_read_reciprocal_of(most);  // of row `lane`
  if (kRank != 0)
    patch.collect_kept(unit, column, one_read_reciprocal_of(bound_of_kept(most)), out);
  if (whole && __all_sync(~0u, reciprocal != 0.0f || threadIdx.x % 32 >= kOrder))
    patch.template write_rows<kRank == 0, true>(task, rows, column, reciprocal, out, sum);
  else
    patch.template write_rows<kRank == 0, false>(task, rows, column, reciprocal, out, sum);
}

// A tile of units whose columns the threads of a block or cluster hold.
template <class T, int kRank>
__global__ void __launch_bounds__(kOneReadThreads, kOneReadBlocksPerSm)
    one_read_kernel(const __grid_constant__ OneReadTask task, bool cluster) {
  extern __shared__ __align__(16) unsigned char collected[];
  __shared__ Agreement agreement;
  unsigned blocks = cluster_size(cluster), part = blockIdx.x % blocks;
  uint32_t tile = blockIdx.x / blocks;
  uint32_t begin = tile * kTileUnits, end = min(begin + kTileUnits, task.units);
  int64_t first = int64_t{part} * blockDim.x * kOwned<T>;
  int64_t column = first + threadIdx.x * kOwned<T>;
  Patch<T> patch;
  agreement.start(cluster);
  wait_for_predecessor();
  patch.find_lift(task, column, highest_exponent(task), tile == 0);
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
    patch.apply_lift();
    uint32_t of_row[kOrder];
    patch.largest(of_row);
    uint32_t most = agreement.largest(of_row, turn, blocks);
    if (part == 0 && threadIdx.x < 32) write_scales<kRank>(task, rows, unit, most);
    quantize_unit<T, kRank>(task, rows, unit, column, patch, most, whole,
                            ColumnBuffer<kRank>::place(collected, turn), sum);
  }
  patch.write_sums(task, tile, column, sum);
  __syncthreads();
  ColumnBuffer<kRank>::template write<T>(task, tile, first, collected);
}

// Rows longer than registers hold: gone over twice, the second time from the caches.
template <class T, int kRank>
__global__ void __launch_bounds__(kOneReadThreads, kOneReadBlocksPerSm)
    one_read_long_kernel(const __grid_constant__ OneReadTask task) {
  extern __shared__ __align__(16) unsigned char collected[];
  __shared__ uint32_t most[kTileUnits][kOrder];
  uint32_t tile = blockIdx.x;
  int lane = threadIdx.x % 32;
  int units = static_cast<int>(min(task.units - tile * kTileUnits, uint32_t{kTileUnits}));
  int64_t step = int64_t{blockDim.x} * kOwned<T>, own = threadIdx.x * kOwned<T>;
  Patch<T> patch;
  for (int i = threadIdx.x; i < kTileUnits * kOrder; i += blockDim.x) most[0][i] = 0;
  wait_for_predecessor();
  int highest = highest_exponent(task);  // ends with the block in step
  for (int64_t first = 0; first < task.row_length; first += step) {
    patch.find_lift(task, first + own, highest, tile == 0);
    for (int u = 0; u < units; ++u) {
      patch.template load<false>(task, UnitRows(task, tile * kTileUnits + u), first + own);
      patch.apply_lift();
      uint32_t of_row[kOrder];
      patch.largest(of_row);
#pragma unroll
      for (int i = 0; i < kOrder; ++i)
        if (lane == i) atomicMax(&most[u][i], of_row[i]);
    }
  }
  __syncthreads();
  for (int64_t first = 0; first < task.row_length; first += step) {
    patch.find_lift(task, first + own, highest, false);
    float sum[kOwned<T>] = {};
    for (int u = 0; u < units; ++u) {
      uint32_t unit = tile * kTileUnits + u;
      UnitRows rows(task, unit);
      uint32_t of_lane = lane < kOrder ? most[u][lane] : 0;
      if (first == 0 && threadIdx.x < 32) write_scales<kRank>(task, rows, unit, of_lane);
      patch.template load<false>(task, rows, first + own);
      patch.apply_lift();
      quantize_unit<T, kRank>(task, rows, unit, first + own, patch, of_lane, false,
                              ColumnBuffer<kRank>::place(collected, u), sum);
    }
    patch.write_sums(task, tile, first + own, sum);
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

template <class T, int kRank>
void launch_one_read_rank(const OneReadTask& task) {
  constexpr int kEach = kOwned<T> * ColumnBuffer<kRank>::kColumn;
  OneReadShape shape = one_read_shape(task.row_length, kOwned<T>, task.clusters);
  int64_t tiles = (task.units + kTileUnits - 1) / kTileUnits;
  unsigned threads = static_cast<unsigned>(shape.threads);
  if (!shape.resident) {
    allow_shared<one_read_long_kernel<T, kRank>, kOneReadThreads * kEach>(task.device);
    return queue_kernel("quantize_one_read", one_read_long_kernel<T, kRank>,
                        {grid_size(tiles), threads, threads * kEach}, task.stream, task);
  }
  allow_shared<one_read_kernel<T, kRank>, kOneReadThreads * kEach>(task.device);
  queue_kernel("quantize_one_read", one_read_kernel<T, kRank>,
               {grid_size(tiles * shape.cluster), threads, threads * kEach, shape.cluster},
               task.stream, task, shape.cluster > 1);
}

template <class T>
void launch_one_read(const OneReadTask& task) {
  unsigned strips = grid_size((task.columns + kSampleStrip - 1) / kSampleStrip);
  queue_kernel("quantize_one_read: sample", sample_kernel<T>, {strips, 512}, task.stream, task);
  if (task.rank == 0) return launch_one_read_rank<T, 0>(task);
  launch_one_read_rank<T, 8>(task);
}

void HOT_VARIANT(quantize_one_read)(const OneReadTask& task) { launch_one_read<HOT_ELEMENT>(task); }

}  // namespace hot
