// Safetensors files: the header of a file, and a writer.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "directory.h"

struct TensorSpan {
    std::string dtype;
    std::vector<int64_t> shape;
    size_t begin, end;  // bytes of the file
};

// Read and check the header: the tensors fill the file without gaps, and each has the bytes of its dtype and shape.
std::map<std::string, TensorSpan> read_header(const Bytes& file, const std::string& what);

// A tensor to write, whose bytes are elsewhere.
struct OutputTensor {
    std::string dtype;
    std::vector<int64_t> shape;
    const uint8_t* data;
    size_t num_bytes;
};

// Write a file under a temporary name, and rename it.
void write_file(const std::string& path, const std::map<std::string, OutputTensor>& tensors);
