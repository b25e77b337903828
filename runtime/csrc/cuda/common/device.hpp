// What the launchers need to know of a device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>

#include "cuda/common/launch.cuh"

namespace hot {

struct DeviceFacts {
  bool hopper;  // and this build has its kernels
  int sm_count;
};

// HOT_CUDA_ARCH=sm80 runs the Ampere kernels on a newer device, to test and debug them there.
inline bool forced_sm80() {
  const char* value = std::getenv("HOT_CUDA_ARCH");
  return value != nullptr && std::string(value) == "sm80";
}

inline DeviceFacts query_facts(int device) {
  int major = 0, minor = 0, count = 0;
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "query");
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "query");
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "query");
#ifdef HOT_SM90
  return {major == 9 && minor == 0, count};
#else
  return {false, count};
#endif
}

inline DeviceFacts facts_of(int device) {
  static DeviceFacts known[kMostDevices];
  static std::once_flag asked[kMostDevices];
  if (device < 0 || device >= kMostDevices) throw std::runtime_error("hot: device index above 63");
  std::call_once(asked[device], [device] { known[device] = query_facts(device); });
  DeviceFacts facts = known[device];
  facts.hopper = facts.hopper && !forced_sm80();
  return facts;
}

}  // namespace hot
