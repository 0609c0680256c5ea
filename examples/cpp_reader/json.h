// JSON as the format needs it: duplicate names are refused, and numbers keep their spelling.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

class Value;

struct Number {
    std::string spelling;  // `1`, `1.0` and `1e0` are one double, but only `1` is a count
};

using Array = std::vector<Value>;
using Object = std::vector<std::pair<std::string, Value>>;  // ascending by name

class Value {
  public:
    using Any = std::variant<std::nullptr_t, bool, Number, std::string, Array, Object>;

    Value() = default;
    explicit Value(Any any) : any_(std::move(any)) {}

    bool is_null() const { return std::holds_alternative<std::nullptr_t>(any_); }

    // Each throws Refused if the value has another type. `what` names the value in the error.
    const Object& object(const std::string& what) const;
    const Array& array(const std::string& what) const;
    const std::string& text(const std::string& what) const;
    int64_t count(const std::string& what) const;  // an integer in [0, 2^63) without fraction or exponent
    double number(const std::string& what) const;
    const std::string& integer(const std::string& what) const;  // the digits of an integer of any size

  private:
    Any any_ = nullptr;
};

// Parse one JSON object in UTF-8.
Object parse_object(std::string_view text, const std::string& what);

// Return a field, nullptr if there is none.
const Value* find(const Object& object, std::string_view name);

// Return a required field.
const Value& field(const Object& object, const std::string& name, const std::string& what);

// Return text as a JSON string with quotes.
std::string quote(const std::string& text);
