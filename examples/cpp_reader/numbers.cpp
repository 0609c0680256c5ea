#include "numbers.h"

#include <cmath>
#include <cstring>

#include "fault.h"

namespace {

// Memory of a file is not aligned, and numbers are little-endian, as they are on all machines that this example builds on.
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

template <typename T>
T load(const uint8_t* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <typename T>
void store(T value, uint8_t* to) {
    std::memcpy(to, &value, sizeof value);
}

float float_of_bits(uint32_t bits) { return load<float>(reinterpret_cast<const uint8_t*>(&bits)); }
uint32_t bits_of_float(float value) { return load<uint32_t>(reinterpret_cast<const uint8_t*>(&value)); }

float float_of_half(uint16_t half) {
    uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31, fraction = half & 1023;
    if (exponent == 31) return float_of_bits(sign | 0x7F800000u | fraction << 13);
    if (exponent != 0) return float_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
    float magnitude = std::ldexp(static_cast<float>(fraction), -24);
    return sign ? -magnitude : magnitude;
}

// Both round to the nearest number, and ties to an even fraction.
uint16_t half_of_float(float value) {
    uint32_t bits = bits_of_float(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);   // NaN
    if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7C00u);  // from 65,536: infinite
    if (magnitude < 0x38800000u) {                                               // below 2^-14: multiples of 2^-24
        float multiple = std::nearbyint(std::ldexp(float_of_bits(magnitude), 24));
        return static_cast<uint16_t>(sign | static_cast<uint32_t>(multiple));
    }
    uint32_t shifted = magnitude - (112u << 23);
    return static_cast<uint16_t>(sign | (shifted + 0xFFFu + (shifted >> 13 & 1)) >> 13);  // a carry may give infinity
}

uint16_t bfloat_of_float(float value) {
    uint32_t bits = bits_of_float(value);
    if (has_fault(2)) return static_cast<uint16_t>(bits >> 16);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);  // NaN stays NaN
    return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}

// The product is exact in float64: 8 bits by 24.
float quantized(uint8_t code, float scale, float bias) {
    return static_cast<float>(static_cast<double>(code) * scale + bias);
}

float decode(Encoding encoding, const uint8_t* row, int64_t num_columns, int64_t column) {
    switch (encoding) {
        case Encoding::F32: return load<float>(row + 4 * column);
        case Encoding::F16: return float_of_half(load<uint16_t>(row + 2 * column));
        case Encoding::BF16: return float_of_bits(static_cast<uint32_t>(load<uint16_t>(row + 2 * column)) << 16);
        case Encoding::INT8:
            return quantized(row[column], load<float>(row + num_columns), load<float>(row + num_columns + 4));
        case Encoding::INT4: {
            const uint8_t* scale = row + num_columns / 2;
            uint8_t code = column % 2 ? row[column / 2] >> 4 : row[column / 2] & 15;
            return quantized(code, float_of_half(load<uint16_t>(scale)), float_of_half(load<uint16_t>(scale + 2)));
        }
    }
    return 0;
}

}  // namespace

int64_t item_size(const std::string& dtype) {
    if (dtype == "F64" || dtype == "I64") return 8;
    if (dtype == "F32" || dtype == "I32") return 4;
    if (dtype == "F16" || dtype == "BF16" || dtype == "I16") return 2;
    if (dtype == "I8" || dtype == "U8" || dtype == "BOOL") return 1;
    return 0;
}

std::optional<int64_t> tensor_bytes(const std::string& dtype, const std::vector<int64_t>& shape) {
    __int128 product = item_size(dtype);
    bool is_empty = false;
    for (int64_t dimension : shape) {
        is_empty |= dimension == 0;
        product *= dimension == 0 ? 1 : dimension;
        if (product > INT64_MAX) return {};
    }
    return is_empty ? 0 : static_cast<int64_t>(product);
}

std::optional<Encoding> encoding_of(const std::string& name) {
    if (name == "F32") return Encoding::F32;
    if (name == "F16") return Encoding::F16;
    if (name == "BF16") return Encoding::BF16;
    if (name == "INT8") return Encoding::INT8;
    if (name == "INT4") return Encoding::INT4;
    return {};
}

int64_t row_bytes(Encoding encoding, int64_t num_columns) {
    switch (encoding) {
        case Encoding::F32: return 4 * num_columns;
        case Encoding::F16:
        case Encoding::BF16: return 2 * num_columns;
        case Encoding::INT8: return num_columns + 8;
        case Encoding::INT4: return num_columns / 2 + 4;
    }
    return 0;
}

void convert_row(Encoding encoding, const uint8_t* row, int64_t num_columns, Encoding dtype, uint8_t* output) {
    if (encoding == dtype) {
        std::memcpy(output, row, static_cast<size_t>(row_bytes(dtype, num_columns)));
        return;
    }
    for (int64_t column = 0; column < num_columns; column++) {
        float value = decode(encoding, row, num_columns, column);
        if (dtype == Encoding::F32) store(value, output + 4 * column);
        else if (dtype == Encoding::F16) store(half_of_float(value), output + 2 * column);
        else store(bfloat_of_float(value), output + 2 * column);
    }
}
