"""Cases of programs that follow: a stream is changed in steps, and each step has to show in the output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.conformance.case import Case, difference
from tests.conformance.golden import golden
from tests.conformance.maker import Maker, owned_maker, plain_maker
from tests.conformance.program import Following, Program
from tests.conformance.stream import (
    NO_OWNER,
    Entry,
    Stream,
    Tensor,
    Tensors,
    entry_name,
    file_of,
    to_bytes,
)

_CHAIN = "Otherwise the log has another history: start again from a snapshot"
_NEXT = "Then apply each next entry"
_CHECK = "Readers MUST NOT write anything before"
_LATE = "Also do so if the entry is a claim, a version above it exists, and the entry after it is missing"
_LOST = "although this entry may be missing"
_OTHER = "6" * 32


@dataclass(frozen=True)
class Step:
    """The stream after a step, and what the program must do.

    Attributes:
        stream: the stream.
        shows: version that the program must reach; ``refused`` or ``newer`` if it must write this line and leave the
            file unchanged; None if it may do nothing yet.
        expected: tensors of this version.
        optional: names of tensors that may also be in the file.
        skips: version that the program must not apply; -1 for none.
    """

    stream: Stream
    shows: int | str | None
    expected: Tensors = field(default_factory=dict)
    optional: frozenset[str] = frozenset()
    skips: int = -1


@dataclass(frozen=True)
class Follow:
    """A case of one run that follows; the first step is the stream at its start."""

    name: str
    rule: str
    steps: Callable[[], Sequence[Step]]
    raw_ids: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def fault(self, program: Program, root: Path) -> str:
        steps, output = self.steps(), root / "state.safetensors"
        arguments = [str(root / "stream"), "--out", str(output), "--follow"]
        if self.raw_ids:
            asked = {fqn: Tensor.of(np.array(each, "<i8"), "I64") for fqn, each in self.raw_ids.items()}
            (root / "ids.safetensors").write_bytes(file_of(asked))
            arguments += ["--ids", str(root / "ids.safetensors")]
        steps[0].stream.write(root / "stream")
        run, fault, before = program.follow(arguments), "", Stream()
        for number, step in enumerate(steps):
            if number:
                # Retention may overtake a reader at any time: the program must see the result only.
                with run.paused() if before.objects.keys() - step.stream.objects.keys() else nullcontext():
                    _change(root, before, step.stream)
            before = step.stream
            fault = _shown(run, step, output)
            if fault:
                fault = f"step {number}: {fault}"
                break
        status = run.end()
        return fault or ("" if status == 0 else f"ended with status {status} when stdin ended")


def _shown(run: Following, step: Step, output: Path) -> str:
    """Return what is wrong with the output of a step, an empty text if nothing."""
    if step.shows is None:
        return ""
    before = output.read_bytes() if output.exists() else b""
    while (line := run.line()) is not None:
        if line == str(step.shows):
            if isinstance(step.shows, int):
                return difference(output, step.expected, step.optional)
            return "" if output.read_bytes() == before else f"wrote {line}, but changed the file"
        is_on_the_way = line.isdecimal() and isinstance(step.shows, int) and step.skips != int(line) < step.shows
        if not is_on_the_way and (isinstance(step.shows, str) or line not in ("refused", "newer")):
            return f"wrote the line {line[:100]!r} instead of {step.shows}"
    return f"did not write the line {step.shows}"


def _change(root: Path, before: Stream, after: Stream) -> None:
    """Change a stream as publishers and retention do: parts, then entries, then deletions in ascending order.

    If retention overtakes the program, entries are created in descending order: it must not follow them one by one.
    """
    new = sorted(name for name, data in after.objects.items() if before.objects.get(name) != data)
    if before.objects.keys() - after.objects.keys():
        new.reverse()
    for name in sorted(new, key=lambda name: (not name.startswith("parts/"), name.startswith("log/"))):
        path, draft = root / "stream" / name, root / "draft"
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(after.objects[name])
        draft.replace(path)
    for name in sorted(before.objects.keys() - after.objects.keys()):
        (root / "stream" / name).unlink()


def _step(stream: Stream, shows: int | str | None, raw_ids: Mapping[str, Sequence[int]] | None = None) -> Step:
    """Return a step whose state is that of the stream before retention."""
    return Step(stream, shows, stream.expected(shows, raw_ids) if isinstance(shows, int) else {}, stream.dense_names)


def _one_by_one(stream: Stream, raw_ids: Mapping[str, Sequence[int]] | None = None) -> list[Step]:
    """Return a step for each entry from the first snapshot on."""
    first = next(version for version in stream.versions if stream.entry(version)["kind"] == "snapshot")
    kinds = {version: stream.entry(version)["kind"] for version in stream.versions if version >= first}
    return [
        _step(stream.truncate(version), None if kind == "claim" else version, raw_ids)
        for version, kind in kinds.items()
    ]


def _long_maker() -> Maker:
    """0 claim, 1 snapshot, 2 and 3, 4 claim, 5, 6, 7 snapshot, 8 and 9."""
    maker = plain_maker()
    maker.claim()
    for _ in range(2):
        maker.delta(maker.block("t", [2, 5]), maker.block("u", [1, 300], form="gaps"))
    maker.snapshot()
    for _ in range(2):
        maker.delta(maker.block("h", [2, 5]), maker.block("t", [7], encoding="INT8"))
    return maker


def _merged_one_by_one() -> list[Step]:
    maker = _long_maker()
    maker.merge("delta", 1, 3)
    maker.merge("snapshot", None, 6)
    maker.merge("delta", 7, 9)
    return _one_by_one(maker.stream)


def _at_once(*, is_merged: bool) -> list[Step]:
    """Twenty versions in one step."""
    maker = plain_maker()
    steps = [_step(maker.stream.copy(), 3)]
    for number in range(20):
        maker.delta(maker.block("t", [number % 10]))
    if is_merged:
        maker.merge("delta", 3, 20)
    return [*steps, _step(maker.stream, 23)]


def _overtaken(*, is_merged: bool) -> list[Step]:
    """Retention deletes the versions that the program did not apply yet."""
    maker = _long_maker()
    if is_merged:
        maker.merge("snapshot", None, 9)
        maker.delta(maker.block("t", [1]))
    newest = maker.stream.versions[-1]
    kept = _step(maker.stream.copy(), newest)
    lowest = 9 if is_merged else 7
    kept.stream.remove(*(entry_name(each) for each in range(lowest) if each not in (3, 4)))
    kept.stream.remove(*(f"parts/{each:020d}" for each in range(lowest)))
    return [_step(maker.stream.truncate(3), 3), kept]


def _late_claim(*, is_named: bool) -> list[Step]:
    """A claim that a publisher creates late, in a gap of retention right above the version of the program."""
    maker = _long_maker()
    if not is_named:
        maker.snapshot()
        maker.delta(maker.block("t", [1]))
    steps = [_step(maker.stream.truncate(5), 5), _step(maker.stream, maker.stream.versions[-1])]
    late = steps[1].stream
    claim = late.entry(4) | {"version": 6, "generation": 3, "parent": late.link(5), "writer": "a" * 32}
    late.remove(*map(entry_name, (0, 1, 2) if is_named else (0, 1, 2, 7, 8, 9)))
    late.objects[entry_name(6)] = to_bytes(claim)
    return [steps[0], replace(steps[1], skips=6)]


def _late_claim_without_snapshot() -> list[Step]:
    """A late claim right above the version of the program, below entries that no snapshot leads to."""
    maker = plain_maker()
    for row in range(4):
        maker.delta(maker.block("t", [row]))
    version = maker.stream.versions[-1] - 3
    late = maker.stream.copy()
    claim = late.entry(0) | {"version": version + 1, "generation": 3, "parent": late.link(version), "writer": "a" * 32}
    claim["snapshot"] = late.entry(version)["snapshot"]
    late.remove(*map(entry_name, [*range(1, version + 1), version + 2]))  # retention deletes in ascending order
    late.objects[entry_name(version + 1)] = to_bytes(claim)
    return [_step(maker.stream.truncate(version), version), Step(late, "refused")]


def _gap() -> list[Step]:
    """An entry that is missing, and then a snapshot."""
    maker = plain_maker()
    steps = [_step(maker.stream.copy(), 3)]
    for row in (1, 2):
        maker.delta(maker.block("t", [row]))
    steps.append(Step(maker.stream.copy(), None))
    steps[-1].stream.remove(entry_name(4))
    version = maker.snapshot()
    steps.append(_step(maker.stream, version))
    steps[-1].stream.remove(entry_name(4))
    return steps


def _lost(*, is_behind: bool) -> list[Step]:
    """The newest entry is deleted, and its publisher continues with a claim after it, and a snapshot."""
    maker = plain_maker()
    maker.delta(maker.block("t", [1]))
    lost = maker.stream.versions[-1]
    first = lost - 1 if is_behind else lost
    steps = [_step(maker.stream.truncate(first), first)]

    def show(shows: int | None) -> None:
        steps.append(_step(maker.stream.copy(), shows))
        steps[-1].stream.remove(entry_name(lost))

    maker.claim()
    show(None)
    show(maker.snapshot())
    show(maker.delta(maker.block("t", [2])))
    return steps


def _forked() -> list[Step]:
    maker = plain_maker()
    steps = [_step(maker.stream.copy(), 3)]
    maker.fork(_OTHER)
    steps.append(Step(maker.stream.copy(), None))
    version = maker.snapshot()
    steps.append(_step(maker.stream.copy(), version))
    version = maker.delta(maker.block("t", [1]))
    return [*steps, _step(maker.stream, version)]


def _late_part() -> list[Step]:
    """A part that becomes readable after its entry."""
    maker = plain_maker()
    steps = [_step(maker.stream.copy(), 3)]
    version = maker.delta(maker.block("t", [1]))
    without = maker.stream.copy()
    without.remove(f"parts/{version:020d}")
    return [*steps, Step(without, "refused"), _step(maker.stream, version)]


def _refused(make: Callable[[], Maker], change: Callable[[Stream], object], word: str = "refused") -> list[Step]:
    """A version that must be refused, a delta after it, and then a snapshot."""
    maker = make()
    steps = [_step(maker.stream.copy(), maker.stream.versions[-1])]
    maker.delta(maker.block("t", [1, 3]), *(maker.block(fqn, [1, 2]) for fqn in maker.owners))
    change(maker.stream)
    steps.append(Step(maker.stream.copy(), word))
    good = maker.snapshot()
    steps.append(_step(maker.stream.copy(), good))
    last = maker.delta(maker.block("t", [2]))
    return [*steps, _step(maker.stream, last)]


def _edit(**changes: Any) -> Callable[[Stream], None]:
    """Return a change of fields of the newest entry."""
    return _entry(lambda entry: entry.update(changes))


def _entry(change: Callable[[Entry], object]) -> Callable[[Stream], None]:
    return lambda stream: stream.edit(stream.versions[-1], change)


def _part(change: Callable[[bytes], bytes], *, is_sealed: bool = False) -> Callable[[Stream], None]:
    """Return a change of the part of the newest entry."""

    def edit(stream: Stream) -> None:
        name = stream.entry(stream.versions[-1])["parts"][0]["name"]
        stream.put_part(stream.versions[-1], 0, change(stream.objects[name]), is_sealed=is_sealed)

    return edit


def _tensors(**changes: Sequence[int]) -> Callable[[Stream], None]:
    """Return a change of int64 tensors of the newest entry's part; an underscore stands for the point."""

    def edit(stream: Stream) -> None:
        version = stream.versions[-1]
        new = {key[1:].replace("_", "."): Tensor.of(np.array(each, "<i8"), "I64") for key, each in changes.items()}
        stream.put_tensors(version, 0, stream.tensors(version, 0) | new)

    return edit


def _bytes(change: Callable[[bytes], bytes]) -> Callable[[Stream], None]:
    """Return a change of the bytes of the newest entry."""

    def edit(stream: Stream) -> None:
        name = entry_name(stream.versions[-1])
        stream.objects[name] = change(stream.objects[name])

    return edit


def _second_block(entry: Entry) -> None:
    entry["parts"][0]["blocks"].append(entry["parts"][0]["blocks"][0])


_REFUSED: dict[str, tuple[Callable[[], Maker], Callable[[Stream], object]]] = {
    "a flipped bit in its part": (plain_maker, _part(lambda data: data[:-1] + bytes([data[-1] ^ 1]))),
    "a shorter part": (plain_maker, _part(lambda data: data[:-4])),
    "a shorter part and its hash": (plain_maker, _part(lambda data: data[:-4], is_sealed=True)),
    "descending ids": (plain_maker, _tensors(_0_ids=[3, 1])),
    "ids outside of the table": (plain_maker, _tensors(_0_ids=[3, 10])),
    "a truncated manifest": (plain_maker, _bytes(lambda data: data[:-1])),
    "a manifest that is empty": (plain_maker, _bytes(lambda _: b"")),
    "a name twice": (plain_maker, _bytes(lambda data: b'{"version":4,' + data[1:])),
    "another parent": (plain_maker, _edit(parent={"version": 3, "xxh3": "0" * 32})),
    "another stream": (plain_maker, _edit(stream=_OTHER)),
    "a lower generation": (plain_maker, _edit(generation=0)),
    "another version": (plain_maker, _edit(version=5)),
    "overlapping blocks": (plain_maker, _entry(_second_block)),
    "a format that is a string": (plain_maker, _edit(format="1")),
    "format 2 without its fields": (plain_maker, _edit(format=2)),
    "a flipped bit in its object": (owned_maker, _part(lambda data: data[:-20] + bytes([data[-20] ^ 1]) + data[-19:])),
    "an owner in another bucket": (owned_maker, _tensors(_1_owners=[3, 60])),
    "a raw id with two rows": (owned_maker, _tensors(_1_owners=[3, 3])),
}


def cases() -> Iterator[Case]:
    for number in (1, 2):
        yield Follow(f"follow golden format {number}", _NEXT, lambda number=number: _one_by_one(golden(number)))
    yield Follow("follow merged entries", _NEXT, _merged_one_by_one)
    for is_merged in (False, True):
        text = "and a merged delta" if is_merged else "at once"
        yield Follow(f"follow twenty versions {text}", _NEXT, partial(_at_once, is_merged=is_merged))
        text = "a merged snapshot" if is_merged else "a snapshot"
        trial = partial(_overtaken, is_merged=is_merged)
        yield Follow(f"follow retention that overtakes with {text}", _CHAIN, trial)
    for is_named in (False, True):
        text = "another entry" if is_named else "a missing entry"
        yield Follow(f"follow a late claim before {text}", _LATE, partial(_late_claim, is_named=is_named))
    yield Follow("follow a late claim without a newer snapshot", _LATE, _late_claim_without_snapshot)
    yield Follow("follow a gap before a snapshot", _CHAIN, _gap)
    for is_behind in (False, True):
        text = "before" if is_behind else "at"
        yield Follow(f"follow a claim after a lost entry, from {text} it", _LOST, partial(_lost, is_behind=is_behind))
    yield Follow("follow a fork", "The claim proves that its stream continues the former one", _forked)
    yield Follow("follow a part that comes late", "the parts of an entry exist", _late_part)
    for text, (make, change) in _REFUSED.items():
        yield Follow(f"follow a version with {text}", _CHECK, partial(_refused, make, change))
    newer = partial(_refused, plain_maker, _edit(format=3), "newer")
    yield Follow("follow a version of format 3", "MUST report that a newer release is needed", newer)
    raw_ids = {"r": [3, 49, 100, 60, -1, 7, NO_OWNER], "s": [-2, 7, 9, 0]}
    owned = partial(_one_by_one, owned_maker().stream, raw_ids)
    yield Follow("follow raw ids", "A reader that serves lookups of raw ids", owned, raw_ids)
