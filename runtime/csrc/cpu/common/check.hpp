// Argument checks whose message says what was got and what was expected.
#pragma once

#include <torch/headeronly/util/Exception.h>

/// HOT_CHECK(condition, "op", "expected ...; got ", value, ...)
#define HOT_CHECK(condition, op, ...) STD_TORCH_CHECK(condition, "hot::", op, ": ", __VA_ARGS__)
