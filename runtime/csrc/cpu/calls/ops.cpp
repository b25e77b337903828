#include "common/calls.hpp"

STABLE_TORCH_LIBRARY_IMPL(hot, CPU, m) { m.impl("layer_calls", &hot::calls::layer_calls); }
