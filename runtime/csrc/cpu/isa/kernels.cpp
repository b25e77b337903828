#include "cpu/isa/kernels.hpp"

#include "cpu/common/check.hpp"

namespace hot {

namespace scalar {
extern const Kernels kKernels;
}
#ifdef HOT_X86
namespace avx512 {
extern const Kernels kKernels;
}
#endif

namespace {

/// Null if this build or this machine has none such.
const Kernels* find_kernels(Isa isa) {
  if (isa == Isa::scalar) return &scalar::kKernels;
#ifdef HOT_X86
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (isa == Isa::avx512 && avx512) return &avx512::kKernels;
#endif
  return nullptr;
}

const Kernels& choose() {
  const Kernels* found = find_kernels(Isa::avx512);
  return found ? *found : scalar::kKernels;
}

}  // namespace

const Kernels& best_kernels() {
  static const Kernels& best = choose();
  return best;
}

const Kernels& kernels_of(Isa isa) {
  const Kernels* found = find_kernels(isa);
  STD_TORCH_CHECK(found != nullptr,
                  "expected a variant of the kernels that this machine runs, up to ",
                  best_kernels().name, "; got number ", static_cast<int>(isa));
  return *found;
}

bool has_vnni() {
#ifdef HOT_X86
  return __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

}  // namespace hot
