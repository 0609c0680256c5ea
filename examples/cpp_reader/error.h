// Errors of a stream. All others (no memory, no space for the output) are std::exception.
#pragma once

#include <stdexcept>
#include <string>

// The stream is malformed, damaged or incomplete.
struct Refused : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// An entry has a `format` that needs a newer release of the reader.
struct Newer : Refused {
    using Refused::Refused;
};

inline void require(bool condition, const std::string& reason) {
    if (!condition) throw Refused(reason);
}
