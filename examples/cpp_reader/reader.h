// Reading: from a snapshot to a version, and on to each later one.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "directory.h"
#include "state.h"

class Reader {
  public:
    explicit Reader(Directory directory) : directory_(std::move(directory)) {}

    // Read the state after a version; the newest if there is none. Throws Refused or Newer.
    void read(std::optional<int64_t> version);

    // Apply one newer version, or one that covers several; return false if there is none. An exception changes nothing.
    bool advance();

    const State& state() const { return state_; }

  private:
    State state_at(int64_t version, const std::function<bool(const Link&)>& is_wanted, bool is_complete) const;
    void step(State& state, int64_t target, int64_t head) const;
    void check_next(const State& state, const Manifest& manifest) const;
    void check_claim(const Manifest& claim, int64_t head) const;

    Directory directory_;
    State state_;
};
