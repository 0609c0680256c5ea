"""Faults of the rules of a reader, by rule and by the family of states that finds them."""

from __future__ import annotations

from delta_tracker.stream.reading.decide import Rule
from tests.reverts.mutation import DoesNothing, Loses, Replaces, Returns
from tests.reverts.revert import Revert

_TEST = "tests/stream/reading/test_decide.py::test_a_reader_breaks_no_rule_and_comes_to_rest_at_the_newest_version"

# Within a stream, the entry that names the applied one as its parent follows.
_NEXT = {
    "two urls": [
        Revert(
            "an entry of another stream follows", Replaces("Position.leads_to", "entry.stream == self.stream", "True")
        ),
        Revert(
            "an entry of another history follows", Replaces("Position.leads_to", "entry.parent == self.link", "True")
        ),
        Revert("no entry follows", Returns("path.next_entry", "None")),
    ],
    "late claims": [
        Revert("a late claim is applied", Replaces("path.next_entry", "log.is_committed(entry)", "True")),
        Revert("no claim is applied", Replaces("path.next_entry", "log.is_committed(entry)", "False")),
    ],
    "gates": [
        Revert("a held version is passed", Replaces("decide._apply_next", "fault is None", "True")),
    ],
}

# An entry that replaces many versions leads on from the position, and bypasses no bound.
_CATCH_UP = {
    "one url": [
        Revert(
            "a catch-up bypasses a canary",
            Replaces("CatchUp._is_ahead", "self._allows(entry)", "True"),
        ),
    ],
    "gates": [
        Revert(
            "a held entry that replaces many versions is applied",
            Replaces("decide._apply_next", "view.fault_of(log, ahead) is None", "True"),
        ),
    ],
    "restored": [
        Revert("a catch-up to a snapshot leaves the history", Replaces("decide._skips_to", "_is_forward(...)", "True")),
        Revert(
            "a catch-up with a merged delta leaves the history",
            Replaces("CatchUp._is_ahead", "is_next(entry, position)", "True"),
        ),
    ],
    "orders": [
        Revert(
            "a catch-up comes before a pin", Replaces("decide._decide_for_log", "order is None", "view.catches_up or _")
        ),
    ],
    "two urls": [
        Revert(
            "a catch-up leads to any stream",
            Replaces("CatchUp._is_ahead", "entry.stream == position.stream", "True"),
            Replaces("decide._skips_to", "_is_forward(...)", "True"),
        ),
    ],
}

# Without usable rows, the newest snapshot comes first.
_START = {
    "one url": [
        Revert("mixed rows are continued", Replaces("decide._decide_for_log", "position.rows is Rows.MIXED", "False")),
        Revert("a start is not bounded", Replaces("decide._start_at_snapshot", "_allows(...)", "None")),
    ],
    "gates": [
        Revert("a held start is replaced by nothing", Replaces("decide._apply_newest", "found", "list(found)[:1]")),
    ],
    "two urls": [
        Revert(
            "mixed rows are replaced by those of any stream", Loses("decide._apply_newest", "_check_may_follow(...)")
        ),
    ],
    "promoted orders": [
        Revert("mixed rows follow an order of any stream", Loses("decide._start_with_order", "_check_may_follow(...)")),
    ],
}

# Around a fault: only what is newer, or of a stream that continues this one.
_RESYNC = {
    "two urls": [
        Revert("any snapshot is newer", Returns("decide._is_forward", "True")),
        Revert("an older generation is newer", Returns("Position.precedes", "True")),
        Revert("the version counts first", Returns("Position.precedes", "entry.version > self.link.version")),
        Revert("a snapshot of any stream is newer", Loses("decide._is_forward", "_check_may_follow(...)")),
    ],
    "gates": [
        Revert("a held version blocks newer snapshots", Replaces("decide._apply_instead", "takewhile(...)", "()")),
    ],
    "restored": [
        Revert("a restored copy is not newer without its claims", Returns("path._is_restored", "False")),
        Revert("each entry of another copy is newer", Returns("path._is_restored", "True")),
        Revert(
            "an entry of another copy is newer at any time",
            Replaces("path._is_restored", "position.is_long_before(entry)", "True"),
        ),
        Revert("a copy with another entry of the version is newer", Returns("path.has_other_entry", "False")),
        Revert("no entry is long after another", Returns("Position.is_long_before", "False")),
        Revert(
            "the difference of two clocks is a long time",
            Replaces("Position.is_long_before", "self.created + SKEW_SECONDS", "self.created"),
        ),
        Revert(
            "an hour is within the difference of two clocks",
            Replaces("Position.is_long_before", "self.created + SKEW_SECONDS", "self.created + 2 * 3600"),
        ),
    ],
}

# A pin leads exactly to its version.
_PIN = {
    "orders": [
        Revert("pins are ignored", Replaces("decide._order", "view.policy.follows_pins", "False")),
        Revert(
            "pins are followed although the process ignores them",
            Replaces("decide._order", "view.policy.follows_pins", "True"),
        ),
        Revert("a reader stays above a pin", Replaces("decide._follow_order", "_apply_order(...)", "stay")),
        Revert(
            "the path to a pin begins after its snapshot",
            Replaces("reading.path._path", "path[::-1]", "path[::-1][1:] or path"),
        ),
        Revert("the path to a pin lacks its end", Replaces("reading.path._path", "path[::-1]", "path[:0:-1] or path")),
        Revert("a rollback leads nowhere", Replaces("decide._follow_order", "_apply_rollback(...)", "stay")),
    ],
}

# Below a release, the reader continues from a snapshot at or above it.
_RELEASE = {
    "orders": [
        Revert(
            "a reader below a release goes on",
            Replaces("Order.is_followed_by", "position.version >= self.version", "True"),
        ),
        Revert(
            "a reader at a release jumps", Replaces("Order.is_followed_by", "position.version >= self.version", "False")
        ),
        Revert(
            "a release leads to an older snapshot",
            Replaces("decide._released_snapshots", "snapshot.link.version <= _", "False"),
        ),
        Revert("a reader waits at a release for ever", Replaces("decide._apply_order", "_apply_first(...)", "None")),
        Revert(
            "a reader starts below a release",
            Replaces("decide._start_with_order", "_apply_order(...)", "_start_at_snapshot(log, view)"),
        ),
        Revert(
            "a reader starts at the newest snapshot whatever is released",
            Replaces("decide._start_with_order", "order is None", "True"),
        ),
    ],
}

# Another stream is followed only if a claim proves that it continues the position's.
_SUCCESSION = {
    "two urls": [
        Revert("each stream is followed", DoesNothing("decide._check_may_follow")),
        Revert(
            "a stream is replaced although another url has it",
            Loses("decide._check_may_follow", "StreamReplacedError(...)"),
        ),
        Revert(
            "a stream is replaced although another url continues it",
            Replaces("lacks", "(head.stream, *other.former_streams())", "(head.stream,)"),
        ),
    ],
    "promoted orders": [
        Revert("an order of any stream is followed", Loses("decide._move_to_order", "_check_may_follow(...)")),
        Revert(
            "a stream that ended has no succession", Replaces("decide._leave_ended_stream", "_apply_first(...)", "None")
        ),
    ],
}

# A url that shows nothing newer is believed only after a look for a gap, and after one at the others.
_NEWEST = {
    "one url": [
        Revert("each version is the newest", Replaces("decide._apply_next", "entry is None", "True")),
    ],
    "far behind": [
        Revert("a deleted version is not missed", Replaces("decide._apply_next", "view.looks_for_gap", "False")),
    ],
    "two urls": [
        Revert("a better url is never found at rest", Replaces("decide._asks_others", "view.surveys", "False", nth=1)),
        Revert("the last url is asked no more", Replaces("decide._decide_for_other_logs", "others", "others[:-1]")),
        Revert(
            "a better url is found, but not used",
            Replaces("decide._decide_for_other_logs", "isinstance(found, Apply)", "False"),
        ),
    ],
}

# Nothing above the bound.
_CANARY = {
    "one url": [
        Revert(
            "the next version is not bounded",
            Replaces("decide._apply_next", "allows is not None and not allows(entry)", "False"),
        ),
        Revert("snapshots are not bounded", Replaces("path.snapshots", "allows is None or allows(each)", "True")),
        Revert("nothing is bounded", Returns("decide._allows", "None")),
    ],
    "orders": [
        Revert("a pin bypasses a canary", Replaces("decide._apply_pin", "view.policy.is_canary", "False")),
        Revert(
            "a release bypasses a canary",
            Replaces("decide._released_snapshots", "not view.policy.is_canary or log.allows(entry)", "True"),
        ),
        Revert(
            "a canary that waits for an order says that there is no snapshot",
            Replaces("decide._start_with_order", "view.position is None", "True", nth=1),
        ),
    ],
    "promoted orders": [
        Revert(
            "a canary searches for ever",
            Replaces("decide._follow_until_pin", "position.stream != order.stream", "False"),
        ),
    ],
}

# The newest order counts until it is followed with whole rows, or released.
_PINNED = {
    "orders": [
        Revert("an older pin ends an own rollback", Returns("decide._ends", "True")),
        Revert("a newer pin does not end an own rollback", Returns("decide._ends", "False")),
        Revert(
            "a pin that was released for this process applies",
            Replaces("OrderPolicy.has_released", "order.counter <= _", "False"),
        ),
        Revert("a position is at each pin", Returns("Order.is_followed_by", "True")),
        Revert(
            "interrupted rows are at the pin",
            Replaces("Order.is_followed_by", "is_there and position.rows is Rows.WHOLE", "is_there"),
        ),
    ],
    "promoted orders": [
        Revert(
            "an outage at a pin is not reported",
            Replaces("decide._follow_order", "is_there and not view.looks_for_gap", "is_there"),
        ),
    ],
}

# The stream of an order is not continued once another one has followed it.
_ENDED = {
    "promoted orders": [
        Revert("the end of a pinned stream is not seen", Returns("decide._has_ended", "False")),
        Revert("each pinned stream has ended", Returns("decide._has_ended", "head is not None")),
        Revert(
            "a pin of a stream that ended is still followed",
            Replaces("decide._follow_order", "_leave_ended_stream(...)", "_apply_order(log, view, order)"),
        ),
        Revert("a stream that ended is left for any", Loses("decide._leave_ended_stream", "_check_may_follow(...)")),
        Revert(
            "a pinned stream ends only before the pin",
            Replaces("decide._follow_order", "_has_ended(...)", "not is_there and _has_ended(log, order)"),
        ),
    ],
}

# A fault that a cache can cause is doubted before anything is done or said because of it.
_CACHE = {
    "one url": [
        Revert("no fault is doubted", Replaces("decide._decide_for_log", "log.may_be_stale", "False")),
        Revert("a url without a cache is doubted", Replaces("decide._decide_for_log", "log.may_be_stale", "True")),
        Revert(
            "a missing version behind a cache is not doubted",
            Replaces("decide._decide_for_log", "CACHE_FAULTS", "MalformedError"),
        ),
        Revert(
            "an altered object behind a cache is not doubted",
            Replaces("decide._decide_for_log", "CACHE_FAULTS", "(MissingVersionError, StreamReplacedError)"),
        ),
    ],
}

# A fault of one url is overcome by another, but no fault of an entry is forgotten.
_FAULT = {
    "damaged urls": [
        Revert("no other url is asked", Replaces("decide.next_reader_action", "len(view.logs) == 1 or _", "True")),
        Revert(
            "other urls are asked only in a survey",
            Replaces("decide._asks_others", "isinstance(error, _)", "False", nth=2),
        ),
        Revert("an unreadable url is never left", Replaces("decide._asks_others", "view.num_failures >= _", "False")),
        Revert("a fault of one url is one of all", Replaces("Fault.concerns", "number != self.number", "False")),
    ],
    "gates": [
        Revert("a held version is tried again at once", Returns("View.fault_of", "None")),
    ],
}

RULES = {
    Rule.NEXT: _NEXT,
    Rule.CATCH_UP: _CATCH_UP,
    Rule.START: _START,
    Rule.RESYNC: _RESYNC,
    Rule.PIN: _PIN,
    Rule.RELEASE: _RELEASE,
    Rule.SUCCESSION: _SUCCESSION,
    Rule.NEWEST: _NEWEST,
    Rule.CANARY: _CANARY,
    Rule.PINNED: _PINNED,
    Rule.ENDED: _ENDED,
    Rule.CACHE: _CACHE,
    Rule.FAULT: _FAULT,
}
"""Rule to the faults of it."""

REVERTS: dict[str, list[Revert]] = {}
for _families in RULES.values():
    for _family, _reverts in _families.items():
        REVERTS.setdefault(f"{_TEST}[{_family}]", []).extend(_reverts)
