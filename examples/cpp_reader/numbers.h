// Dtypes, and the conversion of encoded rows.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

// Half-open.
struct Range {
    int64_t first, end;

    int64_t length() const { return end - first; }
    bool operator==(const Range& other) const { return first == other.first && end == other.end; }
};

enum class Encoding { F32, F16, BF16, INT8, INT4 };

// Return the bytes of one number of a dtype of a tensor, 0 if the dtype is unknown.
int64_t item_size(const std::string& dtype);

// Return the bytes of a tensor in exact arithmetic; nothing if they are 2^63 or more, where a 0 counts as 1.
std::optional<int64_t> tensor_bytes(const std::string& dtype, const std::vector<int64_t>& shape);

// Return the encoding of a name, nothing if it is unknown.
std::optional<Encoding> encoding_of(const std::string& name);

// Return the bytes of an encoded row of some columns.
int64_t row_bytes(Encoding encoding, int64_t num_columns);

// Decode a row, and write it in the encoding `dtype` of a table, which is F32, F16 or BF16.
void convert_row(Encoding encoding, const uint8_t* row, int64_t num_columns, Encoding dtype, uint8_t* output);
