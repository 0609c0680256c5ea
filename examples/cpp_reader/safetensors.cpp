#include "safetensors.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <stdexcept>

#include "error.h"
#include "fault.h"
#include "json.h"

namespace {

constexpr uint64_t kMaxHeader = uint64_t{64} << 20;

TensorSpan parse_tensor(const Value& value, size_t start, size_t file_size, const std::string& what) {
    const Object& fields = value.object(what);
    TensorSpan tensor{field(fields, "dtype", what).text(what), {}, 0, 0};
    for (auto& each : field(fields, "shape", what).array(what)) tensor.shape.push_back(each.count(what));
    auto& offsets = field(fields, "data_offsets", what).array(what);
    if (fields.size() != 3) throw Refused(what + " has unknown fields");
    if (offsets.size() != 2) throw Refused(what + " has no two offsets");
    int64_t begin = offsets[0].count(what), end = offsets[1].count(what);
    if (begin > end || static_cast<size_t>(end) > file_size - start) throw Refused(what + " is outside of the file");
    auto num_bytes = tensor_bytes(tensor.dtype, tensor.shape);
    if (item_size(tensor.dtype) == 0 || num_bytes != end - begin) throw Refused(what + " has a wrong size or dtype");
    tensor.begin = start + static_cast<size_t>(begin);
    tensor.end = start + static_cast<size_t>(end);
    return tensor;
}

}  // namespace

std::map<std::string, TensorSpan> read_header(const Bytes& file, const std::string& what) {
    uint64_t length = 0;
    if (file.size() < 8) throw Refused(what + " has no header");
    std::memcpy(&length, file.data(), 8);
    if (length > file.size() - 8 || length % 8 != 0 || length > kMaxHeader) throw Refused(what + " has a header of a wrong length");
    size_t start = 8 + static_cast<size_t>(length);
    std::map<std::string, TensorSpan> tensors;
    for (auto& [name, value] : parse_object(file.text(8).substr(0, length), "header of " + what)) {
        tensors.emplace(name, parse_tensor(value, start, file.size(), "tensor " + name + " of " + what));
    }
    std::vector<std::pair<size_t, size_t>> spans;
    for (auto& [name, tensor] : tensors) spans.emplace_back(tensor.begin, tensor.end);
    std::sort(spans.begin(), spans.end());
    size_t next = start;
    for (auto& [begin, end] : spans) {
        if (begin != next && !has_fault(9)) throw Refused(what + " has gaps or tensors that overlap");
        next = end;
    }
    if (next != file.size() && !has_fault(9)) throw Refused(what + " does not end with its last tensor");
    return tensors;
}

void write_file(const std::string& path, const std::map<std::string, OutputTensor>& tensors) {
    std::string header;
    size_t offset = 0;
    for (auto& [name, tensor] : tensors) {
        header += header.empty() ? "{" : ",";
        header += quote(name) + ":{\"dtype\":" + quote(tensor.dtype) + ",\"shape\":[";
        for (size_t i = 0; i < tensor.shape.size(); i++) header += (i ? "," : "") + std::to_string(tensor.shape[i]);
        header += "],\"data_offsets\":[" + std::to_string(offset) + ",";
        offset += tensor.num_bytes;
        header += std::to_string(offset) + "]}";
    }
    header += header.empty() ? "{}" : "}";
    header.append((8 - header.size() % 8) % 8, ' ');
    uint64_t length = header.size();
    std::string draft = path + "." + std::to_string(getpid());
    std::ofstream file(draft, std::ios::binary | std::ios::trunc);
    file.write(reinterpret_cast<const char*>(&length), sizeof length);
    file.write(header.data(), static_cast<std::streamsize>(header.size()));
    for (auto& [name, tensor] : tensors) {
        file.write(reinterpret_cast<const char*>(tensor.data), static_cast<std::streamsize>(tensor.num_bytes));
    }
    file.close();
    if (!file || std::rename(draft.c_str(), path.c_str()) != 0) {
        std::remove(draft.c_str());
        throw std::runtime_error("cannot write " + path);
    }
}
