// Small helpers over the stable ABI's tensors, shared by the operators.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <initializer_list>
#include <vector>

#include "cpu/common/check.hpp"

namespace hot {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }
inline int64_t round_up(int64_t n, int64_t multiple) { return ceil_div(n, multiple) * multiple; }

/// "2-D [3, 4]", for messages.
inline std::string shape_of(const Tensor& t) {
  std::string s = std::to_string(t.dim()) + "-D [";
  for (int64_t i = 0; i < t.dim(); ++i) s += (i ? ", " : "") + std::to_string(t.size(i));
  return s + "]";
}

inline void check_2d(const Tensor& t, const char* op, const char* name) {
  HOT_CHECK(t.dim() == 2, op, "expected a 2-D ", name, "; got ", shape_of(t));
}

inline void check_dtype(const Tensor& t, ScalarType type, const char* op, const char* name,
                        const char* expected) {
  HOT_CHECK(t.scalar_type() == type, op, "expected ", name, " of dtype ", expected, "; got ",
            static_cast<int>(t.scalar_type()), " (c10::ScalarType)");
}

inline void check_shape(const Tensor& t, std::initializer_list<int64_t> shape, const char* op,
                        const char* name) {
  bool same = t.dim() == static_cast<int64_t>(shape.size()) &&
              std::equal(shape.begin(), shape.end(), t.sizes().begin());
  std::string expected;
  for (int64_t size : shape) expected += (expected.empty() ? "" : ", ") + std::to_string(size);
  HOT_CHECK(same, op, "expected ", name, " of shape [", expected, "]; got ", shape_of(t));
}

inline Tensor as_contiguous(const Tensor& t) {
  return t.is_contiguous() ? t : torch::stable::contiguous(t);
}

/// A fresh contiguous CPU tensor; the C shim directly, which costs less than a dispatched call.
inline Tensor empty_cpu(std::initializer_list<int64_t> shape, int32_t dtype) {
  std::vector<int64_t> sizes(shape), strides(shape.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<int64_t>(sizes[i], 1);
  }
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(),
                                                  strides.data(), dtype,
                                                  aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

/// A matrix over memory that outlives it.
inline Tensor view_cpu(void* p, int64_t rows, int64_t cols, int64_t stride, ScalarType type) {
  const int64_t sizes[2] = {rows, cols}, strides[2] = {stride, 1};
  return torch::stable::from_blob(p, {sizes, 2}, {strides, 2},
                                  torch::stable::Device(torch::headeronly::DeviceType::CPU), type);
}

template <class T>
T* data(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

}  // namespace hot
