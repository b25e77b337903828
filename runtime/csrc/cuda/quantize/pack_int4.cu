#include "cuda/common/launch.cuh"
#include "cuda/common/nibbles.cuh"
#include "cuda/quantize/quantize.hpp"

namespace hot {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    pack_kernel(const uint4* __restrict__ q, uint2* __restrict__ packed, int64_t blocks) {
  int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= blocks) return;
  const uint4 v = q[i];
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
  packed[i] = nibbles(words);
}

}  // namespace

void pack_int4(const int8_t* q, uint8_t* packed, int64_t count, cudaStream_t stream) {
  int64_t blocks = count / 16;
  if (blocks == 0) return;
  pack_kernel<<<grid_size((blocks + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
      reinterpret_cast<const uint4*>(q), reinterpret_cast<uint2*>(packed), blocks);
  check_launch("pack_int4");
}

}  // namespace hot
