"""Faults of the rules of a reader, by the family of states that finds them."""

from __future__ import annotations

from tests.reverts.mutation import DoesNothing, Loses, Replaces, Returns
from tests.reverts.revert import Revert

_TEST = "tests/stream/reading/test_decide.py::test_a_reader_breaks_no_rule_and_comes_to_rest_at_the_newest_version"

# Newer: within a stream by generation and version, never to what may be another history.
_NEWER = {
    "two urls": [
        Revert("any snapshot is newer", Returns("decide._is_forward", "True")),
        Revert("an older generation is newer", Returns("Position.precedes", "True")),
        Revert("the version counts first", Returns("Position.precedes", "entry.version > self.version")),
        Revert("an unknown generation is the lowest", Returns("decide._generation", "0")),
        Revert(
            "an entry of another stream follows", Replaces("Position.leads_to", "entry.stream == self.stream", "True")
        ),
    ],
}

# Succession: another stream is followed only if a claim proves that it continues the position's.
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
        Revert("mixed rows are replaced by those of any stream", Loses("decide._newest", "_check_may_follow(...)")),
        Revert(
            "a snapshot of any stream is newer",
            Loses("decide._is_forward", "_check_may_follow(...)"),
        ),
    ],
    "promoted orders": [
        Revert("mixed rows follow an order of any stream", Loses("decide._begin", "_check_may_follow(...)")),
        Revert("an order of any stream is followed", Loses("decide._joins", "_check_may_follow(...)")),
        Revert("the end of a pinned stream is not seen", Returns("decide._has_ended", "False")),
    ],
}

# Orders: the newest one leads exactly to its version, and bypasses nothing else.
_ORDERS = {
    "orders": [
        Revert("pins are ignored", Replaces("decide._order", "view.policy.follows_pins", "False")),
        Revert(
            "pins are followed although the process ignores them",
            Replaces("decide._order", "view.policy.follows_pins", "True"),
        ),
        Revert("an older pin ends an own rollback", Returns("decide._ends", "True")),
        Revert("a newer pin does not end an own rollback", Returns("decide._ends", "False")),
        Revert(
            "a pin that was released for this process applies",
            Replaces("decide._order", "newest.counter <= _", "False"),
        ),
        Revert(
            "a reader stays above a pin",
            Replaces("decide._ordered", "_to_order(...)", "stay"),
        ),
        Revert("a position is at each pin", Returns("Order.is_followed_by", "True")),
        Revert(
            "interrupted rows are at the pin",
            Replaces("Order.is_followed_by", "is_there and position.rows is Rows.WHOLE", "is_there"),
        ),
        Revert(
            "the path to a pin begins after its snapshot",
            Replaces("reading.path._path", "path[::-1]", "path[::-1][1:] or path"),
        ),
        Revert("the path to a pin lacks its end", Replaces("reading.path._path", "path[::-1]", "path[:0:-1] or path")),
    ],
}

# Releases: below one, the reader continues from a snapshot at or above it.
_RELEASES = {
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
        Revert("a reader waits at a release for ever", Returns("decide._to_release", "None")),
        Revert(
            "a release bypasses a canary",
            Replaces("decide._released_snapshots", "not view.policy.is_canary or log.allows(entry)", "True"),
        ),
        Revert("a reader starts below a release", Replaces("decide._begin", "_to_order(...)", "_start(log, view)")),
        Revert(
            "a reader starts at the newest snapshot whatever is released",
            Replaces("decide._begin", "order is None", "True"),
        ),
    ],
}

# Canary: nothing above the bound.
_CANARY = {
    "one url": [
        Revert(
            "the next version is not bounded",
            Replaces("decide._forward", "allows is not None and not allows(entry)", "False"),
        ),
        Revert("snapshots are not bounded", Returns("path._allowed_snapshots", "_snapshots(log)")),
        Revert("a start is not bounded", Replaces("decide._start", "_allows(...)", "None")),
        Revert("nothing is bounded", Returns("decide._allows", "None")),
        Revert(
            "snapshots are not bounded once the store fails",
            Replaces("path.snapshots", "allows is None or allows(each)", "True"),
        ),
    ],
    "orders": [
        Revert("a pin bypasses a canary", Replaces("decide._to_pin", "view.policy.is_canary", "False")),
    ],
    "promoted orders": [
        Revert("a canary searches for ever", Replaces("decide._towards", "position.stream != order.stream", "False")),
    ],
}

# Gate: the rows of a held version are never applied, whatever contains them.
_GATE = {
    "gates": [
        Revert(
            "a merged delta contains a held version",
            Replaces("decide._around", "StreamReplacedError | HeldVersionError", "StreamReplacedError"),
        ),
        Revert("a merged snapshot contains a held version", Loses("decide._around", "newer", nth=2)),
        Revert("a held version is tried again at once", Returns("View.fault_of", "None")),
        Revert("a held version blocks newer snapshots", Replaces("decide._around", "takewhile(...)", "()")),
        Revert("a held start is replaced by nothing", Replaces("decide._newest", "found", "list(found)[:1]")),
        Revert("a held version is passed", Replaces("decide._forward", "fault is None", "True")),
    ],
}

# Rows: a delta follows only on whole rows, or on those of the same history.
_ROWS = {
    "one url": [
        Revert("mixed rows are continued", Replaces("decide._at", "position.rows is Rows.MIXED", "False")),
    ],
}

# Faults: a fault is overcome by what leads around it, with patience for stores.
_FAULTS = {
    "late claims": [
        Revert("a late claim is applied", Replaces("path.next_entry", "log.is_committed(entry)", "True")),
        Revert("no claim is applied", Replaces("path.next_entry", "log.is_committed(entry)", "False")),
    ],
}

# Other urls: each fault of one is overcome by another, and a better one is found at rest.
_URLS = {
    "damaged urls": [
        Revert("no other url is asked", Replaces("decide.decide", "len(view.logs) == 1 or _", "True")),
        Revert(
            "other urls are asked only in a survey",
            Replaces("decide._asks_others", "isinstance(error, _)", "False", nth=3),
        ),
        Revert("an unreadable url is never left", Replaces("decide._asks_others", "view.num_failures >= _", "False")),
        Revert("a fault of one url is one of all", Replaces("Fault.concerns", "number == self.number", "True")),
    ],
    "two urls": [
        Revert("a better url is never found at rest", Replaces("decide._asks_others", "view.surveys", "False")),
        Revert("the last url is asked no more", Replaces("decide._elsewhere", "others", "others[:-1]")),
    ],
}

REVERTS: dict[str, list[Revert]] = {}
for _rule in (_NEWER, _SUCCESSION, _ORDERS, _RELEASES, _CANARY, _GATE, _ROWS, _FAULTS, _URLS):
    for _family, _reverts in _rule.items():
        REVERTS.setdefault(f"{_TEST}[{_family}]", []).extend(_reverts)
