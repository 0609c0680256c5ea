// The program: see README.md.
#include <poll.h>
#include <unistd.h>

#include <charconv>
#include <cstring>
#include <iostream>
#include <optional>
#include <string>

#include "error.h"
#include "reader.h"

namespace {

constexpr int kPollMilliseconds = 50;

enum Status { kWritten = 0, kFailed = 1, kRefused = 2, kNewer = 3 };

struct Arguments {
    std::string directory, output, ids;
    std::optional<int64_t> version;
    bool is_following = false;
};

std::optional<Arguments> parse(int count, char** words) {
    Arguments arguments;
    for (int i = 1; i < count; i++) {
        std::string word = words[i];
        bool has_value = word == "--out" || word == "--ids" || word == "--version";
        if (has_value && ++i == count) return {};
        if (word == "--out") arguments.output = words[i];
        else if (word == "--ids") arguments.ids = words[i];
        else if (word == "--follow") arguments.is_following = true;
        else if (word == "--version") {
            const char* end = words[i] + std::strlen(words[i]);
            int64_t version = -1;
            auto result = std::from_chars(words[i], end, version);
            if (result.ec != std::errc() || result.ptr != end || version < 0) return {};
            arguments.version = version;
        } else if (word[0] == '-' || !arguments.directory.empty()) return {};
        else arguments.directory = word;
    }
    if (arguments.directory.empty() || arguments.output.empty()) return {};
    if (arguments.is_following && arguments.version) return {};
    return arguments;
}

// Wait for the next poll; return false if stdin ended.
bool wait() {
    pollfd input{STDIN_FILENO, POLLIN, 0};
    if (poll(&input, 1, kPollMilliseconds) <= 0) return true;
    char ignored[256];
    return read(STDIN_FILENO, ignored, sizeof ignored) > 0;
}

void follow(Reader& reader, const Arguments& arguments) {
    std::string complaint;  // written once, not at every poll
    auto complain = [&complaint](const char* word, const std::exception& error) {
        if (complaint == word) return;
        complaint = word;
        std::cerr << error.what() << std::endl;
        std::cout << word << std::endl;
    };
    auto write = [&] {
        reader.state().write(arguments.output, arguments.ids);
        std::cout << reader.state().link().version << std::endl;
        complaint.clear();
    };
    write();
    while (wait()) {
        try {
            while (reader.advance()) write();
        } catch (const Newer& error) {
            complain("newer", error);
        } catch (const Refused& error) {
            complain("refused", error);
        }
    }
}

}  // namespace

int main(int count, char** words) {
    auto arguments = parse(count, words);
    if (!arguments) {
        std::cerr << "usage: " << words[0] << " DIRECTORY --out FILE [--version V | --follow] [--ids FILE]\n";
        return kFailed;
    }
    try {
        Reader reader{Directory(arguments->directory)};
        reader.read(arguments->version);
        if (arguments->is_following) follow(reader, *arguments);
        else reader.state().write(arguments->output, arguments->ids);
        return kWritten;
    } catch (const Newer& error) {
        std::cerr << error.what() << "\n";
        return kNewer;
    } catch (const Refused& error) {
        std::cerr << error.what() << "\n";
        return kRefused;
    } catch (const std::exception& error) {  // no space for the output, no memory
        std::cerr << error.what() << "\n";
        return kFailed;
    }
}
