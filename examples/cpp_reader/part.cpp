#include "part.h"

#include <zlib.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <unordered_set>

#include "error.h"
#include "fault.h"
#include "safetensors.h"

namespace {

// Takes the tensors of a part one by one, so that those which no record implies remain.
class Tensors {
  public:
    Tensors(const Bytes& file, const std::string& what) : file_(file), what_(what), spans_(read_header(file, what)) {}

    // Return a tensor of a dtype and a shape; -1 is any size.
    const uint8_t* take(const std::string& name, const std::string& dtype, const std::vector<int64_t>& shape) {
        return file_.data() + take_span(name, dtype, shape).begin;
    }

    std::vector<int64_t> take_int64(const std::string& name, int64_t size) {
        TensorSpan span = take_span(name, "I64", {size});
        std::vector<int64_t> numbers((span.end - span.begin) / 8);
        if (!numbers.empty()) std::memcpy(numbers.data(), file_.data() + span.begin, span.end - span.begin);
        return numbers;
    }

    TensorSpan take_span(const std::string& name, const std::string& dtype, const std::vector<int64_t>& shape) {
        auto found = spans_.find(name);
        require(found != spans_.end(), what_ + " has no tensor " + name);
        TensorSpan span = found->second;
        require(span.dtype == dtype && span.shape.size() == shape.size(), what_ + ": wrong dtype or shape of " + name);
        for (size_t i = 0; i < shape.size(); i++) {
            require(shape[i] < 0 || shape[i] == span.shape[i], what_ + ": wrong shape of " + name);
        }
        spans_.erase(found);
        return span;
    }

    void finish() const {
        require(spans_.empty(), what_ + " has a tensor too many: " + (spans_.empty() ? "" : spans_.begin()->first));
    }

  private:
    const Bytes& file_;
    const std::string& what_;
    std::map<std::string, TensorSpan> spans_;
};

// The bytes before the digests are those of the digests, which the record's hash covers.
void check_digests(const Bytes& file, size_t body, const std::string& what) {
    for (size_t begin = 0, at = body; begin < body; begin += kDigested, at += 16) {
        size_t size = std::min(kDigested, body - begin);
        if (has_fault(6) && begin + size == body) continue;
        std::string digest = xxh3_of(file.text(begin).substr(0, size));
        for (size_t i = 0; i < 16; i++) {
            int byte = std::stoi(digest.substr(2 * i, 2), nullptr, 16);
            require(byte == file.data()[at + i], what + " is damaged: wrong digest at byte " + std::to_string(begin));
        }
    }
}

// Inflate a zlib stream of exactly `size` bytes.
std::vector<uint8_t> inflate_all(const uint8_t* data, size_t num_bytes, size_t size, const std::string& what) {
    std::vector<uint8_t> output(size + 1);  // a byte more shows that a stream is too long
    z_stream stream{};
    require(inflateInit(&stream) == Z_OK, "zlib cannot start");
    int status = Z_OK;
    size_t read = 0, written = 0;
    while (status == Z_OK && written < output.size()) {  // zlib counts in 32 bits
        auto input = static_cast<uInt>(std::min<size_t>(num_bytes - read, 1 << 30));
        auto room = static_cast<uInt>(std::min<size_t>(output.size() - written, 1 << 30));
        stream.next_in = const_cast<uint8_t*>(data + read);
        stream.avail_in = input;
        stream.next_out = output.data() + written;
        stream.avail_out = room;
        status = inflate(&stream, Z_NO_FLUSH);
        read += input - stream.avail_in;
        written += room - stream.avail_out;
    }
    inflateEnd(&stream);
    require(status == Z_STREAM_END && written == size && read == num_bytes, what + " is not a zlib stream of its rows");
    output.pop_back();
    return output;
}

void check_ascending(const std::vector<int64_t>& ids, Range rows, const std::string& what) {
    int64_t previous = rows.first - 1;
    for (int64_t id : ids) {
        require(id > previous && id < rows.end, what + " are not ascending inside the rows");
        previous = id;
    }
}

std::vector<int64_t> ids_of_gaps(const std::vector<uint8_t>& gaps, const std::vector<int64_t>& escapes, Range rows,
                                 const std::string& what) {
    std::vector<int64_t> ids;
    ids.reserve(gaps.size());
    size_t next = 0;
    int64_t previous = -1;
    for (uint8_t gap : gaps) {
        int64_t number = gap;
        if (gap == 255) {
            require(next < escapes.size() && escapes[next] >= 255, what + " has too few or too small escapes");
            number = escapes[next++] + (has_fault(4) ? 1 : 0);
        }
        require(number < rows.end - previous - 1, what + " leave the rows");  // so the sum does not overflow
        previous += 1 + number;
        ids.push_back(previous);
    }
    require(next == escapes.size(), what + " has too many escapes");
    return ids;
}

void check_owners(const BlockRows& rows, const Identity& identity, const std::string& what) {
    std::unordered_set<int64_t> seen;
    for (size_t i = 0; i < rows.owners.size(); i++) {
        int64_t owner = rows.owners[i], row = rows.row(static_cast<int64_t>(i));
        if (owner == kNoOwner) continue;
        const Bucket& bucket = identity.bucket_of(owner);
        require(bucket.rows.first <= row && row < bucket.rows.end, what + ": an owner of another bucket");
        require(bucket.default_row != row, what + ": an owner of a default row");
        // an `all` block may have an owner twice: it moved to another row while the block was copied
        require(rows.block->ids == Ids::All || seen.insert(owner).second, what + ": an owner of two rows");
    }
}

BlockRows read_block(Tensors& tensors, const Bytes& file, const Block& block, const Table& table, size_t index,
                     const std::string& part) {
    std::string prefix = std::to_string(index) + ".", what = part + ", block " + std::to_string(index);
    bool is_quantized = block.encoding >= Encoding::INT8;
    constexpr const char* kDtypes[] = {"F32", "F16", "BF16"};
    int64_t num_columns = block.columns.length();
    int64_t width = is_quantized ? row_bytes(block.encoding, num_columns) : num_columns;
    BlockRows rows{&block, {}, nullptr, {}};
    // first, because it bounds `num_rows` by the size of the file
    rows.values = tensors.take(prefix + "values", is_quantized ? "U8" : kDtypes[static_cast<int>(block.encoding)],
                               {block.num_rows, width});
    if (block.ids == Ids::List) rows.ids = tensors.take_int64(prefix + "ids", block.num_rows);
    if (block.ids == Ids::Gaps) {
        TensorSpan span = tensors.take_span(prefix + "gaps", "U8", {-1});
        std::vector<int64_t> escapes = tensors.take_int64(prefix + "escapes", -1);
        auto gaps = inflate_all(file.data() + span.begin, span.end - span.begin, static_cast<size_t>(block.num_rows), what);
        rows.ids = ids_of_gaps(gaps, escapes, block.rows, what);
    }
    check_ascending(rows.ids, block.rows, what + ": ids");
    if (table.identity) {
        rows.owners = tensors.take_int64(prefix + "owners", block.num_rows);
        check_owners(rows, *table.identity, what);
    }
    return rows;
}

}  // namespace

PartRows read_part(const Directory& directory, const Manifest& manifest, const Part& part) {
    PartRows rows{directory.part(part), {}, {}};
    const Bytes& file = rows.file;
    auto body = static_cast<size_t>(part.body);
    require(xxh3_of(file.text(body)) == part.xxh3, part.name + " is damaged: wrong xxh3");
    if (manifest.format == 2) check_digests(file, body, part.name);
    Tensors tensors(file, part.name);
    if (manifest.format == 2) {
        TensorSpan digests = tensors.take_span("digests", "U8", {part.num_bytes - part.body});
        require(digests.begin == body, part.name + ": the digests are not at the end");
    }
    for (size_t i = 0; i < part.blocks.size(); i++) {
        const Block& block = part.blocks[i];
        rows.blocks.push_back(read_block(tensors, file, block, manifest.tables.at(block.table), i, part.name));
    }
    for (size_t j = 0; j < part.dense.size(); j++) {
        const DenseTensor& tensor = manifest.dense.at(part.dense[j]);
        const uint8_t* data = tensors.take("dense." + std::to_string(j), tensor.dtype, tensor.shape);
        bool is_bool = tensor.dtype == "BOOL";
        auto size = is_bool ? *tensor_bytes(tensor.dtype, tensor.shape) : 0;
        require(std::all_of(data, data + size, [](uint8_t byte) { return byte <= 1; }),
                part.name + ": a BOOL is not 0 or 1: " + part.dense[j]);
        rows.dense.push_back(data);
    }
    tensors.finish();
    return rows;
}
