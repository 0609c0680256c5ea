#include "json.h"

#include <rapidjson/error/en.h>
#include <rapidjson/memorystream.h>
#include <rapidjson/reader.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>

#include "error.h"
#include "fault.h"

namespace {

// The format sets no limit for unknown fields. Values are destroyed by recursion, so their depth must be bounded.
constexpr size_t kMaxDepth = 512;

// Builds the values. RapidJSON's own documents keep duplicate names and lose the spelling of numbers.
class Builder : public rapidjson::BaseReaderHandler<rapidjson::UTF8<>, Builder> {
  public:
    bool Null() { return add(Value()); }
    bool Bool(bool value) { return add(Value(value)); }
    bool RawNumber(const char* text, rapidjson::SizeType size, bool) {
        return add(Value(Number{std::string(text, size)}));
    }
    bool String(const char* text, rapidjson::SizeType size, bool) {
        return is_text({text, size}) && add(Value(std::string(text, size)));
    }
    bool StartObject() { return open(true); }
    bool StartArray() { return open(false); }

    bool Key(const char* text, rapidjson::SizeType size, bool) {
        open_.back().members.emplace_back(std::string(text, size), Value());
        return is_text({text, size});
    }

    bool EndObject(rapidjson::SizeType) {
        Object members = std::move(open_.back().members);
        open_.pop_back();
        std::sort(members.begin(), members.end(), [](auto& a, auto& b) { return a.first < b.first; });
        auto same = std::adjacent_find(members.begin(), members.end(),
                                       [](auto& a, auto& b) { return a.first == b.first; });
        if (same != members.end() && !has_fault(5)) {
            error = "duplicate name " + same->first;
            return false;
        }
        return add(Value(std::move(members)));
    }

    bool EndArray(rapidjson::SizeType) {
        Array elements = std::move(open_.back().elements);
        open_.pop_back();
        return add(Value(std::move(elements)));
    }

    Value root;
    std::string error;

  private:
    struct Open {
        bool is_object;
        Object members;
        Array elements;
    };

    // RapidJSON accepts the escape of a low surrogate without a high one, which has no UTF-8.
    bool is_text(std::string_view text) {
        for (size_t at = 0; at + 1 < text.size(); at++) {
            if (text[at] == '\xED' && static_cast<unsigned char>(text[at + 1]) >= 0xA0) error = "surrogate in a string";
        }
        return error.empty();
    }

    bool open(bool is_object) {
        if (open_.size() == kMaxDepth) {
            error = "too many levels";
            return false;
        }
        open_.push_back({is_object, {}, {}});
        return true;
    }

    bool add(Value value) {
        if (open_.empty()) root = std::move(value);
        else if (open_.back().is_object) open_.back().members.back().second = std::move(value);
        else open_.back().elements.push_back(std::move(value));
        return true;
    }

    std::vector<Open> open_;
};

// RapidJSON refuses numbers outside of float64, even if it only passes their spelling on. No number of the format needs
// more digits than this, so cut the others: they stay out of range.
std::string shorten_numbers(std::string_view text) {
    constexpr size_t kMaxDigits = 40;
    std::string output;
    output.reserve(text.size());
    bool is_string = false;
    size_t num_digits = 0;
    for (size_t at = 0; at < text.size(); at++) {
        char each = text[at];
        num_digits = !is_string && each >= '0' && each <= '9' ? num_digits + 1 : 0;
        if (num_digits > kMaxDigits) continue;
        output += each;
        if (each == '"') is_string = !is_string;
        if (is_string && each == '\\' && at + 1 < text.size()) output += text[++at];
    }
    return output;
}

bool is_integer(const std::string& spelling) { return spelling.find_first_of(".eE") == std::string::npos; }

}  // namespace

Object parse_object(std::string_view text, const std::string& what) {
    // RapidJSON takes a zero byte for the end and would ignore what follows it
    if (text.find('\0') != text.npos) throw Refused(what + " is not valid JSON: zero byte");
    // iterative: a deep nesting must not exhaust the stack
    constexpr unsigned kFlags = rapidjson::kParseIterativeFlag | rapidjson::kParseValidateEncodingFlag |
                                rapidjson::kParseNumbersAsStringsFlag;
    Builder builder;
    rapidjson::Reader reader;
    std::string shortened = shorten_numbers(text);
    rapidjson::MemoryStream stream(shortened.data(), shortened.size());
    auto result = reader.Parse<kFlags>(stream, builder);
    if (result.IsError()) {
        std::string reason = builder.error.empty() ? GetParseError_En(result.Code()) : builder.error;
        throw Refused(what + " is not valid JSON: " + reason);
    }
    return builder.root.object(what);
}

const Object& Value::object(const std::string& what) const {
    if (auto* found = std::get_if<Object>(&any_)) return *found;
    throw Refused(what + " is not an object");
}

const Array& Value::array(const std::string& what) const {
    if (auto* found = std::get_if<Array>(&any_)) return *found;
    throw Refused(what + " is not an array");
}

const std::string& Value::text(const std::string& what) const {
    if (auto* found = std::get_if<std::string>(&any_)) return *found;
    throw Refused(what + " is not a string");
}

const std::string& Value::integer(const std::string& what) const {
    auto* found = std::get_if<Number>(&any_);
    if (!found || !is_integer(found->spelling)) throw Refused(what + " is not an integer");
    return found->spelling;
}

int64_t Value::count(const std::string& what) const {
    const std::string& digits = integer(what);
    int64_t value = -1;
    auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (error != std::errc() || end != digits.data() + digits.size() || value < 0) {
        throw Refused(what + " is not a count: " + digits.substr(0, 40));
    }
    return value;
}

double Value::number(const std::string& what) const {
    auto* found = std::get_if<Number>(&any_);
    if (!found) throw Refused(what + " is not a number");
    return std::strtod(found->spelling.c_str(), nullptr);  // infinite if it is too large
}

const Value* find(const Object& object, std::string_view name) {
    auto found = std::lower_bound(object.begin(), object.end(), name,
                                  [](auto& member, std::string_view wanted) { return member.first < wanted; });
    return found != object.end() && found->first == name ? &found->second : nullptr;
}

const Value& field(const Object& object, const std::string& name, const std::string& what) {
    if (auto* found = find(object, name)) return *found;
    throw Refused(what + " has no field " + name);
}

std::string quote(const std::string& text) {
    constexpr char kHex[] = "0123456789abcdef";
    std::string quoted = "\"";
    for (char each : text) {
        auto byte = static_cast<unsigned char>(each);
        if (byte < 0x20) (quoted += "\\u00") += {kHex[byte >> 4], kHex[byte & 15]};
        else if (each == '"' || each == '\\') (quoted += '\\') += each;
        else quoted += each;
    }
    return quoted + '"';
}
