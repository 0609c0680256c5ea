// Parts: their bytes, ids and owners, checked against the record of a manifest.
#pragma once

#include <cstdint>
#include <vector>

#include "directory.h"
#include "manifest.h"

struct BlockRows {
    const Block* block;
    std::vector<int64_t> ids;     // empty if the block has all rows of its range
    const uint8_t* values;        // in the memory of the part
    std::vector<int64_t> owners;  // of a table with raw ids

    int64_t row(int64_t index) const {
        return block->ids == Ids::All ? block->rows.first + index : ids[static_cast<size_t>(index)];
    }
};

struct PartRows {
    Bytes file;
    std::vector<BlockRows> blocks;
    std::vector<const uint8_t*> dense;  // in the order of the part's names
};

// The raw id that owns no row, and the owner of a row without one.
constexpr int64_t kNoOwner = INT64_MAX;

// Read a part, and check everything that can be checked without its other parts. Pointers go to `manifest`.
PartRows read_part(const Directory& directory, const Manifest& manifest, const Part& part);
