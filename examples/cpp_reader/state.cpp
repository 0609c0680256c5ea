#include "state.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <unordered_map>

#include "error.h"
#include "fault.h"

namespace {

constexpr int64_t kMaxOutput = int64_t{1} << 40;  // of the file with raw ids

size_t dtype_size(Encoding dtype) { return static_cast<size_t>(row_bytes(dtype, 1)); }

const char* name_of(Encoding dtype) {
    return dtype == Encoding::F32 ? "F32" : dtype == Encoding::F16 ? "F16" : "BF16";
}

// The owner of each row of a version in a table. Those of `list` and `gaps` blocks replace those of `all` blocks.
std::unordered_map<int64_t, int64_t> owners_of(const std::vector<PartRows>& parts, const std::string& table) {
    std::unordered_map<int64_t, int64_t> owners;
    for (bool is_all : {true, false}) {
        for (auto& part : parts) {
            for (auto& rows : part.blocks) {
                if (rows.block->table != table || (rows.block->ids == Ids::All) != is_all) continue;
                for (size_t i = 0; i < rows.owners.size(); i++) owners[rows.row(static_cast<int64_t>(i))] = rows.owners[i];
            }
        }
    }
    return owners;
}

std::unordered_map<int64_t, int64_t> rows_of(const std::unordered_map<int64_t, int64_t>& owners, const std::string& table) {
    std::unordered_map<int64_t, int64_t> rows;
    for (auto [row, owner] : owners) {
        if (owner != kNoOwner && !rows.emplace(owner, row).second) {
            throw Refused("a raw id owns two rows of table " + table + ": " + std::to_string(owner));
        }
    }
    return rows;
}

// The row that a lookup of a raw id reads.
int64_t answer(const Identity& identity, const std::unordered_map<int64_t, int64_t>& rows, int64_t raw_id) {
    auto found = rows.find(raw_id);
    if (found != rows.end()) return found->second;
    return identity.bucket_of(raw_id).default_row.value_or(-1);
}

OutputTensor output_of(const std::vector<int64_t>& numbers) {
    auto data = reinterpret_cast<const uint8_t*>(numbers.data());
    return {"I64", {static_cast<int64_t>(numbers.size())}, data, 8 * numbers.size()};
}

}  // namespace

void State::check_tables(const Manifest& manifest) const {
    for (auto& [name, table] : manifest.tables) {
        auto found = tables_.find(name);
        if (found == tables_.end()) throw Refused("a delta has a new table: " + name);
        const Table& mine = found->second.table;
        if (mine.num_rows != table.num_rows || mine.dim != table.dim || mine.dtype != table.dtype ||
            !(mine.identity == table.identity)) {
            throw Refused("a delta changes the size, the dtype or the buckets of table " + name);
        }
    }
}

void State::apply(const Directory& directory, const Manifest& manifest) {
    std::vector<PartRows> parts;
    for (auto& part : manifest.parts) parts.push_back(read_part(directory, manifest, part));
    std::map<std::string, std::unordered_map<int64_t, int64_t>> owners, rows;
    for (auto& [name, table] : manifest.tables) {
        if (!table.identity) continue;
        owners[name] = owners_of(parts, name);
        rows[name] = rows_of(owners[name], name);
    }
    if (manifest.kind != Kind::Snapshot) check_tables(manifest);
    if (manifest.kind == Kind::Snapshot) {
        // its blocks cover the tables, so the files bound the memory
        std::map<std::string, TableState> tables;
        for (auto& [name, table] : manifest.tables) {
            auto size = static_cast<size_t>(table.num_rows) * static_cast<size_t>(table.dim) * dtype_size(table.dtype);
            auto num_owners = table.identity ? static_cast<size_t>(table.num_rows) : 0;
            tables[name] = {table, std::vector<uint8_t>(size), std::vector<int64_t>(num_owners, kNoOwner)};
        }
        tables_ = std::move(tables);
        dense_.clear();
    }
    // the rows that changed while the blocks of all rows were copied are newer
    for (bool is_all : {!has_fault(1), has_fault(1)}) write_rows(parts, is_all);
    for (auto& [name, version_rows] : rows) {
        TableState& state = tables_.at(name);
        for (int64_t& owner : state.owners) {  // a row that the version does not have loses its raw id to one that it has
            if (version_rows.count(owner)) owner = kNoOwner;
        }
        for (auto [row, owner] : owners[name]) state.owners[static_cast<size_t>(row)] = owner;
    }
    for (size_t i = 0; i < parts.size(); i++) {
        for (size_t j = 0; j < parts[i].dense.size(); j++) {
            const std::string& name = manifest.parts[i].dense[j];
            const DenseTensor& tensor = manifest.dense.at(name);
            const uint8_t* data = parts[i].dense[j];
            dense_[name] = {tensor, std::vector<uint8_t>(data, data + *tensor_bytes(tensor.dtype, tensor.shape))};
        }
    }
    is_empty_ = false;
    link_ = manifest.link();
    stream_ = manifest.stream;
    generation_ = manifest.generation;
}

void State::write_rows(const std::vector<PartRows>& parts, bool is_all) {
    for (auto& part : parts) {
        for (auto& rows : part.blocks) {
            const Block& block = *rows.block;
            if ((block.ids == Ids::All) != is_all) continue;
            TableState& state = tables_.at(block.table);
            auto item = dtype_size(state.table.dtype), dim = static_cast<size_t>(state.table.dim);
            auto stride = static_cast<size_t>(row_bytes(block.encoding, block.columns.length()));
            for (int64_t i = 0; i < block.num_rows; i++) {
                size_t cell = static_cast<size_t>(rows.row(i)) * dim + static_cast<size_t>(block.columns.first);
                convert_row(block.encoding, rows.values + static_cast<size_t>(i) * stride, block.columns.length(),
                            state.table.dtype, state.values.data() + cell * item);
            }
        }
    }
}

void State::write(const std::string& path, const std::string& ids_path) const {
    std::map<std::string, OutputTensor> output;
    auto add = [&output](const std::string& name, OutputTensor tensor) {
        if (!output.emplace(name, std::move(tensor)).second) throw Refused("two tensors are called " + name);
    };
    for (auto& [name, state] : tables_) {
        const Table& table = state.table;
        add(name, {name_of(table.dtype), {table.num_rows, table.dim}, state.values.data(), state.values.size()});
        if (table.identity) add(name + ".owners", output_of(state.owners));
    }
    for (auto& [name, state] : dense_) add(name, {state.tensor.dtype, state.tensor.shape, state.data.data(), state.data.size()});
    std::map<std::string, std::vector<int64_t>> answers;
    if (!ids_path.empty()) {
        Bytes file = read_file(ids_path, kMaxOutput);
        for (auto& [name, span] : read_header(file, ids_path)) {
            auto found = tables_.find(name);
            if (found == tables_.end() || !found->second.table.identity || span.dtype != "I64") {
                throw Refused("not the raw ids of a table: " + name);
            }
            std::unordered_map<int64_t, int64_t> rows;
            const TableState& state = found->second;
            for (size_t row = 0; row < state.owners.size(); row++) {
                if (state.owners[row] != kNoOwner) rows.emplace(state.owners[row], static_cast<int64_t>(row));
            }
            std::vector<int64_t>& found_rows = answers[name];
            for (size_t at = span.begin; at < span.end; at += 8) {
                int64_t raw_id;
                std::memcpy(&raw_id, file.data() + at, 8);
                found_rows.push_back(answer(*state.table.identity, rows, raw_id));
            }
        }
    }
    for (auto& [name, rows] : answers) add(name + ".answers", output_of(rows));
    write_file(path, output);
}
