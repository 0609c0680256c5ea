"""Cases of the log: retention, merged entries, claims, forks, and objects that are missing, foreign or unknown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tests.conformance.case import Case, Outcome, Run, Trial
from tests.conformance.maker import Maker, Part, owned_maker, plain_maker, table
from tests.conformance.stream import Stream, entry_name, merged_name, to_bytes

_OTHER = "6" * 32
_PART = {"name": "parts/x.safetensors", "num_bytes": 1, "xxh3": "0" * 32, "blocks": [], "dense": []}
_GAPS = "Below the newest snapshot, entries may be missing, and the parts of an entry may be missing"
_START = "Start at the newest snapshot: the head's `snapshot`, or a newer merged one whose `last` is not above the head"
_NEXT = "Then apply each next entry, or a merged delta that begins at or before the next version"
_MERGED = "A **merged entry** adds no information"
_CHAIN = "The reader MUST check that `stream` is the same, that `generation` has not decreased, and that `parent`"
_CLAIM = "`claim` (without tables, dense, parts and merges)"
_LATE = "A claim may be created late at any name that once followed a head"
_IGNORED = "Readers MUST ignore every other object"
_LOST = "although this entry may be missing"
_FORK = "A claim MAY have the field `forked_from`"
_CONTROL = "The state of a stream does not depend on the objects of this section"
_MIRROR = "A merged snapshot may take the place of this first snapshot"


def _long() -> Maker:
    """Two publishers: 0 claim, 1 snapshot, 2 and 3 deltas, 4 claim, 5 snapshot, 6 and 7, 8 snapshot, 9 and 10."""
    maker = plain_maker()
    maker.claim()
    for number in (5, 8):
        maker.snapshot()
        maker.delta(maker.block("t", [number]), maker.block("u", [number, 400 + number], form="gaps"))
        maker.delta(maker.block("t", [number, 9], columns=(1, 3)))
    return maker


def _merged(kind: str, after: int | None, last: int, maker: Callable[[], Maker] = _long, **changes: Any) -> Maker:
    """Add a merged entry to a stream, and return its maker."""
    found = maker()
    found.merge(kind, after, last, **changes)
    return found


def _forged(kind: str, after: int | None, last: int, **changes: Any) -> Maker:
    """Add a merged entry with other values than those of the log, which no reader may apply."""
    maker = _long()
    name = maker.merge(kind, after, last, **changes)
    entry = maker.stream.entry(name)
    blocks = [maker.block(fqn, None if kind == "snapshot" else [1]) for fqn in maker.tables]
    entry["parts"], entry["dense"] = [maker.put(Part(blocks), last)], {}
    maker.stream.put_entry(name, entry)
    return maker


def _trial(
    make: Callable[[], Maker],
    change: Callable[[Stream], object] = lambda _: None,
    outcome: Outcome = Outcome.RIGHT,
    *,
    state: int | None = None,
    version: int | None = None,
) -> Trial:
    """Return a trial of a changed stream, which must give the state of a version before the change."""
    stream = make().stream
    found = state or version or max(each for each in stream.versions if stream.entry(each)["kind"] != "claim")
    expected = stream.expected(found) if outcome in (Outcome.RIGHT, Outcome.RIGHT_OR_REFUSED) else {}
    dense = stream.dense_names
    change(stream)
    return Trial(stream, outcome, expected, dense, version)


def _without_entries(*versions: int) -> Callable[[Stream], None]:
    return lambda stream: stream.remove(*map(entry_name, versions))


def _without_parts(*versions: int) -> Callable[[Stream], None]:
    return lambda stream: stream.remove(*(f"parts/{version:020d}" for version in versions))


def _both(*changes: Callable[[Stream], object]) -> Callable[[Stream], None]:
    def change(stream: Stream) -> None:
        for each in changes:
            each(stream)

    return change


# Changes of the stream of _long() after which its newest version, 10, can be read.
_RETENTION: dict[str, Callable[[Stream], None]] = {
    "entries below the newest snapshot": _without_entries(0, 1, 2, 3, 4, 5, 6, 7),
    "entries, but not claims and those before them": _both(_without_entries(1, 2, 5, 6), _without_parts(1, 2, 3, 5, 6)),
    "parts below the newest snapshot": _without_parts(1, 2, 3, 5, 6, 7),
    "some entries": _without_entries(1, 3, 6),
    "the entry before the newest snapshot": _without_entries(7),
}

_MISSING: dict[str, tuple[str, Callable[[Stream], None]]] = {
    "the newest snapshot": (_START, _without_entries(8)),
    "an entry above the newest snapshot": (_NEXT, _without_entries(9)),
    "the parts of the newest snapshot": ("the parts of an entry exist", _without_parts(8)),
    "the parts of an entry above it": ("the parts of an entry exist", _without_parts(9)),
    "the parts of the newest entry": ("the parts of an entry exist", _without_parts(10)),
    "all parts": ("the parts of an entry exist", lambda stream: stream.remove("parts/")),
    "all entries": (_START, lambda stream: stream.remove("log/")),
    "all entries but a claim": (_START, _without_entries(*range(4), *range(5, 11))),
    "everything": (_START, lambda stream: stream.remove("")),
}

_UNKNOWN = {
    **{
        f"log/{name}": b"{"
        for name in (
            "x.json", "11.json", "0000000000000000011.json", "000000000000000000011.json", "00000000000000000011",
            "00000000000000000011.json.tmp", "00000000000000000011.jsn", "-0000000000000000011.json",
            "+0000000000000000011.json", " 0000000000000000011.json", "0000000000000000001a.json",
            "x/00000000000000000011.json",
        )
    },
    "merged/x.json": b"{",
    "merged/10-0-snapshot.json": b"{",
    "merged/00000000000000000010-00000000000000000000-claim.json": b"{",
    "merged/00000000000000000010-00000000000000000000-snapshot.json.tmp": b"{",
    "parts/x": b"",
    "parts/x.safetensors": b"x",
    "drafts/0123456789abcdef": b"{",
    "drafts/00000000000000000011.json": b"{",
    "probe/00000000000000000000000000000000": b"",
    "predictors/a.json": b"{",
    "publishers/00000000000000000002.json": b"\xff",
    "README": b"x",
    "x/log/00000000000000000011.json": b"{",
}  # fmt: skip


def _with_pointer(**changes: Any) -> Callable[[Stream], None]:
    """Return a change that adds a pointer, which is a hint."""

    def change(stream: Stream) -> None:
        found = {"stream": "5" * 32, "generation": 2, "version": 9, "oldest": 0, "merged": [], "time": 0.0}
        found |= {"xxh3": stream.link(9)["xxh3"], "snapshot": {"version": 8, "merged": False}}
        stream.objects["control/head.json"] = to_bytes(found | changes)

    return change


_CONTROLS: dict[str, Callable[[Stream], None]] = {
    "an old pointer": _with_pointer(version=3, snapshot={"version": 1, "merged": False}),
    "a pointer to another stream": _with_pointer(stream=_OTHER),
    "a pointer to a version that does not exist": _with_pointer(version=99, snapshot={"version": 98, "merged": False}),
    "a pointer to a version far away": _with_pointer(version=2**62, oldest=2**62, snapshot=None),
    "a pointer with an oldest version that is too high": _with_pointer(oldest=9),
    "a pointer with versions below its oldest one": _with_pointer(oldest=9, older=[0, 1, 4]),
    "a pointer with merged snapshots that do not exist": _with_pointer(snapshots=[2, 5]),
    "a page instead of the pointer": lambda stream: stream.objects.update({"control/head.json": b"<html>"}),
    "a malformed pointer": lambda stream: stream.objects.update({"control/head.json": b"{"}),
    "a malformed pin": lambda stream: stream.objects.update({"control/pins/00000000000000000001.json": b"{"}),
    "a malformed takeover request": lambda stream: stream.objects.update({"control/takeover.json": b"null"}),
}


def _rename(name: str, other: str) -> Callable[[Stream], None]:
    return lambda stream: stream.objects.update({other: stream.objects.pop(name)})


def _edit(name: str | int, **changes: Any) -> Callable[[Stream], None]:
    return lambda stream: stream.edit(name, lambda entry: entry.update(changes))


def _merged_cases() -> Iterator[Case]:
    snapshot, delta = partial(_merged, "snapshot", None, 9), partial(_merged, "delta", 8, 10)
    for text, rule, make, change in (
        ("a merged snapshot", _START, snapshot, lambda _: None),
        (
            "a merged snapshot after retention",
            _START,
            snapshot,
            _both(_without_entries(*range(9)), _without_parts(*range(9))),
        ),
        ("a merged snapshot in the place of its last version", _MIRROR, snapshot, _without_entries(*range(10))),
        ("a merged snapshot at the head", _START, partial(_merged, "snapshot", None, 10), _without_entries(*range(9))),
        (
            "a merged snapshot from a version on",
            _START,
            partial(_merged, "snapshot", 3, 9),
            _without_entries(*range(9)),
        ),
        ("an older merged snapshot", _START, partial(_merged, "snapshot", None, 7), lambda _: None),
        ("an older merged snapshot without parts", _START, partial(_merged, "snapshot", None, 7), _without_parts(7)),
        ("a merged delta", _MERGED, delta, lambda _: None),
        ("a merged delta up to the version before the head", _MERGED, partial(_merged, "delta", 8, 9), lambda _: None),
        ("a merged delta that begins before the snapshot", _NEXT, partial(_merged, "delta", 6, 10), lambda _: None),
        ("a merged snapshot and a merged delta", _NEXT, partial(_merged, "delta", 9, 10, snapshot), lambda _: None),
        (
            "a merged snapshot of format 2",
            _START,
            partial(_merged, "snapshot", None, 3, owned_maker),
            _without_entries(0, 1, 2),
        ),
        ("a merged delta of format 2", _MERGED, partial(_merged, "delta", 1, 3, owned_maker), lambda _: None),
    ):
        yield Run(f"log {text}", rule, partial(_trial, make, change))
    for text, make in (
        ("a merged snapshot above the head", partial(_forged, "snapshot", None, 10)),
        ("a merged delta above the head", partial(_forged, "delta", 8, 10)),
    ):
        trial = partial(_trial, make, _without_entries(10), state=9)
        yield Run(f"log {text}", _START, trial)
    for text, make in (
        ("a merged snapshot of another stream", partial(_forged, "snapshot", None, 9, stream=_OTHER)),
        ("a merged delta of another stream", partial(_forged, "delta", 8, 10, stream=_OTHER)),
        (
            "a merged delta after another entry",
            partial(_forged, "delta", 8, 10, parent={"version": 8, "xxh3": "0" * 32}),
        ),
        (
            "a merged snapshot of another last entry",
            partial(_forged, "snapshot", None, 9, merges={"version": 9, "xxh3": "0" * 32}),
        ),
        (
            "a merged snapshot of another head",
            partial(_forged, "snapshot", None, 10, merges={"version": 10, "xxh3": "0" * 32}),
        ),
        (
            "a merged delta of another last entry",
            partial(_forged, "delta", 8, 9, merges={"version": 9, "xxh3": "0" * 32}),
        ),
        ("a merged delta of another head", partial(_forged, "delta", 8, 10, merges={"version": 10, "xxh3": "0" * 32})),
        ("a merged delta of a lower generation", partial(_forged, "delta", 8, 10, generation=1)),
    ):
        yield Run(f"log {text}", _CHAIN, partial(_trial, make, outcome=Outcome.RIGHT_OR_REFUSED))
    for kind, after, first, last in (("snapshot", None, 0, 9), ("delta", 8, 9, 10)):
        make, name = partial(_forged, kind, after, last), merged_name(last, first, kind)
        for text, change in (
            (
                "with the name of another last version",
                _rename(name, merged_name(last - 1, first, kind)),
            ),
            (
                "with the name of another first version",
                _rename(name, merged_name(last, 2, kind)),
            ),
            (
                "with the name of the other kind",
                _rename(name, merged_name(last, first, {"delta": "snapshot", "snapshot": "delta"}[kind])),
            ),
            ("that is truncated", lambda stream, name=name: stream.objects.update({name: stream.objects[name][:-1]})),
            ("without parts", lambda stream, name=name: stream.remove(stream.entry(name)["parts"][0]["name"])),
            ("with a damaged part", lambda stream, name=name: stream.put_part(name, 0, b"x", is_sealed=False)),
            ("of format 3", _edit(name, format=3)),
            ("without merges", _edit(name, merges=None)),
            ("that is a claim", _edit(name, kind="claim")),
            ("whose parent is not below it", _edit(name, parent={"version": 10, "xxh3": "0" * 32})),
        ):
            trial = partial(_trial, make, change, Outcome.RIGHT_OR_REFUSED)
            yield Run(f"log a merged {kind} {text}", _MERGED, trial)
    skipped = partial(_trial, delta, _without_entries(9), Outcome.RIGHT_OR_REFUSED)
    yield Run("log a merged delta over a missing entry", _NEXT, skipped)


def _claims() -> Iterator[Case]:
    def two() -> Maker:
        maker = _long()
        maker.claim()
        maker.claim()
        return maker

    yield Run("log two claims at the head", _CLAIM, partial(_trial, two))
    yield Run("log the version of a claim at the head", _CLAIM, partial(_trial, two, version=11, state=10))

    def late() -> Maker:
        maker = _long()
        stream = maker.stream
        claim = stream.entry(4) | {
            "version": 6,
            "generation": 3,
            "parent": stream.link(5),
            "snapshot": 5,
            "writer": "a" * 32,
        }
        stream.objects[entry_name(6)] = to_bytes(claim)
        return maker

    gap = _both(_without_entries(1, 2, 5, 7), _without_parts(*range(8)))
    yield Run("log a late claim below the newest snapshot", _LATE, partial(_trial, late, gap, state=10))

    def lost(*, has_snapshot: bool = True) -> Maker:
        """A claim after version 10, then a snapshot."""
        maker = _long()
        maker.claim()
        if has_snapshot:
            maker.snapshot()
            maker.delta(maker.block("t", [6]))
        return maker

    yield Run("log a claim after a lost entry", _LOST, partial(_trial, lost, _without_entries(10)))
    yield Run("log a claim after two lost entries", _LOST, partial(_trial, lost, _without_entries(9, 10)))
    yield Run("log a claim after the lost newest snapshot", _LOST, partial(_trial, lost, _without_entries(8, 9, 10)))
    yield Run("log a claim in an emptied log", _LOST, partial(_trial, lost, _without_entries(*range(11))))
    below = _both(_without_entries(10), _without_parts(10))
    yield Run("log the version before a lost entry", _LOST, partial(_trial, lost, below, version=9, state=9))
    alone = partial(lost, has_snapshot=False)
    refused = partial(_trial, alone, _without_entries(10), Outcome.REFUSED)
    yield Run("log a claim after a lost entry without a snapshot", _NEXT, refused)
    for text, changes in (
        ("with parts", {"parts": [_PART]}),
        ("with tables", {"tables": {"t": table(10, 4)}}),
        ("with dense tensors", {"dense": {"w": {"dtype": "F32", "shape": [1]}}}),
        ("with merges", {"merges": {"version": 11, "xxh3": "0" * 32}}),
        ("of format 2", {"format": 2, "event_time": None, "training": [], "owners": {}}),
        ("of a lower generation", {"generation": 1}),
        ("of another stream", {"stream": _OTHER}),
        ("with a snapshot above it", {"snapshot": 12}),
        ("that is forked from itself", {"forked_from": {"stream": "5" * 32}}),
        ("that is forked from a list", {"forked_from": []}),
    ):  # fmt: skip

        def bad(changes: dict[str, Any] = changes) -> Maker:
            maker = _long()
            maker.claim(**changes)
            return maker

        yield Run(f"log a claim {text}", _CLAIM, partial(_trial, bad, outcome=Outcome.REFUSED))


def _forks() -> Iterator[Case]:
    def forked(*, has_snapshot: bool = True, **changes: Any) -> Maker:
        maker = _merged("snapshot", None, 10)
        maker.fork(_OTHER, **changes)
        maker.tables = {"t": table(3, 2), "new": table(2, 2)}
        if has_snapshot:
            maker.snapshot()
            maker.delta(maker.block("t", [2]))
        return maker

    yield Run("log a fork", _FORK, partial(_trial, forked))
    yield Run(
        "log a fork without a snapshot",
        _FORK,
        partial(_trial, partial(forked, has_snapshot=False), outcome=Outcome.REFUSED, state=10),
    )
    head = _long().stream.link(10)
    for text, changes in (
        ("with a snapshot of the former stream", {"snapshot": 8}),
        ("from its own stream", {"forked_from": {"stream": _OTHER, **head}}),
        ("from another version", {"forked_from": {"stream": "5" * 32, **head, "version": 9}}),
        ("from another entry", {"forked_from": {"stream": "5" * 32, **head, "xxh3": "0" * 32}}),
        ("without the former stream", {"forked_from": head}),
    ):
        make = partial(forked, has_snapshot=False, **changes)
        yield Run(f"log a fork {text}", _FORK, partial(_trial, make, outcome=Outcome.REFUSED, state=10))


def cases() -> Iterator[Case]:
    for text, change in _RETENTION.items():
        yield Run(f"log without {text}", _GAPS, partial(_trial, _long, change))
    for text, (rule, change) in _MISSING.items():
        yield Run(f"log without {text}", rule, partial(_trial, _long, change, Outcome.REFUSED))
    for version in (1, 2, 3, 5, 6, 7, 8, 9):
        yield Run(f"log version {version}", _START, partial(_trial, _long, version=version))
        change = _without_entries(*range(version))
        outcome = Outcome.RIGHT if version in (1, 5, 8) else Outcome.REFUSED
        name = f"log version {version} without the entries below it"
        yield Run(name, _START, partial(_trial, _long, change, outcome, version=version))
    for version in (11, 99, 2**63 - 1):
        yield Run(
            f"log version {version}, which does not exist",
            _START,
            partial(_trial, _long, outcome=Outcome.REFUSED, version=version),
        )
    yield Run("log unknown objects", _IGNORED, partial(_trial, _long, lambda stream: stream.objects.update(_UNKNOWN)))
    for text, change in _CONTROLS.items():
        yield Run(f"log {text}", _CONTROL, partial(_trial, _long, change))
    for text, change in (
        ("whose generation is lower", _edit(10, generation=1)),
        ("between entries whose generation is higher", _edit(9, generation=3)),
        ("after an entry of another stream", _edit(9, stream=_OTHER)),
        (
            "after another entry",
            lambda stream: stream.objects.update({entry_name(9): stream.objects[entry_name(9)] + b" "}),
        ),
    ):
        yield Run(f"log an entry {text}", _CHAIN, partial(_trial, _long, change, Outcome.REFUSED))
    for text, change in (
        ("whose snapshot is a delta", _edit(10, snapshot=9)),
        ("whose snapshot is missing", _edit(10, snapshot=4)),
    ):
        yield Run(f"log an entry {text}", _START, partial(_trial, _long, change, Outcome.RIGHT_OR_REFUSED))
    yield from _merged_cases()
    yield from _claims()
    yield from _forks()
