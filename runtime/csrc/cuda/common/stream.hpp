// Where a kernel is queued.
#pragma once

#include <cuda_runtime_api.h>

namespace hot {

// `overlap`: a kernel's blocks may take their places while the stream's kernel before it still
// runs (Hopper's programmatic launch); wait_for_predecessor() then keeps the order.
struct Stream {
  cudaStream_t handle;
  bool overlap;

  operator cudaStream_t() const { return handle; }
};

}  // namespace hot
