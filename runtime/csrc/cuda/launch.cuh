// Checks around kernel launches.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace hot {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess)
    throw std::runtime_error(std::string("hot: CUDA ") + what + ": " + cudaGetErrorString(status));
}

inline void check_launch(const char* kernel) { check_cuda(cudaGetLastError(), kernel); }

inline unsigned grid_size(int64_t blocks) {
  if (blocks > INT32_MAX) throw std::runtime_error("hot: tensor needs more than 2^31 - 1 blocks");
  return static_cast<unsigned>(blocks);
}

}  // namespace hot
