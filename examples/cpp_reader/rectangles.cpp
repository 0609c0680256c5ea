#include "rectangles.h"

#include <algorithm>
#include <map>
#include <tuple>

bool are_disjoint(const std::vector<Rectangle>& rectangles) {
    // A sweep over the rows: `active` has the columns of the rectangles at the current row, which must be disjoint.
    // It takes O(n log n), so a manifest of many blocks does not make it slow.
    std::vector<std::tuple<int64_t, bool, const Rectangle*>> events;  // an end comes before a beginning at its row
    for (auto& each : rectangles) {
        if (each.rows.length() == 0) continue;
        events.emplace_back(each.rows.first, true, &each);
        events.emplace_back(each.rows.end, false, &each);
    }
    std::sort(events.begin(), events.end());
    std::map<int64_t, int64_t> active;  // first column to end
    for (auto& [row, is_beginning, each] : events) {
        if (!is_beginning) {
            active.erase(each->columns.first);
            continue;
        }
        auto next = active.lower_bound(each->columns.first);
        if (next != active.end() && next->first < each->columns.end) return false;
        if (next != active.begin() && std::prev(next)->second > each->columns.first) return false;
        active.emplace(each->columns.first, each->columns.end);
    }
    return true;
}

bool do_cover(const std::vector<Rectangle>& rectangles, int64_t num_rows, int64_t dim) {
    __int128 area = 0;
    for (auto& each : rectangles) area += static_cast<__int128>(each.rows.length()) * each.columns.length();
    return area == static_cast<__int128>(num_rows) * dim;
}
