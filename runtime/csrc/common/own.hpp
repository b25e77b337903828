// This library's operators by name: hot::layer_calls calls them without asking the dispatcher,
// which finds each by its name and converts all arguments twice.
#pragma once

#include <torch/csrc/stable/library.h>

#include <string>
#include <unordered_map>

namespace hot::calls {

using Boxed = void (*)(StableIValue*, uint64_t, uint64_t);

/// Complete once the library is loaded; never changed afterwards.
inline std::unordered_map<std::string, Boxed>& own_operators() {
  static std::unordered_map<std::string, Boxed> known;
  return known;
}

/// Registers `function` as hot::`name` in `library`, and here.
inline void implement(torch::stable::detail::StableLibrary& library, const char* name,
                      Boxed function) {
  library.impl(name, function);
  own_operators().emplace(std::string("hot::") + name, function);
}

}  // namespace hot::calls
