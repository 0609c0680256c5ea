#include "directory.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <memory>

#include "error.h"

namespace {

constexpr int64_t kMaxManifest = int64_t{64} << 20;

class File {
  public:
    explicit File(const std::string& path)
        : path_(path), descriptor_(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {  // a pipe must not block
        if (descriptor_ < 0) throw Refused("cannot open " + path);
    }
    ~File() { close(descriptor_); }
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    int64_t size() const {
        struct stat status;
        if (fstat(descriptor_, &status) != 0 || !S_ISREG(status.st_mode)) throw Refused("not a file: " + path_);
        return status.st_size;
    }

    Bytes read_all() const {
        Bytes bytes(static_cast<size_t>(size()));
        for (size_t at = 0; at < bytes.size();) {
            ssize_t count = read(descriptor_, bytes.data() + at, bytes.size() - at);
            if (count <= 0) throw Refused("cannot read " + path_);
            at += static_cast<size_t>(count);
        }
        return bytes;
    }

  private:
    std::string path_;
    int descriptor_;
};

// Versions have 20 digits in names, and are below 2^63.
std::optional<int64_t> version_of(std::string_view digits) {
    int64_t version = 0;
    auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), version);
    bool is_version = digits.size() == 20 && digits[0] != '-' && error == std::errc() && end == digits.data() + 20;
    return is_version ? std::optional(version) : std::nullopt;
}

std::string digits_of(int64_t version) {
    char digits[24];
    std::snprintf(digits, sizeof digits, "%020lld", static_cast<long long>(version));
    return digits;
}

const char* name_of(Kind kind) { return kind == Kind::Snapshot ? "snapshot" : "delta"; }

}  // namespace

Bytes read_file(const std::string& path, int64_t max_bytes) {
    File file(path);
    if (file.size() > max_bytes) throw Refused("too large: " + path);
    return file.read_all();
}

Bytes read_file_of(const std::string& path, int64_t num_bytes) {
    File file(path);
    if (file.size() != num_bytes) throw Refused("wrong size: " + path);
    return file.read_all();
}

std::vector<std::string> Directory::names(const std::string& folder) const {
    std::vector<std::string> found;
    auto close = [](DIR* opened) { closedir(opened); };
    std::unique_ptr<DIR, decltype(close)> opened(opendir((path_ + "/" + folder).c_str()), close);
    if (!opened) return found;  // the format allows a stream without this folder
    while (auto* each = readdir(opened.get())) found.emplace_back(each->d_name);
    return found;
}

std::vector<int64_t> Directory::versions() const {
    std::vector<int64_t> found;
    for (std::string_view name : names("log")) {
        if (name.size() != 25 || name.substr(20) != ".json") continue;
        if (auto version = version_of(name.substr(0, 20))) found.push_back(*version);
    }
    std::sort(found.begin(), found.end());
    return found;
}

std::vector<MergedName> Directory::merged(Kind kind) const {
    std::vector<MergedName> found;
    const std::string suffix = std::string("-") + name_of(kind) + ".json";
    for (std::string_view name : names("merged")) {
        if (name.size() != 41 + suffix.size() || name[20] != '-' || name.substr(41) != suffix) continue;
        auto last = version_of(name.substr(0, 20)), first = version_of(name.substr(21, 20));
        if (last && first) found.push_back({*last, *first, kind});
    }
    std::sort(found.begin(), found.end(), [](auto& a, auto& b) {
        return a.last != b.last ? a.last > b.last : a.first < b.first;
    });
    return found;
}

std::string Directory::entry_path(int64_t version) const { return path_ + "/log/" + digits_of(version) + ".json"; }

bool Directory::has_entry(int64_t version) const {
    return access(entry_path(version).c_str(), F_OK) == 0;
}

Bytes Directory::entry_bytes(int64_t version) const { return read_file(entry_path(version), kMaxManifest); }

Manifest Directory::entry(int64_t version) const { return parse_entry(entry_bytes(version).text(), version); }

Manifest Directory::merged_entry(const MergedName& name) const {
    std::string path = path_ + "/merged/" + digits_of(name.last) + "-" + digits_of(name.first) + "-" + name_of(name.kind) + ".json";
    return parse_merged(read_file(path, kMaxManifest).text(), name.last, name.first, name.kind);
}

Bytes Directory::part(const Part& part) const { return read_file_of(path_ + "/" + part.name, part.num_bytes); }

std::optional<Link> Directory::link(int64_t version) const {
    if (!has_entry(version)) return {};
    return Link{version, xxh3_of(entry_bytes(version).text())};
}
