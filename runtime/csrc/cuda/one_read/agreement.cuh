// How the threads of a block, and the blocks of a cluster, agree on their rows' absmax.
#pragma once

#include <cooperative_groups.h>

#include "cuda/one_read/arithmetic.cuh"

namespace hot {

__device__ inline uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

__device__ inline void wait_for_phase(const uint64_t& barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  uint32_t done = 0;
  while (!done)
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(&barrier)), "r"(parity)
        : "memory");
#endif
}

// How the threads of a unit agree on its rows' absmax. Blocks of a cluster send each other theirs
// as stores that count as bytes of a barrier: a barrier of the whole cluster would wait for all
// that the threads have stored to memory before. Buffers alternate: before anybody fills one for
// the second time, everybody has filled the other, so has read it.
struct Agreement {
  static constexpr int kWarps = kOneReadThreads / 32;
  alignas(16) uint32_t of_warp[2][kWarps][kOrder];  // zero where the block has no such warp
  uint32_t of_block[2][kMostCluster][kOrder];
  alignas(8) uint64_t arrived[2];

  __device__ void start(bool cluster) {
    for (int i = threadIdx.x; i < 2 * kWarps * kOrder; i += blockDim.x) of_warp[0][0][i] = 0;
#if __CUDA_ARCH__ >= 900
    if (!cluster) return;
    if (threadIdx.x < 2) {
      asm volatile(
          "mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(arrived + threadIdx.x)));
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    cooperative_groups::this_cluster().sync();
#endif
  }

  // The unit's maxima, in lanes below kOrder of every warp. of_row: this warp's, of the thread's
  // rows from `first` on, in every lane that has them; `turn` counts.
  template <int kRows>
  __device__ uint32_t largest(const uint32_t (&of_row)[kRows], int first, int turn,
                              unsigned blocks) {
    int lane = threadIdx.x % 32, buffer = turn % 2;
    uint32_t* mine = of_warp[buffer][threadIdx.x / 32] + first;
#pragma unroll
    for (int j = 0; j < kRows; ++j) mine[j] = of_row[j];  // lanes of one row: one value
    __syncthreads();
    if (blocks > 1 && threadIdx.x >= 32) return received(turn, blocks);
    uint32_t most = 0;
    if (lane < kOrder) {
#pragma unroll
      for (int w = 0; w < kWarps; ++w) most = max(most, of_warp[buffer][w][lane]);
    }
    if (blocks == 1) return most;
    send(most, buffer, blocks);
    return received(turn, blocks);
  }

  // To every block of the cluster, this one included, by its first warp.
  __device__ void send(uint32_t most, int buffer, unsigned blocks) {
#if __CUDA_ARCH__ >= 900
    int lane = threadIdx.x;
    unsigned self = cooperative_groups::this_cluster().block_rank();
    if (lane == 0)
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                       shared_address(arrived + buffer)),
                   "r"(static_cast<uint32_t>(blocks * kOrder * sizeof(uint32_t)))
                   : "memory");
    if (lane >= kOrder) return;
    for (unsigned b = 0; b < blocks; ++b) {
      uint32_t slot, barrier;
      asm("mapa.shared::cluster.u32 %0, %1, %2;"
          : "=r"(slot)
          : "r"(shared_address(&of_block[buffer][self][lane])), "r"(b));
      asm("mapa.shared::cluster.u32 %0, %1, %2;"
          : "=r"(barrier)
          : "r"(shared_address(arrived + buffer)), "r"(b));
      asm volatile(
          "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
              slot),
          "r"(most), "r"(barrier)
          : "memory");
    }
#endif
  }

  __device__ uint32_t received(int turn, unsigned blocks) {
    uint32_t most = 0;
#if __CUDA_ARCH__ >= 900
    wait_for_phase(arrived[turn % 2], turn / 2 % 2);
    for (unsigned b = 0; b < blocks && threadIdx.x % 32 < kOrder; ++b)
      most = max(most, of_block[turn % 2][b][threadIdx.x % 32]);
    __syncwarp();
#endif
    return most;
  }
};

__device__ inline unsigned cluster_size(bool cluster) {
#if __CUDA_ARCH__ >= 900
  if (cluster) return cooperative_groups::this_cluster().num_blocks();
#endif
  return 1;
}

}  // namespace hot
