// Rectangles of rows and columns.
#pragma once

#include <vector>

#include "numbers.h"

struct Rectangle {
    Range rows, columns;
};

// Return whether no two rectangles have a cell in common.
bool are_disjoint(const std::vector<Rectangle>& rectangles);

// Return whether disjoint rectangles inside a table are as large as the table together, so that they cover it.
bool do_cover(const std::vector<Rectangle>& rectangles, int64_t num_rows, int64_t dim);
