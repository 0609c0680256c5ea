#include "reader.h"

#include <algorithm>
#include <vector>

#include "error.h"
#include "fault.h"

namespace {

// The errors of several ways to a version: that a newer release is needed says more than any other.
class Errors {
  public:
    void add(const Newer& error) { newer_ = newer_ ? newer_ : error; }
    void add(const Refused& error) { refused_ = refused_ ? refused_ : error; }

    [[noreturn]] void raise() const {
        if (newer_) throw *newer_;
        throw refused_ ? *refused_ : Refused("there is no snapshot to start from");
    }

  private:
    std::optional<Newer> newer_;
    std::optional<Refused> refused_;
};

// Call a function; return whether it did not refuse.
bool attempt(Errors& errors, const std::function<void()>& function) {
    try {
        function();
        return true;
    } catch (const Newer& error) {
        errors.add(error);
    } catch (const Refused& error) {
        errors.add(error);
    }
    return false;
}

}  // namespace

void Reader::read(std::optional<int64_t> version) {
    std::vector<int64_t> versions = directory_.versions();
    if (versions.empty()) throw Refused("the stream is empty");
    int64_t target = version.value_or(versions.back());
    if (target > versions.back()) throw Refused("the stream ends with version " + std::to_string(versions.back()));
    state_ = state_at(target, [](const Link&) { return true; }, true);
}

// Return the state after the newest wanted snapshot up to `version`, or, if it has to be complete, after `version`. An
// older snapshot is tried if the way from a newer one is damaged: a merged delta may pass the damage.
State Reader::state_at(int64_t version, const std::function<bool(const Link&)>& is_wanted, bool is_complete) const {
    std::vector<int64_t> versions = directory_.versions();
    std::vector<MergedName> merged = directory_.merged(Kind::Snapshot);
    Errors errors;
    State state;
    auto start = [&](const std::function<Manifest()>& read) {
        attempt(errors, [&] {
            Manifest snapshot = read();
            if (snapshot.kind != Kind::Snapshot || !is_wanted(snapshot.link())) return;
            if (snapshot.merges) {
                auto link = directory_.link(snapshot.version);
                if (link && *link != *snapshot.merges) throw Refused("a merged snapshot of another history");
            }
            State fresh;
            fresh.apply(directory_, snapshot);
            while (is_complete && fresh.link().version < version) step(fresh, version, versions.back());
            state = std::move(fresh);
        });
        return !state.is_empty();
    };
    auto next = merged.begin();
    for (auto each = versions.rbegin(); each != versions.rend(); each++) {
        for (; next != merged.end() && next->last >= *each; next++) {
            // one of the same version as an entry of the log has the same rows
            if (next->last <= version && start([&] { return directory_.merged_entry(*next); })) return state;
        }
        if (*each <= version && start([&] { return directory_.entry(*each); })) return state;
    }
    for (; next != merged.end(); next++) {
        if (next->last <= version && start([&] { return directory_.merged_entry(*next); })) return state;
    }
    errors.raise();
}

// Apply the next version, or the merged delta that leads farthest, up to `target`.
void Reader::step(State& state, int64_t target, int64_t head) const {
    int64_t version = state.link().version;
    Errors ignored;  // what a merged entry has is in the log, too
    for (auto& name : directory_.merged(Kind::Delta)) {
        if (name.last > target || name.last <= version || name.first > version + 1) continue;
        bool is_applied = attempt(ignored, [&] {
            Manifest manifest = directory_.merged_entry(name);
            check_next(state, manifest);
            state.apply(directory_, manifest);
        });
        if (is_applied) return;
    }
    Manifest manifest = directory_.entry(version + 1);
    check_next(state, manifest);
    if (manifest.kind == Kind::Claim) check_claim(manifest, head);
    state.apply(directory_, manifest);
}

void Reader::check_next(const State& state, const Manifest& manifest) const {
    std::string what = "version " + std::to_string(manifest.version);
    if (manifest.stream != state.stream()) throw Refused(what + " is of another stream");
    if (manifest.generation < state.generation() && !has_fault(3)) throw Refused(what + " has a lower generation");
    if (!manifest.merges) {
        if (manifest.parent != state.link()) throw Refused(what + " has another parent: the log has another history");
        return;
    }
    if (has_fault(8)) return;
    // a merged delta may begin before the reader's version; the log then has its parent, or retention deleted it
    bool is_next = manifest.parent && manifest.parent->version == state.link().version;
    auto before = is_next || !manifest.parent ? std::optional(state.link()) : directory_.link(manifest.parent->version);
    auto last = directory_.link(manifest.version);
    if ((manifest.parent && before && *manifest.parent != *before) || (last && *last != *manifest.merges)) {
        throw Refused(what + " is merged from another history");
    }
}

// A publisher that was fenced may create a claim late, below the head: the log went on elsewhere.
void Reader::check_claim(const Manifest& claim, int64_t head) const {
    if (head == claim.version || has_fault(10)) return;
    if (!directory_.has_entry(claim.version + 1) ||
        parent_of(directory_.entry_bytes(claim.version + 1).text()) != claim.link()) {
        throw Refused("version " + std::to_string(claim.version) + " is a late claim: the log has another history");
    }
}

bool Reader::advance() {
    std::vector<int64_t> versions = directory_.versions();
    if (versions.empty()) throw Refused("the stream is empty");
    int64_t head = versions.back(), version = state_.link().version;
    auto link = directory_.link(version);
    bool is_other_history = head < version || (link && *link != state_.link());
    Errors errors;
    if (!is_other_history) {
        if (head == version) return false;
        if (attempt(errors, [&] { step(state_, head, head); })) return true;
    }
    auto is_wanted = [&](const Link& snapshot) { return is_other_history || snapshot.version > version; };
    if (attempt(errors, [&] { state_ = state_at(head, is_wanted, false); })) return true;
    errors.raise();
}
