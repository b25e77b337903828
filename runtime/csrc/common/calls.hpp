// hot::layer_calls: several operators called in one; ../../reference/calls.py is its definition.
// Boxed and by name throughout, so that it is the same for every device and every operator.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/stableivalue_conversions.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "common/own.hpp"

#define HOT_CALLS_CHECK(condition, ...) \
  STD_TORCH_CHECK(condition, "hot::layer_calls: ", __VA_ARGS__)

namespace hot::calls {

namespace abi = torch::stable::detail;  // there are others of these names, global

constexpr size_t kUnread = SIZE_MAX;

/// An argument of a call.
struct Argument {
  enum Kind { value, size, constant, list };
  Kind kind = constant;
  /// The number of the value or of the size; of a constant, what the dispatcher takes.
  uint64_t bits = 0;
  bool optional = false;
  /// It is the value's last reader.
  bool last = false;
  std::vector<Argument> items;
};

struct Call {
  std::vector<size_t> results;  // kUnread: nothing reads it
  std::string name;
  /// This library's own operator of that name, if there is one.
  Boxed own = nullptr;
  std::vector<Argument> arguments;
};

/// A list of calls, read off its text word by word.
class Calls {
 public:
  std::string text;
  std::vector<Call> calls;
  std::vector<size_t> returned;

  explicit Calls(std::string given) : text(std::move(given)), words_(text) {
    while (next() && word_ != "return") calls.push_back(call());
    while (next()) returned.push_back(number(1));
    HOT_CALLS_CHECK(!returned.empty(), "expected calls, and return %n at the end; got ", text);
    words_ = {};
  }

 private:
  std::istringstream words_;
  std::string word_;

  bool next() { return static_cast<bool>(words_ >> word_); }

  /// The word's, from character `first` on.
  int64_t number(size_t first) const {
    size_t end = 0;
    int64_t value = 0;
    try {
      value = std::stoll(word_.substr(std::min(first, word_.size())), &end);
    } catch (const std::logic_error&) {
      end = 0;
    }
    HOT_CALLS_CHECK(end > 0, "got the word '", word_, "', which has no number, in ", text);
    return value;
  }

  Call call() {
    Call made;
    do {
      made.results.push_back(word_ == "_" ? kUnread : number(1));
    } while (next() && word_ != "=");
    next();
    made.name = word_;
    auto own = own_operators().find(made.name);
    if (own != own_operators().end()) made.own = own->second;
    next();  // the bracket
    while (next() && word_ != ")") made.arguments.push_back(argument());
    next();  // the semicolon
    return made;
  }

  Argument argument() {
    Argument made;
    made.optional = word_ == "?" && next();
    if (word_ == "[") {
      made.kind = Argument::list;
      while (next() && word_ != "]") made.items.push_back(argument());
    } else if (word_[0] == '%' || word_[0] == '$') {
      made.kind = word_[0] == '%' ? Argument::value : Argument::size;
      made.bits = number(1);
      made.last = word_.back() == '!';
    } else {
      made.bits = constant();
    }
    return made;
  }

  StableIValue constant() const {
    using torch::headeronly::ScalarType;
    static const std::unordered_map<std::string_view, StableIValue> known = {
        {"None", 0},
        {"True", abi::from(true)},
        {"False", abi::from(false)},
        {"float32", abi::from(ScalarType::Float)},
        {"bfloat16", abi::from(ScalarType::BFloat16)},
        {"float16", abi::from(ScalarType::Half)},
        {"float64", abi::from(ScalarType::Double)},
        {"bool", abi::from(ScalarType::Bool)},
        {"int8", abi::from(ScalarType::Char)},
        {"uint8", abi::from(ScalarType::Byte)},
        {"int16", abi::from(ScalarType::Short)},
        {"int32", abi::from(ScalarType::Int)},
        {"int64", abi::from(ScalarType::Long)}};
    auto found = known.find(word_);
    return found != known.end() ? found->second : abi::from(number(0));
  }
};

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
      : calls_(calls), values_(std::move(operands)), sizes_(std::move(sizes)) {}

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
      AOTITorchError error =
          torch_call_dispatcher(call.name.c_str(), "", stack_.data(), TORCH_ABI_VERSION);
      HOT_CALLS_CHECK(error == TORCH_SUCCESS, call.name, " failed, as was told above, in ",
                      calls_.text);
    }
    for (size_t i = 0; i < call.results.size(); ++i) {
      Handle made(abi::to<AtenTensorHandle>(stack_[i]));
      size_t number = call.results[i];
      if (number == kUnread) continue;
      if (number >= values_.size()) values_.resize(number + 1);
      values_[number] = std::move(made);
    }
  }

  Handle& at(size_t number) {
    HOT_CALLS_CHECK(number < values_.size() && values_[number], "expected a tensor %", number,
                    " that exists where it is read; there is none in ", calls_.text);
    return values_[number];
  }

  AtenTensorHandle copy(size_t number) {
    AtenTensorHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(at(number).get(), &handle));
    return handle;
  }

  /// The dispatcher takes what it is given: a value's last reader gets the value itself, which is
  /// gone when that call is done.
  StableIValue given(const Argument& argument) {
    StableIValue value = argument.bits;
    if (argument.kind == Argument::value) {
      value = abi::from(argument.last ? at(argument.bits).release() : copy(argument.bits));
    } else if (argument.kind == Argument::size) {
      HOT_CALLS_CHECK(argument.bits < sizes_.size(), "got ", sizes_.size(), " sizes for ",
                      calls_.text);
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
