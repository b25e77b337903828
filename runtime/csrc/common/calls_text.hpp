// A list of calls as text, and parsed; ../../reference/calls.py tells the form.
#pragma once

#include <torch/csrc/stable/stableivalue_conversions.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdlib>
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
  /// No later reader: set once all calls are known.
  bool last = false;
  std::vector<Argument> items;
};

struct Call {
  std::vector<size_t> results;  // kUnread: nothing reads it
  std::string name, overload;
  /// This library's own operator of that name, if there is one.
  Boxed own = nullptr;
  std::vector<Argument> arguments;
  std::string text;
};

/// Reads words off a text.
class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  bool at_end() const { return at_ == text_.size(); }
  size_t place() const { return at_; }

  bool skip(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }

  void expect(std::string_view word) { HOT_CALLS_CHECK(skip(word), complaint(word)); }

  /// Up to the first of `ends`.
  std::string_view until(std::string_view ends) {
    size_t end = std::min(text_.find_first_of(ends, at_), text_.size());
    std::string_view word = text_.substr(at_, end - at_);
    at_ = end;
    return word;
  }

  size_t number() {
    size_t value = 0;
    const char* begin = text_.data() + at_;
    auto [end, error] = std::from_chars(begin, text_.data() + text_.size(), value);
    HOT_CALLS_CHECK(error == std::errc() && value < kMost, complaint("a number below 2^16"));
    at_ += end - begin;
    return value;
  }

  std::string complaint(std::string_view expected) const {
    return "expected '" + std::string(expected) + "'; got '" + std::string(text_.substr(at_)) +
           "' in '" + std::string(text_) + "'";
  }

 private:
  static constexpr size_t kMost = 1 << 16;
  std::string_view text_;
  size_t at_ = 0;
};

inline StableIValue constant_of(std::string_view word, const Reader& reader) {
  using torch::headeronly::ScalarType;
  static const std::unordered_map<std::string_view, ScalarType> dtypes = {
      {"float32", ScalarType::Float}, {"bfloat16", ScalarType::BFloat16},
      {"float16", ScalarType::Half},  {"float64", ScalarType::Double},
      {"bool", ScalarType::Bool},     {"int8", ScalarType::Char},
      {"uint8", ScalarType::Byte},    {"int16", ScalarType::Short},
      {"int32", ScalarType::Int},     {"int64", ScalarType::Long}};
  if (word == "None") return 0;
  if (word == "True" || word == "False") return abi::from(word == "True");
  if (auto found = dtypes.find(word); found != dtypes.end()) return abi::from(found->second);
  int64_t whole = 0;
  const char *begin = word.data(), *end = begin + word.size();
  if (auto [at, error] = std::from_chars(begin, end, whole); error == std::errc() && at == end) {
    return abi::from(whole);
  }
  const std::string text(word);
  char* stop = nullptr;
  double real = std::strtod(text.c_str(), &stop);
  HOT_CALLS_CHECK(!text.empty() && *stop == '\0', "got the argument '", text,
                  "'; expected %n, $n, a number, True, False, None or a dtype, before: ",
                  reader.complaint(", or )"));
  return abi::from(real);
}

inline Argument argument_of(Reader& reader) {
  Argument argument;
  argument.optional = reader.skip("?");
  if (reader.skip("%")) {
    argument.kind = Argument::value;
    argument.bits = reader.number();
  } else if (reader.skip("$")) {
    argument.kind = Argument::size;
    argument.bits = reader.number();
  } else if (reader.skip("[")) {
    argument.kind = Argument::list;
    while (!reader.skip("]")) {
      if (!argument.items.empty()) reader.expect(", ");
      argument.items.push_back(argument_of(reader));
    }
  } else {
    std::string_view word = reader.until(",)]");
    argument.bits = constant_of(word, reader);
  }
  return argument;
}

inline Call call_of(Reader& reader, std::string_view all) {
  Call call;
  const size_t begin = reader.place();
  while (!reader.skip("= ")) {
    if (!reader.skip("_")) reader.expect("%");
    call.results.push_back(all[reader.place() - 1] == '_' ? kUnread : reader.number());
    reader.expect(" ");
  }
  std::string_view name = reader.until(".(");
  call.name = name;
  if (reader.skip(".")) call.overload = reader.until("(");
  auto own = own_operators().find(call.name);
  if (own != own_operators().end() && call.overload.empty()) call.own = own->second;
  reader.expect("(");
  while (!reader.skip(")")) {
    if (!call.arguments.empty()) reader.expect(", ");
    call.arguments.push_back(argument_of(reader));
  }
  call.text = all.substr(begin, reader.place() - begin);
  reader.expect("; ");
  return call;
}

/// The whole list.
struct Calls {
  std::string text;
  std::vector<Call> calls;
  std::vector<size_t> returned;
  /// How many operands and sizes it reads, and how many values there are in all.
  size_t operands = 0, sizes = 0, values = 0;

  explicit Calls(std::string given) : text(std::move(given)) {
    Reader reader(text);
    HOT_CALLS_CHECK(!text.empty(), reader.complaint("return %n"));
    while (!reader.skip("return")) calls.push_back(call_of(reader, text));
    while (!reader.at_end()) {
      reader.expect(" %");
      returned.push_back(reader.number());
    }
    HOT_CALLS_CHECK(!returned.empty(), reader.complaint(" %n"));
    check_order();
    mark_last_readers();
  }

 private:
  template <class Visit>
  static void each(std::vector<Argument>& arguments, const Visit& visit) {
    for (Argument& argument : arguments) {
      visit(argument);
      each(argument.items, visit);
    }
  }

  /// What no call makes is an operand, and operands have the first numbers. What is read before it
  /// is made exists nowhere.
  void check_order() {
    size_t first_made = SIZE_MAX;
    for (const Call& call : calls) {
      for (size_t n : call.results) first_made = std::min(first_made, n);
    }
    std::vector<bool> made;
    auto reads = [&](size_t n, const std::string& where) {
      HOT_CALLS_CHECK(n < first_made || (n < made.size() && made[n]), "got %", n, " in '", where,
                      "'; expected a tensor that exists there");
      if (n < first_made) operands = std::max(operands, n + 1);
    };
    for (Call& call : calls) {
      each(call.arguments, [&](const Argument& argument) {
        if (argument.kind == Argument::value) reads(argument.bits, call.text);
        if (argument.kind == Argument::size) sizes = std::max<size_t>(sizes, argument.bits + 1);
      });
      for (size_t n : call.results) {
        if (n == kUnread) continue;
        if (n >= made.size()) made.resize(n + 1);
        HOT_CALLS_CHECK(!made[n], "got %", n, " made twice in '", text, "'; expected it once");
        made[n] = true;
      }
    }
    for (size_t n : returned) reads(n, "return");
    values = std::max(operands, made.size());
  }

  void mark_last_readers() {
    std::vector<bool> read_later(values);
    for (size_t n : returned) read_later[n] = true;
    for (size_t i = calls.size(); i-- > 0;) {
      // backwards, so that of two arguments of one call the second has the value itself
      std::vector<Argument*> arguments;
      each(calls[i].arguments, [&](Argument& argument) { arguments.push_back(&argument); });
      for (size_t j = arguments.size(); j-- > 0;) {
        if (arguments[j]->kind != Argument::value) continue;
        arguments[j]->last = !read_later[arguments[j]->bits];
        read_later[arguments[j]->bits] = true;
      }
    }
  }
};

}  // namespace hot::calls
