// What the operators share on the host: the call's device and stream, checks, operand layouts.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "cuda/common/device.hpp"
#include "cuda/common/launch.cuh"

namespace hot {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Device guard and current stream of the device that `x` lives on.
struct Call {
  torch::stable::accelerator::DeviceGuard guard;
  int device;
  Stream stream;

  explicit Call(const Tensor& x) : guard(x.get_device_index()), device(x.get_device_index()) {
    void* current = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &current));
    stream = {static_cast<cudaStream_t>(current), facts_of(device).hopper};
  }

  void zero(void* data, int64_t bytes) const {
    if (bytes > 0) check_cuda(cudaMemsetAsync(data, 0, bytes, stream), "memset");
  }
};

inline bool on_16_bytes(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

inline void check_matrix(const Tensor& x, const char* op, const char* name) {
  STD_TORCH_CHECK(x.dim() == 2, "hot::", op, ": ", name, " has ", x.dim(),
                  " dimensions, expected 2");
  STD_TORCH_CHECK(x.is_cuda(), "hot::", op, ": ", name, " is not on a CUDA device");
}

// `x` itself when its rows are contiguous (their stride is free), else a contiguous copy. The
// kernels count rows in 31 bits and a row's bytes in 32.
inline Tensor with_contiguous_rows(const Tensor& x, const char* op) {
  int64_t size = static_cast<int64_t>(x.element_size());
  STD_TORCH_CHECK(x.size(0) <= INT32_MAX && x.size(1) * size <= INT32_MAX, "hot::", op,
                  ": a matrix of ", x.size(0), " x ", x.size(1),
                  " is too large; expected below 2^31 rows and row bytes");
  bool inner = x.size(1) <= 1 || x.stride(1) == 1;
  bool outer = x.size(0) <= 1 || x.stride(0) * size <= INT32_MAX;
  return inner && outer ? x : torch::stable::contiguous(x);
}

// Contiguous and 16-byte aligned, copied only if it must be.
inline Tensor dense(const Tensor& x) {
  Tensor y = x.is_contiguous() ? x : torch::stable::contiguous(x);
  return on_16_bytes(y.data_ptr()) ? y : torch::stable::clone(y);
}

// True when every row of `x` starts on 16 bytes and is made of whole 16-byte vectors.
inline bool whole_vectors(const Tensor& x) {
  int64_t size = static_cast<int64_t>(x.element_size());
  bool rows = x.size(0) <= 1 || x.stride(0) * size % 16 == 0;
  return on_16_bytes(x.data_ptr()) && rows && x.size(1) * size % 16 == 0;
}

template <class T = void>
T* data(const Tensor& x) {
  return static_cast<T*>(x.data_ptr());
}

constexpr int64_t kContractAlign = 32;  // ops.CONTRACT_ALIGN

inline int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// A fresh contiguous tensor where `like` lies; the C shim directly, which takes the host less than
// a dispatched call.
inline Tensor empty(const Tensor& like, std::initializer_list<int64_t> size, ScalarType dtype) {
  constexpr size_t most = 4;
  STD_TORCH_CHECK(size.size() <= most, "hot: a tensor of ", size.size(), " dimensions");
  int64_t strides[most], stride = 1;
  for (size_t i = size.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<int64_t>(size.begin()[i], 1);
  }
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(size.size()), size.begin(), strides, static_cast<int32_t>(dtype),
      aoti_torch_device_type_cuda(), like.get_device_index(), &handle));
  return Tensor(handle);
}

template <class... Tensors>
void zero_all(const Call& call, const Tensors&... tensors) {
  (call.zero(tensors.data_ptr(), tensors.numel() * tensors.element_size()), ...);
}

// A float32 vector of `length`, contiguous and on 16 bytes.
inline Tensor factors(const Tensor& x, int64_t length, const char* op, const char* name) {
  STD_TORCH_CHECK(x.dim() == 1 && x.size(0) == length && x.scalar_type() == ScalarType::Float,
                  "hot::", op, ": ", name, " must be a float32 vector of ", length);
  return dense(x);
}

// Calls the kernels of x's dtype.
template <class Task>
void dispatch(const Tensor& x, const Task& task, const char* op, void (*bf16)(const Task&),
              void (*fp16)(const Task&), void (*fp32)(const Task&)) {
  ScalarType dtype = x.scalar_type();
  if (dtype == ScalarType::BFloat16) return bf16(task);
  if (dtype == ScalarType::Half) return fp16(task);
  STD_TORCH_CHECK(dtype == ScalarType::Float, "hot::", op, ": dtype number ",
                  static_cast<int>(dtype), ", expected bfloat16, float16 or float32");
  fp32(task);
}

}  // namespace hot
