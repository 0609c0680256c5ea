#include "manifest.h"

#include <xxhash.h>

#include <algorithm>
#include <set>

#include "error.h"
#include "fault.h"
#include "json.h"
#include "rectangles.h"

namespace {

constexpr double kMaxSeconds = 9007199254740992.0;

bool matches(const std::string& text, const std::string& allowed) {
    return !text.empty() && text.find_first_not_of(allowed) == text.npos;
}

const std::string kDigits = "0123456789", kLower = "abcdefghijklmnopqrstuvwxyz", kUpper = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";

// Reads the fields of one object; `what` names it in errors.
class Fields {
  public:
    Fields(const Value& value, std::string what) : Fields(value.object(what), what) {}
    Fields(const Object& object, std::string what) : object_(object), what_(std::move(what)) {}

    const Value& get(const std::string& name) const { return field(object_, name, what_); }
    std::string path(const std::string& name) const { return what_ + "." + name; }
    bool has(const std::string& name) const { return find(object_, name) != nullptr; }

    int64_t count(const std::string& name) const { return get(name).count(path(name)); }
    const std::string& text(const std::string& name) const { return get(name).text(path(name)); }
    const Array& array(const std::string& name) const { return get(name).array(path(name)); }
    const Object& object(const std::string& name) const { return get(name).object(path(name)); }

    std::string hex(const std::string& name) const {
        const std::string& found = text(name);
        require(found.size() == 32 && matches(found, kDigits + "abcdef"), path(name) + " is not 32 digits of hex");
        return found;
    }

    double seconds(const std::string& name) const {
        double found = get(name).number(path(name));
        require(found >= 0 && found < kMaxSeconds, path(name) + " is out of range");
        return found;
    }

    std::optional<int64_t> optional_count(const std::string& name) const {
        if (get(name).is_null()) return {};
        return count(name);
    }

    Range range(const std::string& name) const { return range_of(get(name), path(name)); }

    static Range range_of(const Value& value, const std::string& what) {
        auto& pair = value.array(what);
        require(pair.size() == 2, what + " is not a range");
        Range range{pair[0].count(what), pair[1].count(what)};
        require(range.first <= range.end, what + " is not a range");
        return range;
    }

    Range range_inside(const std::string& name, int64_t size) const {
        Range found = range(name);
        require(found.end <= size, path(name) + " is outside of the table");
        return found;
    }

    std::optional<Link> link(const std::string& name) const {
        if (get(name).is_null()) return {};
        Fields fields(get(name), path(name));
        return Link{fields.count("version"), fields.hex("xxh3")};
    }

    const std::string& what() const { return what_; }

  private:
    const Object& object_;
    std::string what_;
};

// Ranges must ascend from 0 to `end` without gaps, with at least one number each.
class Dense {
  public:
    explicit Dense(std::string what) : what_(std::move(what)) {}
    void add(Range range) {
        require(range.first == next_ && range.length() > 0, what_ + " are not ascending without gaps");
        next_ = range.end;
    }
    void finish(int64_t end) const { require(next_ == end, what_ + " do not end with the table"); }

  private:
    std::string what_;
    int64_t next_ = 0;
};

Identity parse_identity(const Fields& fields, int64_t num_rows) {
    require(fields.text("dtype") == "I64", fields.path("dtype") + " is not I64");
    Identity identity{fields.count("hash_size"), {}};
    auto& buckets = fields.array("buckets");
    require(!buckets.empty() && buckets.size() <= 65536, fields.path("buckets") + " must be 1 to 65,536");
    Dense rows(fields.path("buckets"));
    for (auto& each : buckets) {
        Fields bucket(each, fields.path("buckets"));
        Bucket found{bucket.range("rows"), bucket.optional_count("default")};
        rows.add(found.rows);
        require(!found.default_row || (found.rows.first <= *found.default_row && *found.default_row < found.rows.end),
                bucket.path("default") + " is not a row of the bucket");
        identity.buckets.push_back(found);
        require(found.default_row.has_value() == identity.buckets[0].default_row.has_value(),
                bucket.path("default") + " is null for some buckets only");
    }
    rows.finish(num_rows);
    return identity;
}

void parse_states(const Fields& fields, Table& table) {
    auto& states = fields.array("states");
    require(states.size() <= 16, fields.path("states") + " are more than 16");
    std::set<std::string> names;
    for (auto& each : states) {
        Fields state(each, fields.path("states"));
        const std::string &name = state.text("name"), &dtype = state.text("dtype"), &width = state.text("width");
        require(name.size() <= 64 && matches(name, kDigits + kLower + "_"), state.path("name") + " is malformed");
        require(names.insert(name).second, state.path("name") + " is used twice: " + name);
        require(dtype == "F32" || dtype == "F16" || dtype == "BF16", state.path("dtype") + " is unknown");
        require(width == "columns" || width == "range", state.path("width") + " is unknown");
    }
    table.has_states = !states.empty();
}

Table parse_table(const Fields& fields, int format) {
    Table table{fields.count("num_rows"), fields.count("dim"), Encoding::F32, {}, false, {}};
    require(table.dim >= 1, fields.path("dim") + " is 0");
    auto dtype = encoding_of(fields.text("dtype"));
    require(dtype && *dtype <= Encoding::BF16, fields.path("dtype") + " is unknown");
    table.dtype = *dtype;
    if (format == 1) return table;
    auto& columns = fields.array("columns");
    require(!columns.empty() && columns.size() <= 65536, fields.path("columns") + " must be 1 to 65,536");
    Dense ranges(fields.path("columns"));
    for (auto& each : columns) {
        table.columns.push_back(Fields::range_of(each, fields.path("columns")));
        ranges.add(table.columns.back());
    }
    ranges.finish(table.dim);
    parse_states(fields, table);
    if (fields.get("optimizer").is_null()) {
        require(!table.has_states && columns.size() == 1, fields.what() + " has states or ranges without an optimizer");
    } else {
        const std::string& optimizer = fields.text("optimizer");
        require(optimizer.size() <= 64 && matches(optimizer, kDigits + kUpper + "_"), fields.path("optimizer") + " is malformed");
    }
    if (!fields.get("identity").is_null()) {
        require(columns.size() == 1, fields.what() + " has raw ids and several ranges of columns");
        table.identity = parse_identity(Fields(fields.get("identity"), fields.path("identity")), table.num_rows);
    }
    return table;
}

DenseTensor parse_dense(const Fields& fields) {
    DenseTensor tensor{fields.text("dtype"), {}};
    require(item_size(tensor.dtype) > 0, fields.path("dtype") + " is unknown");
    for (auto& each : fields.array("shape")) tensor.shape.push_back(each.count(fields.path("shape")));
    require(tensor.shape.size() <= 16 && tensor_bytes(tensor.dtype, tensor.shape), fields.path("shape") + " is too large");
    return tensor;
}

Block parse_block(const Fields& fields, const Manifest& manifest) {
    Block block{fields.text("table"), {}, {}, fields.count("num_rows"), Ids::All, Encoding::F32};
    auto found = manifest.tables.find(block.table);
    require(found != manifest.tables.end(), fields.path("table") + " is unknown");
    const Table& table = found->second;
    block.rows = fields.range_inside("rows", table.num_rows);
    block.columns = fields.range_inside("columns", table.dim);
    require(block.columns.length() > 0, fields.path("columns") + " is empty");
    const std::string& ids = fields.text("ids");
    require(ids == "all" || ids == "list" || ids == "gaps", fields.path("ids") + " is unknown");
    block.ids = ids == "all" ? Ids::All : ids == "list" ? Ids::List : Ids::Gaps;
    require(block.num_rows <= block.rows.length() && (block.ids != Ids::All || block.num_rows == block.rows.length()),
            fields.path("num_rows") + " does not fit the rows");
    auto encoding = encoding_of(fields.text("encoding"));
    require(encoding && (*encoding != Encoding::INT4 || block.columns.length() % 2 == 0),
            fields.path("encoding") + " is unknown or needs an even number of columns");
    block.encoding = *encoding;
    if (table.has_states) {
        require(std::count(table.columns.begin(), table.columns.end(), block.columns) == 1 && block.encoding == table.dtype,
                fields.what() + " differs from the columns or the dtype of a table with states");
    }
    if (table.identity) {
        require(block.columns.length() == table.dim, fields.path("columns") + " must be all of a table with raw ids");
    }
    return block;
}

// The name, size and hash that every object has; returns its `body`, 0 in format 1.
int64_t check_object(const Fields& fields, int format) {
    const std::string& name = fields.text("name");
    const std::string prefix = "parts/", suffix = ".safetensors";
    require(name.size() > prefix.size() + suffix.size() && name.compare(0, prefix.size(), prefix) == 0 &&
                name.compare(name.size() - suffix.size(), suffix.size(), suffix) == 0 &&
                matches(name.substr(prefix.size(), name.size() - prefix.size() - suffix.size()), kDigits + kLower + "-"),
            fields.path("name") + " is malformed");
    fields.hex("xxh3");
    int64_t num_bytes = fields.count("num_bytes");
    if (format == 1) return 0;
    int64_t body = fields.count("body");
    __int128 num_pieces = (static_cast<__int128>(body) + kDigested - 1) / kDigested;
    require(body >= 1 && num_bytes == body + 16 * num_pieces, fields.path("body") + " does not fit num_bytes");
    return body;
}

Part parse_part(const Fields& fields, const Manifest& manifest) {
    int64_t body = check_object(fields, manifest.format);
    Part part{fields.text("name"), fields.count("num_bytes"), body, fields.hex("xxh3"), {}, {}};
    bool has_states = false;
    for (auto& each : fields.array("blocks")) {
        part.blocks.push_back(parse_block(Fields(each, fields.path("blocks")), manifest));
        has_states |= manifest.tables.at(part.blocks.back().table).has_states;
    }
    for (auto& each : fields.array("dense")) part.dense.push_back(each.text(fields.path("dense")));
    if (manifest.format == 2) {
        require(fields.get("states").is_null() == !has_states, fields.path("states") + " does not fit the blocks");
        if (has_states) check_object(Fields(fields.get("states"), fields.path("states")), 2);
    }
    return part;
}

// Each dense tensor is in exactly one part.
void check_dense(const Manifest& manifest) {
    std::set<std::string> seen;
    for (auto& part : manifest.parts) {
        for (auto& name : part.dense) {
            require(manifest.dense.count(name) && seen.insert(name).second, "dense tensor is unknown or in two parts: " + name);
        }
    }
    require(seen.size() == manifest.dense.size(), "a dense tensor is in no part");
}

void check_blocks(const Manifest& manifest) {
    struct Rectangles {
        std::vector<Rectangle> all, changed;
        std::optional<Encoding> encoding;
    };
    std::map<std::string, Rectangles> found;
    for (auto& part : manifest.parts) {
        for (auto& block : part.blocks) {
            auto& [all, changed, encoding] = found[block.table];
            (block.ids == Ids::All ? all : changed).push_back({block.rows, block.columns});
            bool is_same = !encoding || *encoding == block.encoding;
            require(is_same || !manifest.tables.at(block.table).identity, "blocks of two encodings: " + block.table);
            encoding = block.encoding;
        }
    }
    for (auto& [name, table] : manifest.tables) {
        const Rectangles& rectangles = found[name];
        require(are_disjoint(rectangles.all) && are_disjoint(rectangles.changed), "blocks overlap: " + name);
        require(manifest.kind != Kind::Snapshot || do_cover(rectangles.all, table.num_rows, table.dim),
                "a snapshot does not have all of table " + name);
    }
}

void check_format_2(const Fields& fields, const Manifest& manifest) {
    if (!fields.get("event_time").is_null()) fields.seconds("event_time");
    for (auto& each : fields.array("training")) check_object(Fields(each, fields.path("training")), 2);
    for (auto& [name, each] : fields.object("owners")) {
        auto table = manifest.tables.find(name);
        require(table != manifest.tables.end() && table->second.identity, "owners of a table without raw ids: " + name);
        Fields counts(each, fields.path("owners"));
        counts.count("admitted");
        counts.count("evicted");
    }
    require(!manifest.merges || fields.object("owners").empty(), "a merged entry has owners");
}

void check_fork(const Fields& fields, const Manifest& manifest) {
    if (!fields.has("forked_from")) return;
    Fields fork(fields.get("forked_from"), fields.path("forked_from"));
    require(fork.hex("stream") != manifest.stream, fork.path("stream") + " is the stream of the claim");
    require(manifest.parent && Link{fork.count("version"), fork.hex("xxh3")} == *manifest.parent,
            fork.what() + " is not the parent");
    require(fields.get("snapshot").is_null(), fields.path("snapshot") + " must be null after a fork");
}

Kind parse_kind(const std::string& name) {
    if (name == "claim") return Kind::Claim;
    if (name == "snapshot") return Kind::Snapshot;
    if (name == "delta") return Kind::Delta;
    throw Refused("kind is unknown: " + name);
}

void check_format(const Fields& fields) {
    const std::string& format = fields.get("format").integer("format");
    if (format == "1" || format == "2") return;
    if (format[0] == '-' || format == "0") throw Refused("format is unknown: " + format);
    throw Newer("format " + format.substr(0, 40) + " needs a newer release");
}

Manifest parse(std::string_view bytes, const std::string& what) {
    Object object = parse_object(bytes, what);
    Fields fields(object, what);
    check_format(fields);
    Manifest manifest{static_cast<int>(fields.count("format")), fields.hex("stream"), fields.count("generation"),
                      fields.count("version"), parse_kind(fields.text("kind")), fields.link("parent"),
                      fields.link("merges"), {}, {}, {}, xxh3_of(bytes)};
    fields.hex("writer");
    fields.range("batches");
    fields.seconds("cut");
    fields.seconds("created");
    fields.count("pending_rows");
    auto snapshot = fields.optional_count("snapshot");
    // a merged delta may end at a snapshot of the log
    bool is_own = manifest.kind == Kind::Snapshot || (manifest.merges && snapshot == manifest.version);
    require(is_own ? snapshot == manifest.version : !snapshot || *snapshot < manifest.version,
            fields.path("snapshot") + " does not fit the version");
    for (auto& [name, each] : fields.object("tables")) {
        manifest.tables.emplace(name, parse_table(Fields(each, "table " + name), manifest.format));
    }
    for (auto& [name, each] : fields.object("dense")) manifest.dense.emplace(name, parse_dense(Fields(each, "dense " + name)));
    for (auto& each : fields.array("parts")) manifest.parts.push_back(parse_part(Fields(each, fields.path("parts")), manifest));
    check_dense(manifest);
    check_blocks(manifest);
    if (manifest.kind == Kind::Claim) {
        require(manifest.format == 1, "a claim of format 2");
        require(manifest.tables.empty() && manifest.dense.empty() && manifest.parts.empty() && !manifest.merges,
                "a claim has rows");
        check_fork(fields, manifest);
    }
    if (manifest.format == 2) check_format_2(fields, manifest);
    return manifest;
}

}  // namespace

const Bucket& Identity::bucket_of(int64_t raw_id) const {
    auto num_buckets = static_cast<__int128>(buckets.size());
    __int128 size = (hash_size + num_buckets - 1) / num_buckets;
    __int128 id = has_fault(7) ? static_cast<__int128>(raw_id) : static_cast<uint64_t>(raw_id);
    if (has_fault(7) && id < 0) id = -id;
    return buckets[static_cast<size_t>(id < size * num_buckets ? id / size : id % num_buckets)];
}

std::string xxh3_of(std::string_view bytes) {
    constexpr char kHex[] = "0123456789abcdef";
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits(bytes.data(), bytes.size()));
    std::string hex;
    for (unsigned char byte : canonical.digest) hex += {kHex[byte >> 4], kHex[byte & 15]};
    return hex;
}

Manifest parse_entry(std::string_view bytes, int64_t version) {
    std::string what = "entry " + std::to_string(version);
    Manifest manifest = parse(bytes, what);
    require(manifest.version == version, what + " has another version than its name");
    require(!manifest.merges, what + " has merges");
    require(version == 0 ? !manifest.parent : manifest.parent && manifest.parent->version == version - 1,
            what + " has no parent or another one than the entry before it");
    return manifest;
}

Manifest parse_merged(std::string_view bytes, int64_t last, int64_t first, Kind kind) {
    std::string what = "merged entry " + std::to_string(last) + "-" + std::to_string(first);
    Manifest manifest = parse(bytes, what);
    require(manifest.version == last && manifest.kind == kind, what + " has another version or kind than its name");
    require(manifest.merges && manifest.merges->version == last, what + " does not merge its last version");
    require(first <= last && (manifest.parent ? manifest.parent->version == first - 1 : first == 0),
            what + " has another parent than its name");
    return manifest;
}

std::optional<Link> parent_of(std::string_view bytes) {
    try {
        Object object = parse_object(bytes, "entry");
        return Fields(object, "entry").link("parent");
    } catch (const Refused&) {
        return {};
    }
}
