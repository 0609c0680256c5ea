// The objects of a stream in a local directory.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "manifest.h"

// Bytes of an object, aligned for 64-bit numbers.
class Bytes {
  public:
    Bytes() = default;
    explicit Bytes(size_t size) : words_((size + 7) / 8), size_(size) {}

    uint8_t* data() { return reinterpret_cast<uint8_t*>(words_.data()); }
    const uint8_t* data() const { return reinterpret_cast<const uint8_t*>(words_.data()); }
    size_t size() const { return size_; }
    std::string_view text(size_t from = 0) const {
        return {reinterpret_cast<const char*>(data()) + from, size_ - from};
    }

  private:
    std::vector<uint64_t> words_;
    size_t size_ = 0;
};

// Read a file of at most, or of exactly `num_bytes`; its size is checked before memory is allocated.
Bytes read_file(const std::string& path, int64_t max_bytes);
Bytes read_file_of(const std::string& path, int64_t num_bytes);

struct MergedName {
    int64_t last, first;
    Kind kind;
};

class Directory {
  public:
    explicit Directory(std::string path) : path_(std::move(path)) {}

    // Versions of the log, ascending. Other names are ignored.
    std::vector<int64_t> versions() const;

    // Merged entries of a kind, the newest first, and of those the longest first.
    std::vector<MergedName> merged(Kind kind) const;

    bool has_entry(int64_t version) const;
    Bytes entry_bytes(int64_t version) const;
    Manifest entry(int64_t version) const;
    Manifest merged_entry(const MergedName& name) const;
    Bytes part(const Part& part) const;

    // The link to an entry of the log, nothing if the entry is missing.
    std::optional<Link> link(int64_t version) const;

  private:
    std::string entry_path(int64_t version) const;
    std::vector<std::string> names(const std::string& folder) const;

    std::string path_;
};
