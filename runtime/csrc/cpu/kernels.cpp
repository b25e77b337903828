#include "kernels.hpp"

#include <cstring>

namespace hot {
namespace {

#ifdef HOT_X86
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");  // all of these have F16C
}

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

const Kernels& choose() {
#ifdef HOT_X86
  if (has_avx512()) return kAvx512;
  if (has_avx2()) return kAvx2;
#endif
  return kScalar;
}

}  // namespace

const Kernels* find_kernels(const char* name) {
  if (std::strcmp(name, kScalar.name) == 0) return &kScalar;
#ifdef HOT_X86
  if (std::strcmp(name, kAvx2.name) == 0 && has_avx2()) return &kAvx2;
  if (std::strcmp(name, kAvx512.name) == 0 && has_avx512()) return &kAvx512;
#endif
  return nullptr;
}

const Kernels& best_kernels() {
  static const Kernels& best = choose();
  return best;
}

bool has_vnni() {
#ifdef HOT_X86
  return __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

}  // namespace hot
