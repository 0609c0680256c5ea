// Manifests: the fields of entries and of merged entries, all of them checked.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "numbers.h"

constexpr size_t kDigested = size_t{1} << 23;  // bytes for each digest of an object of format 2

struct Link {
    int64_t version;
    std::string xxh3;

    bool operator==(const Link& other) const { return version == other.version && xxh3 == other.xxh3; }
    bool operator!=(const Link& other) const { return !(*this == other); }
};

struct Bucket {
    Range rows;
    std::optional<int64_t> default_row;

    bool operator==(const Bucket& other) const { return rows == other.rows && default_row == other.default_row; }
};

// How the raw ids of a table are divided.
struct Identity {
    int64_t hash_size;
    std::vector<Bucket> buckets;

    const Bucket& bucket_of(int64_t raw_id) const;
    bool operator==(const Identity& other) const { return hash_size == other.hash_size && buckets == other.buckets; }
};

struct Table {
    int64_t num_rows, dim;
    Encoding dtype;
    std::vector<Range> columns;  // format 2
    bool has_states = false;     // format 2
    std::optional<Identity> identity;
};

struct DenseTensor {
    std::string dtype;
    std::vector<int64_t> shape;
};

enum class Kind { Claim, Snapshot, Delta };
enum class Ids { All, List, Gaps };

struct Block {
    std::string table;
    Range rows, columns;
    int64_t num_rows;
    Ids ids;
    Encoding encoding;
};

struct Part {
    std::string name;
    int64_t num_bytes;
    int64_t body = 0;  // 0 in format 1: then xxh3 is the hash of the whole object
    std::string xxh3;
    std::vector<Block> blocks;
    std::vector<std::string> dense;
};

struct Manifest {
    int format;
    std::string stream;
    int64_t generation, version;
    Kind kind;
    std::optional<Link> parent, merges;
    std::map<std::string, Table> tables;
    std::map<std::string, DenseTensor> dense;
    std::vector<Part> parts;
    std::string xxh3;  // of the manifest's bytes

    // What the `parent` of the next entry has to be.
    Link link() const { return merges ? *merges : Link{version, xxh3}; }
};

// Return the xxh3 of bytes as hex.
std::string xxh3_of(std::string_view bytes);

// Parse and check an entry of the log.
Manifest parse_entry(std::string_view bytes, int64_t version);

// Parse and check a merged entry, whose name has its last and first version and its kind.
Manifest parse_merged(std::string_view bytes, int64_t last, int64_t first, Kind kind);

// Return the parent of an entry of any format; nothing if it has none or is malformed.
std::optional<Link> parent_of(std::string_view bytes);
