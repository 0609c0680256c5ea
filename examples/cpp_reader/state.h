// The state of a stream after a version: tables, dense tensors, and the owners of rows.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "manifest.h"
#include "part.h"
#include "safetensors.h"

class State {
  public:
    // Apply a version. Everything is checked before anything is written: an exception leaves the state unchanged.
    void apply(const Directory& directory, const Manifest& manifest);

    bool is_empty() const { return is_empty_; }
    const Link& link() const { return link_; }  // of the version applied last
    const std::string& stream() const { return stream_; }
    int64_t generation() const { return generation_; }

    // Write the state, and the rows that lookups of the raw ids in `ids_path` read, which is empty for none.
    void write(const std::string& path, const std::string& ids_path) const;

  private:
    struct TableState {
        Table table;
        std::vector<uint8_t> values;
        std::vector<int64_t> owners;
    };
    struct DenseState {
        DenseTensor tensor;
        std::vector<uint8_t> data;
    };
    // Of the rows of a version.
    using Owners = std::map<std::string, std::vector<std::pair<int64_t, int64_t>>>;  // table to (row, owner)

    void check_tables(const Manifest& manifest) const;
    void write_rows(const std::vector<PartRows>& parts, bool is_all);

    bool is_empty_ = true;
    Link link_{-1, ""};
    std::string stream_;
    int64_t generation_ = 0;
    std::map<std::string, TableState> tables_;
    std::map<std::string, DenseState> dense_;
};
