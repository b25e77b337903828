// The chunks of a head, one behind the other: the library's products, and launches of kernels that
// Triton compiled. Its host then makes a step's launches without Python between them.
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/add.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <c10/core/DeviceGuard.h>
#include <dlfcn.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <vector>

namespace {

using at::Tensor;
using c10::ScalarType;

using LaunchKernel = int (*)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                             unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                             void* stream, void** parameters, void** extra);

// CUDA's driver is there where a GPU is; no header of CUDA's is needed to build this.
LaunchKernel find_launch_kernel() {
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY);
  void* found = driver == nullptr ? nullptr : dlsym(driver, "cuLaunchKernel");
  TORCH_CHECK(found != nullptr, "hot::head_chunks: found no cuLaunchKernel in libcuda.so.1");
  return reinterpret_cast<LaunchKernel>(found);
}

// A kernel, one program (or a row of them) for each row of a chunk.
class Launch {
 public:
  // Reads `*at`, and moves it behind what it has read: the kernel's handle, programs of a row,
  // threads of a program, bytes of shared memory, the number of parameters, and of each its value
  // for the first row and what is added for each row after it.
  explicit Launch(const int64_t** at) {
    const int64_t* given = *at;
    function_ = reinterpret_cast<void*>(given[0]);
    columns_ = static_cast<unsigned>(given[1]);
    threads_ = static_cast<unsigned>(given[2]);
    shared_ = static_cast<unsigned>(given[3]);
    int64_t count = given[4];
    given += 5;
    for (int64_t i = 0; i < count; ++i, given += 2) {
      values_.push_back(given[0]);
      steps_.push_back(given[1]);
    }
    *at = given;
  }

  void run(int64_t first, int64_t rows, void* stream) const {
    static const LaunchKernel launch = find_launch_kernel();
    std::vector<int64_t> values(values_);
    std::vector<void*> parameters(values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] += steps_[i] * first;
      parameters[i] = &values[i];  // a narrower parameter is the value's first bytes
    }
    int error = launch(function_, static_cast<unsigned>(rows), columns_, 1, threads_, 1, 1, shared_,
                       stream, parameters.data(), nullptr);
    TORCH_CHECK(error == 0, "hot::head_chunks: launching ", rows, " x ", columns_,
                " programs gave CUDA's error ", error);
  }

 private:
  void* function_;
  unsigned columns_, threads_, shared_;
  std::vector<int64_t> values_, steps_;
};

std::vector<Launch> launches_of(at::IntArrayRef given) {
  std::vector<Launch> launches;
  const int64_t* at = given.begin();
  while (at < given.end()) launches.emplace_back(&at);
  return launches;
}

// The columns of `y` that belong to each weight.
std::vector<Tensor> columns_of(const Tensor& y, at::TensorList weights) {
  std::vector<Tensor> columns;
  int64_t first = 0;
  for (const Tensor& weight : weights) {
    columns.push_back(weights.size() == 1 ? y : y.narrow(1, first, weight.size(0)));
    first += weight.size(0);
  }
  return columns;
}

// y = x W^T + b
void multiply(const Tensor& x, at::TensorList transposed, at::TensorList biases,
              std::vector<Tensor>& y) {
  for (size_t i = 0; i < y.size(); ++i) {
    if (biases.empty()) {
      at::mm_out(y[i], x, transposed[i]);
    } else {
      at::addmm_out(y[i], biases[i], x, transposed[i]);
    }
  }
}

// g_x = g W; the few last outputs first, as in parts.py.
void multiply_back(const std::vector<Tensor>& g, at::TensorList weights, Tensor out) {
  size_t last = g.size() - 1;
  at::mm_out(out, g[last], weights[last]);
  for (size_t i = 0; i < last; ++i) at::addmm_out(out, out, g[i], weights[i]);
}

// total (fp32) += a b; `first`: it holds nothing yet, and is not read.
void add_product(Tensor total, const Tensor& a, const Tensor& b, bool first) {
  if (a.scalar_type() == ScalarType::Float) {
    first ? at::mm_out(total, a, b) : at::addmm_out(total, total, a, b);
  } else {
    first ? at::mm_out(total, a, b, ScalarType::Float)
          : at::addmm_out(total, total, a, b, ScalarType::Float);
  }
}

// A label out of range trips gather's assertion, as in the exact graph.
void check_labels(const Tensor& x, const Tensor& target, int64_t outputs) {
  x.select(1, 0).narrow(0, 0, 1).expand({outputs}).gather(0, target);
}

void head_chunks(const Tensor& x, at::TensorList weights, at::TensorList biases,
                 const std::optional<Tensor>& target, int64_t outputs, Tensor room,
                 std::optional<Tensor> logits, Tensor grad_x, Tensor grad_weight, Tensor grad_bias,
                 at::IntArrayRef launches, int64_t stream) {
  if (x.size(0) == 0) return;
  const int64_t chunk = room.size(0);
  TORCH_CHECK(chunk > 0, "hot::head_chunks: got no room for a chunk, expected that of a row");
  c10::OptionalDeviceGuard device(x.device());
  at::AutoDispatchBelowAutograd no_graph;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const std::vector<Launch> kernels = launches_of(launches);
  std::vector<Tensor> transposed;
  for (const Tensor& weight : weights) transposed.push_back(weight.t());
  if (target.has_value()) check_labels(x, *target, outputs);
  if (logits.has_value()) {
    std::vector<Tensor> columns = columns_of(*logits, weights);
    multiply(x, transposed, biases, columns);
  }
  for (int64_t first = 0; first < x.size(0); first += chunk) {
    int64_t rows = std::min(chunk, x.size(0) - first);
    Tensor own = x.narrow(0, first, rows), g = room.narrow(0, 0, rows);
    std::vector<Tensor> columns = columns_of(g, weights);
    if (!logits.has_value()) multiply(own, transposed, biases, columns);
    for (const Launch& kernel : kernels) {
      kernel.run(first, rows, reinterpret_cast<void*>(stream));
    }
    if (grad_bias.numel() > 0) grad_bias.add_(g.sum(0, false, ScalarType::Float));
    if (grad_x.numel() > 0) multiply_back(columns, weights, grad_x.narrow(0, first, rows));
    if (grad_weight.numel() == 0) continue;
    int64_t output = 0;
    for (const Tensor& part : columns) {
      add_product(grad_weight.narrow(0, output, part.size(1)), part.t(), own, first == 0);
      output += part.size(1);
    }
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(hot, CompositeExplicitAutograd, m) { m.impl("head_chunks", &head_chunks); }
