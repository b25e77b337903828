// How a CPU operator, a function `Result op(const Kernels&, Arguments...)`, comes to torch.
#pragma once

#include <torch/csrc/stable/library.h>

#include "cpu/isa/kernels.hpp"

namespace hot::cpu {

template <Isa isa>
const Kernels& fixed_kernels() {
  return kernels_of(isa);
}

/// `op` with kernels that `choose` gives: what torch can call.
template <auto op, const Kernels& (*choose)()>
struct Bound;
template <class Result, class... Arguments, Result (*op)(const Kernels&, Arguments...),
          const Kernels& (*choose)()>
struct Bound<op, choose> {
  static Result call(Arguments... arguments) { return op(choose(), arguments...); }
};

}  // namespace hot::cpu

#define HOT_BOXED(op, choose) TORCH_BOX((&hot::cpu::Bound<&hot::cpu::op, choose>::call))
#define HOT_REGISTER_IN(space, op, choose) \
  STABLE_TORCH_LIBRARY_IMPL(space, CPU, m) { m.impl(#op, HOT_BOXED(op, choose)); }

/// Registers hot::cpu::op as hot::op, by the fastest kernels, and, for tests, as hot_<isa>::op by
/// each variant's; runtime/ops.py has the schemas of `hot`, the tests those of the others.
#define HOT_REGISTER(op)                                                     \
  HOT_REGISTER_IN(hot, op, hot::best_kernels)                                \
  HOT_REGISTER_IN(hot_scalar, op, hot::cpu::fixed_kernels<hot::Isa::scalar>) \
  HOT_REGISTER_IN(hot_avx512, op, hot::cpu::fixed_kernels<hot::Isa::avx512>)
