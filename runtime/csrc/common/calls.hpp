// hot::layer_calls: several operators called in one; ../../reference/calls.py is its definition.
// Boxed and by name throughout, so that it is the same for every device and every operator.
#pragma once

#include <torch/csrc/stable/library.h>

#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "common/calls_text.hpp"

namespace hot::calls {

struct DeleteTensor {
  void operator()(AtenTensorOpaque* tensor) const { aoti_torch_delete_tensor_object(tensor); }
};
using Handle = std::unique_ptr<AtenTensorOpaque, DeleteTensor>;

/// The parsed list. Remembered by its text: equal layers have equal lists. Were there ever more
/// lists than a process has layers, all are forgotten, so memory stays bounded.
inline std::shared_ptr<const Calls> parsed(std::string_view text) {
  constexpr size_t most = 1024;
  static std::mutex mutex;
  static std::unordered_map<std::string_view, std::shared_ptr<const Calls>> known;
  std::lock_guard<std::mutex> lock(mutex);
  auto found = known.find(text);
  if (found != known.end()) return found->second;
  auto calls = std::make_shared<const Calls>(std::string(text));
  if (known.size() >= most) known.clear();
  known.emplace(calls->text, calls);  // the key lies in the value
  return calls;
}

/// One run of a list.
class Run {
 public:
  Run(const Calls& calls, std::vector<Handle> operands, std::vector<int64_t> sizes)
      : calls_(calls), values_(std::move(operands)), sizes_(std::move(sizes)) {
    HOT_CALLS_CHECK(values_.size() >= calls.operands, "expected ", calls.operands, " operands for ",
                    calls.text, "; got ", values_.size());
    HOT_CALLS_CHECK(sizes_.size() >= calls.sizes, "expected ", calls.sizes, " sizes for ",
                    calls.text, "; got ", sizes_.size());
    values_.resize(std::max(values_.size(), calls.values));
  }

  StableListHandle operator()() {
    for (const Call& call : calls_.calls) make(call);
    StableListHandle results = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_new_list_reserve_size(calls_.returned.size(), &results));
    for (size_t number : calls_.returned) {
      TORCH_ERROR_CODE_CHECK(torch_list_push_back(results, abi::from(copy(number))));
    }
    return results;
  }

 private:
  const Calls& calls_;
  std::vector<Handle> values_;
  std::vector<int64_t> sizes_;
  std::vector<StableIValue> stack_;

  void make(const Call& call) {
    stack_.assign(std::max(call.arguments.size(), call.results.size()), 0);
    for (size_t i = 0; i < call.arguments.size(); ++i) stack_[i] = given(call.arguments[i]);
    if (call.own != nullptr) {
      call.own(stack_.data(), call.arguments.size(), call.results.size());
    } else {
      AOTITorchError error = torch_call_dispatcher(call.name.c_str(), call.overload.c_str(),
                                                   stack_.data(), TORCH_ABI_VERSION);
      HOT_CALLS_CHECK(error == TORCH_SUCCESS, "this call failed, as was told above: ", call.text);
    }
    for (size_t i = 0; i < call.results.size(); ++i) {
      Handle made(abi::to<AtenTensorHandle>(stack_[i]));
      if (call.results[i] != kUnread) values_[call.results[i]] = std::move(made);
    }
  }

  AtenTensorHandle copy(size_t number) const {
    AtenTensorHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(values_[number].get(), &handle));
    return handle;
  }

  /// The dispatcher takes what it is given: a value's last reader gets the value itself, which is
  /// gone when that call is done.
  StableIValue given(const Argument& argument) {
    StableIValue value = argument.bits;
    if (argument.kind == Argument::value) {
      value = abi::from(argument.last ? values_[argument.bits].release() : copy(argument.bits));
    } else if (argument.kind == Argument::size) {
      value = abi::from(sizes_[argument.bits]);
    } else if (argument.kind == Argument::list) {
      StableListHandle list = nullptr;
      TORCH_ERROR_CODE_CHECK(torch_new_list_reserve_size(argument.items.size(), &list));
      for (const Argument& item : argument.items) {
        TORCH_ERROR_CODE_CHECK(torch_list_push_back(list, given(item)));
      }
      value = abi::from(list);
    }
    return argument.optional ? abi::from(new StableIValue(value)) : value;
  }
};

/// The elements of a list that is handed over.
template <class T>
std::vector<T> taken(StableIValue value) {
  auto list = abi::to<StableListHandle>(value);
  size_t size = 0;
  TORCH_ERROR_CODE_CHECK(torch_list_size(list, &size));
  std::vector<T> items;
  items.reserve(size);
  for (size_t i = 0; i < size; ++i) {
    StableIValue item = 0;
    TORCH_ERROR_CODE_CHECK(torch_list_get_item(list, i, &item));
    if constexpr (std::is_same_v<T, Handle>) {
      items.emplace_back(abi::to<AtenTensorHandle>(item));
    } else {
      items.push_back(abi::to<T>(item));
    }
  }
  TORCH_ERROR_CODE_CHECK(torch_delete_list(list));
  return items;
}

/// The list's text, which is handed over; the header's own conversion leaks a copy of it.
inline std::shared_ptr<const Calls> taken_calls(StableIValue value) {
  struct Owner {
    StringHandle handle;
    ~Owner() { torch_delete_string(handle); }
  } owner{abi::to<StringHandle>(value)};
  size_t length = 0;
  const char* text = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_string_length(owner.handle, &length));
  TORCH_ERROR_CODE_CHECK(torch_string_c_str(owner.handle, &text));
  return parsed({text, length});
}

/// layer_calls(Tensor[] operands, SymInt[] sizes, str calls) -> Tensor[], as torch calls it.
inline void layer_calls(StableIValue* stack, uint64_t, uint64_t) {
  std::vector<Handle> operands = taken<Handle>(stack[0]);
  std::vector<int64_t> sizes = taken<int64_t>(stack[1]);
  std::shared_ptr<const Calls> calls = taken_calls(stack[2]);
  stack[0] = abi::from(Run(*calls, std::move(operands), std::move(sizes))());
}

}  // namespace hot::calls
