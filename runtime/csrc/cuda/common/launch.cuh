// Checks around kernel launches.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "cuda/common/stream.hpp"

namespace hot {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess)
    throw std::runtime_error(std::string("hot: CUDA ") + what + ": " + cudaGetErrorString(status));
}

inline void check_launch(const char* kernel) { check_cuda(cudaGetLastError(), kernel); }

// Lets a kernel have more shared memory than the default; asked once a device, the call is slow.
constexpr int kMostDevices = 64;

template <auto kKernel, int kBytes>
void allow_shared(int device) {
  static std::atomic<bool> allowed[kMostDevices];
  if (allowed[device].load(std::memory_order_acquire)) return;
  check_cuda(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
             "shared memory");
  allowed[device].store(true, std::memory_order_release);
}

inline unsigned grid_size(int64_t blocks) {
  if (blocks > INT32_MAX) throw std::runtime_error("hot: tensor needs more than 2^31 - 1 blocks");
  return static_cast<unsigned>(blocks);
}

// Blocks for strips x tiles, strips fastest: neighbours in time are neighbours along a row.
constexpr unsigned kMostY = 65535;

inline dim3 strips_by_tiles(int64_t strips, int64_t tiles) {
  unsigned z = grid_size((tiles + kMostY - 1) / kMostY);
  if (z > kMostY) throw std::runtime_error("hot: tensor has too many rows");
  return dim3(grid_size(strips), static_cast<unsigned>(tiles < kMostY ? tiles : kMostY), z);
}

#ifdef __CUDACC__
__device__ inline uint32_t tile_index() { return blockIdx.z * kMostY + blockIdx.y; }

struct Geometry {
  dim3 blocks;
  unsigned threads;
  size_t shared = 0;
  int cluster = 1;
};

// Queues a kernel that calls wait_for_predecessor() before it touches device memory.
template <class... Parameters, class... Arguments>
void queue_kernel(const char* name, void (*kernel)(Parameters...), const Geometry& grid,
                  Stream stream, Arguments&&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid.blocks;
  config.blockDim = dim3(grid.threads);
  config.dynamicSmemBytes = grid.shared;
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (stream.overlap) {
    cudaLaunchAttribute& overlap = attributes[config.numAttrs++];
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  if (grid.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(grid.cluster), 1, 1};
  }
  check_cuda(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...), name);
}

// Returns once all that the stream's earlier kernels wrote is there, and lets the next kernel's
// blocks take free places: they wait here in turn. Without an overlapping launch, nothing.
__device__ inline void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
#endif

}  // namespace hot
