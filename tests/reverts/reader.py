"""Faults of the rules of a reader, by the family of states that finds them."""

from __future__ import annotations

from tests.reverts.mutation import DoesNothing, Loses, Replaces, Returns
from tests.reverts.revert import Revert

_TEST = "tests/stream/reading/test_decide.py::test_a_reader_breaks_no_rule_and_comes_to_rest_at_the_newest_version"

# Newer: within a stream by generation and version, never to what may be another history.
_NEWER = {
    "two urls": [
        Revert("any snapshot is newer", Returns("decide._is_forward", "True")),
        Revert(
            "an older snapshot of the same history is newer",
            Replaces("decide._is_forward", "snapshot.version > _", "True"),
        ),
        Revert("an older generation is newer", Returns("Position.precedes", "True")),
        Revert("the version counts first", Returns("Position.precedes", "entry.version > self.version")),
        Revert(
            "a higher generation is followed although a url has the applied entry",
            Replaces("decide._is_forward", "names(...)", "False"),
        ),
        Revert("each log is the position's history", Returns("decide._is_other_copy", "False")),
        Revert(
            "a log that ends before the position is its history",
            Replaces("decide._is_other_copy", "head.version < _", "False"),
        ),
        Revert(
            "an entry in the place of the applied one is ignored",
            Replaces("decide._is_other_copy", "held is not None", "False"),
        ),
        Revert("an unknown generation is the lowest", Returns("decide._generation", "0")),
        Revert(
            "an unknown generation is that of the followed log",
            Replaces("decide._generation", "(log, *view.logs)", "(log,)"),
        ),
        Revert(
            "an entry of another history follows", Replaces("decide._next", "entry.parent == position.link", "True")
        ),
        Revert(
            "an entry of another stream follows", Replaces("decide._next", "entry.stream == position.stream", "True")
        ),
    ],
}

# Succession: another stream is followed only if a claim proves that it continues the position's.
_SUCCESSION = {
    "two urls": [
        Revert("each stream is followed", DoesNothing("decide._check_may_follow")),
        Revert("no stream is continued by another one", Returns("lineage.former_streams", "()")),
        Revert("only the last fork is known", Replaces("lineage.former_streams", "versions[:first]", "[]")),
        Revert(
            "a stream is replaced although another url has it",
            Loses("decide._check_may_follow", "StreamReplacedError(...)"),
        ),
        Revert(
            "a stream is replaced although another url continues it",
            Replaces("decide._check_may_follow", "(head.stream, *other.former_streams())", "(head.stream,)"),
        ),
        Revert("mixed rows are replaced by those of any stream", Loses("decide._newest", "_check_may_follow(...)")),
        Revert(
            "a snapshot of the next stream must have a higher version",
            Loses("decide._is_forward", "_check_may_follow(...)"),
        ),
    ],
    "promoted orders": [
        Revert("mixed rows follow an order of any stream", Loses("decide._begin", "_check_may_follow(...)")),
        Revert("an order of any stream is followed", Loses("decide._joins", "_check_may_follow(...)")),
        Revert("the end of a pinned stream is not seen", Returns("decide._has_ended", "False")),
        Revert(
            "a pinned stream is continued past the pin",
            Replaces("decide._succession", "each.stream != order.stream", "True"),
        ),
        Revert("a pinned stream never ends", Replaces("decide._pinned", "_has_ended(...)", "False")),
        Revert("a released stream never ends", Replaces("decide._released", "_has_ended(...)", "False")),
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
        Revert(
            "an older pin ends an own rollback", Replaces("decide._order", "newest.counter <= own.counter", "False")
        ),
        Revert(
            "a newer pin does not end an own rollback",
            Replaces("decide._order", "newest.counter <= own.counter", "True"),
        ),
        Revert(
            "a pin that was released for this process applies",
            Replaces("decide._order", "newest.counter <= _", "False", nth=2),
        ),
        Revert(
            "the entry of a pin is not compared",
            Replaces("decide._named", "entry.stream != order.stream", "entry is None"),
        ),
        Revert(
            "a pinned version is reached from any position",
            Replaces("decide._to_pin", "position.version < order.version", "True"),
        ),
        Revert(
            "a reader stays above a pin",
            Replaces("decide._pinned", "stay if is_there else _to_pin(log, view, order)", "stay"),
        ),
        Revert("a position is at each pin", Returns("Order.is_followed_by", "True")),
        Revert(
            "interrupted rows are at the pin",
            Replaces("Order.is_followed_by", "is_there and position.rows is Rows.WHOLE", "is_there"),
        ),
        Revert("an own rollback needs no entry", Loses("decide._to_pin", "target")),
        Revert(
            "the path to a pin begins after its snapshot",
            Replaces("path.path_to", "path[::-1]", "path[::-1][1:] or path"),
        ),
        Revert("the path to a pin lacks its end", Replaces("path.path_to", "path[::-1]", "path[:0:-1] or path")),
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
        Revert(
            "a release leads only above it",
            Replaces("decide._released_snapshots", "not view.policy.is_canary", "False"),
        ),
        Revert("a reader waits at a release for ever", Returns("decide._to_release", "None")),
        Revert(
            "a release bypasses a canary",
            Replaces("decide._released_snapshots", "not view.policy.is_canary or log.allows(entry)", "True"),
        ),
        Revert("a reader starts below a release", Replaces("decide._begin", "_to_release(...)", "_start(log, view)")),
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
        Revert(
            "merged deltas are not bounded", Replaces("path.merged_deltas", "allows is None or allows(entry)", "True")
        ),
        Revert("a start is not bounded", Replaces("decide._start", "_allows(...)", "None")),
        Revert("a resync is not bounded", Replaces("decide._around", "_allows(...)", "None")),
        Revert("nothing is bounded", Returns("decide._allows", "None")),
        Revert(
            "snapshots are not bounded once the store fails",
            Replaces("path.snapshots", "allows is None or allows(each)", "True"),
        ),
    ],
    "orders": [
        Revert("a pin bypasses a canary", Replaces("decide._to_pin", "view.policy.is_canary", "False")),
        Revert("a canary goes past a pin", Replaces("decide._towards", "position.version >= order.version", "False")),
        Revert("a canary starts past a pin", Replaces("decide._towards", "order.version", "None", nth=1)),
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
        Revert("a held version is passed", Replaces("decide._forward", "error_of_entry is None", "True")),
    ],
}

# Rows: a delta follows only on whole rows, or on those of the same history.
_ROWS = {
    "one url": [
        Revert("mixed rows are continued", Replaces("decide._at", "position.rows is Rows.MIXED", "False")),
        Revert("any merged delta is next", Returns("path.is_next", "True")),
        Revert("a merged delta that begins later is next", Replaces("path.merged_deltas", "merged.first <= _", "True")),
        Revert(
            "a snapshot elsewhere keeps the rows whole", Replaces("decide._first", "not is_same or _ or _", "False")
        ),
        Revert("a merged delta is none", DoesNothing("path.merged_deltas")),
        Revert("a gap is passed", Replaces("decide._next", "entry.parent == position.link", "True")),
    ],
}

# Faults: a fault is overcome by what leads around it, with patience for stores.
_FAULTS = {
    "one url": [
        Revert("a missing version is the end of the log", Loses("decide._next", "log.check_gap()")),
        Revert("a fault of a version is not overcome", Replaces("decide._forward", "_around(...)", "fault")),
        Revert(
            "no snapshot leads around a fault",
            Replaces("decide._around", "_first(log, view, newer, Rule.RESYNC, fault)", "None"),
        ),
        Revert("a fault of a cache is believed", Replaces("decide._forward", "log.is_doubted", "False")),
        Revert("a doubt has no end", Replaces("decide._at", "log.is_doubted", "True")),
        Revert("a reader is never patient", Returns("View.is_patient", "False")),
        Revert("a fault concerns no entry", Returns("Fault.concerns", "False")),
        Revert("a fault concerns each entry", Returns("Fault.concerns", "True")),
        Revert("an unreadable entry blocks the start", Replaces("decide._start", "view.is_patient", "True")),
        Revert("a malformed merged entry blocks the start", Loses("path._newest_snapshot", "head")),
        Revert(
            "a malformed entry hides the snapshots below",
            Replaces("path._readable_in_log", "num_unreadable < _", "not _"),
        ),
    ],
    "late claims": [
        Revert("a late claim is applied", Replaces("decide._next", "log.is_committed(entry)", "True")),
        Revert("no claim is applied", Replaces("decide._next", "log.is_committed(entry)", "False")),
    ],
}

# Other urls: each fault of one is overcome by another, and a better one is found at rest.
_URLS = {
    "damaged urls": [
        Revert("no other url is asked", Replaces("decide._decide", "not others or _", "True")),
        Revert(
            "other urls are asked only in a survey",
            Replaces("decide._asks_others", "isinstance(error, _)", "False", nth=3),
        ),
        Revert("an unreadable url is never left", Replaces("decide._asks_others", "view.num_failures >= _", "False")),
        Revert("a fault of one url is one of all", Replaces("Fault.concerns", "number == self.number", "True")),
        Revert(
            "the first other url decides", Replaces("decide._decide", "isinstance(found, Stay) and is_better", "True")
        ),
        Revert("a failed url at rest is kept", Returns("decide._has_failed", "False")),
    ],
    "two urls": [
        Revert("a better url is never found at rest", Replaces("decide._asks_others", "view.surveys", "False")),
        Revert("the last url is asked no more", Replaces("decide._decide", "others", "others[:-1]", nth=2)),
        Revert(
            "another url at rest is better than a replaced stream",
            Returns("decide._has_failed", "isinstance(decision, Fail)"),
        ),
    ],
}

REVERTS: dict[str, list[Revert]] = {}
for _rule in (_NEWER, _SUCCESSION, _ORDERS, _RELEASES, _CANARY, _GATE, _ROWS, _FAULTS, _URLS):
    for _family, _reverts in _rule.items():
        REVERTS.setdefault(f"{_TEST}[{_family}]", []).extend(_reverts)
