"""Slow reference of a rank's log, and the schedule that runs the log and the reference together.

The reference keeps every write with the times at which it began and ended. A consumer's read must hold exactly the rows
of the writes that began since its last committed cut or were in progress at that cut, and what earlier reads left out.
A table of counters represents the weights: a copy that applies each committed read must end up equal to it, and the
old state of a row is the state in that copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from delta_tracker.tracker.change_log import ChangeLog
from delta_tracker.tracker.cursors import Read
from delta_tracker.tracker.store.segments import SegmentStore
from delta_tracker.types import DeltaRows

NUM_ROWS = 12
CONSUMERS = ("a", "b")

MakeStore = Callable[[Callable[[Tensor], Tensor], Callable[[], bool]], SegmentStore]


@dataclass
class _Write:
    rows: set[int]
    began: int
    ended: int | None = None
    is_written: bool = False
    failed: bool = False


@dataclass
class _Reader:
    cut: int
    copy: list[int]
    left_out: dict[int, int] = field(default_factory=dict)  # row to age
    open_read: tuple[int, Read, list[int], dict[int, int]] | None = None


class Schedule:
    """A log under test and its reference, with one method per event."""

    def __init__(self, make_store: MakeStore, *, delete_on_read: bool = True) -> None:
        self.weights = [0] * NUM_ROWS
        self.version = self.seen_version = 0
        self.store = make_store(self.held, self.was_written)
        self.keeps_states = self.store._old_states is not None
        self.log = ChangeLog({"t": self.store}, CONSUMERS, delete_on_read=delete_on_read, max_bytes=None)
        self.time = 0
        self.writes: dict[int, _Write] = {}
        self.readers = {name: _Reader(0, [0] * NUM_ROWS) for name in CONSUMERS}
        self.counts = dict.fromkeys(("nothing in progress", "something in progress", "rows", "left out", "unknown"), 0)

    def held(self, ids: Tensor) -> Tensor:
        """Return the current states of rows."""
        return torch.tensor([[float(self.weights[row])] for row in ids.tolist()]).reshape(len(ids), 1)

    def was_written(self) -> bool:
        """Return whether rows were changed silently since the last call."""
        seen, self.seen_version = self.seen_version, self.version
        return seen != self.version

    @property
    def in_progress(self) -> list[int]:
        return [key for key, write in self.writes.items() if write.ended is None]

    def begin(self, ids: list[int] | None) -> None:
        """Begin a write before its rows change; None is a failed hook."""
        self.time += 1
        key = len(self.writes)
        rows = set(range(NUM_ROWS)) if ids is None else {i if 0 <= i < NUM_ROWS else 0 for i in ids}
        self.writes[key] = _Write(rows, self.time, failed=ids is None)
        self.log.writes.begin_write(key, {"t": None if ids is None else torch.tensor(ids, dtype=torch.int64)})

    def write(self, key: int) -> None:
        write = self.writes[key]
        if write.ended is None and not write.is_written:
            write.is_written = True
            for row in write.rows:
                self.weights[row] += 1

    def end(self, key: int) -> None:
        self.write(key)
        self.time += 1
        self.writes[key].ended = self.time
        self.log.writes.end_write(key, ["t"])

    def raise_in(self, key: int, *, is_written: bool) -> None:
        """Raise in the backward of a write in progress, before or after the write; only its end is reported."""
        if is_written:
            self.write(key)
        self.time += 1
        self.writes[key].ended = self.time
        self.log.writes.end_write_later(key)

    def edit(self, ids: list[int]) -> None:
        """Change rows outside a write, then notify the log."""
        self.time += 1
        for row in set(ids):
            self.weights[row] += 1
        self.writes[len(self.writes)] = _Write(set(ids), self.time, ended=self.time, failed=True)
        self.log.writes.mark("t", torch.tensor(ids, dtype=torch.int64), is_written=True)

    def overwrite(self, ids: list[int]) -> None:
        """Change rows outside a write; only the version counter of the weights shows it."""
        self.time += 1
        for row in set(ids):
            self.weights[row] += 1
        self.version += 1
        self.writes[len(self.writes)] = _Write(set(range(NUM_ROWS)), self.time, ended=self.time, failed=True)

    def read(self, name: str, left_out: set[int] = frozenset()) -> None:
        """Read without committing, leaving some rows out."""
        self.time += 1
        reading = self.log.consumers.read(name)
        changed = reading.rows["t"]
        self.check(name, reading)
        keep = torch.tensor([row not in left_out for row in changed.ids.tolist()], dtype=torch.bool)
        rest = changed.take(~keep)
        reading.returns({"t": DeltaRows(changed.ids[keep])}, {"t": rest})
        self.counts["left out"] += len(rest)
        self.log.consumers.hold(reading)
        ages = {row: self.readers[name].left_out.get(row, 0) + 1 for row in rest.ids.tolist()}
        self.readers[name].open_read = (self.time, reading, list(self.weights), ages)

    def fail_read(self, name: str) -> None:
        """Raise in a read before it has a result; the consumer's earlier read stays valid."""
        num_segments = self.store.num_segments
        reading = self.log.consumers.read(name)
        self.check(name, reading)
        self.log.consumers.abort(reading)
        assert self.store.num_segments <= num_segments

    def check(self, name: str, reading: Read) -> None:
        reader, changed = self.readers[name], reading.rows["t"]
        writes = [
            each
            for each in self.writes.values()
            if each.began > reader.cut or each.ended is None or each.ended > reader.cut
        ]
        expected = set(reader.left_out).union(*(write.rows for write in writes))
        assert changed.ids.tolist() == sorted(expected), (name, changed.ids.tolist(), sorted(expected))
        self.counts["something in progress" if self.in_progress else "nothing in progress"] += 1
        self.counts["rows"] += len(changed)
        ages = [0] * len(changed) if changed.ages is None else changed.ages.tolist()
        assert ages == [reader.left_out.get(row, 0) for row in changed.ids.tolist()]
        if not self.keeps_states:
            assert changed.states is None
            return
        may_be_unknown = set().union(*(write.rows for write in writes if write.failed))
        for row, state, known in zip(
            changed.ids.tolist(), changed.states.flatten().tolist(), changed.known.tolist(), strict=True
        ):
            if known:
                assert state == reader.copy[row], (name, row, state, reader.copy[row])
            else:
                assert row in may_be_unknown or row in reader.left_out, (name, row)
                assert state != state, "unknown is NaN"  # noqa: PLR0124
                self.counts["unknown"] += 1

    def commit(self, name: str) -> None:
        reader = self.readers[name]
        if reader.open_read is None:
            return
        cut, reading, weights, ages = reader.open_read
        self.log.consumers.commit(reading)
        for row in reading.delta["t"].ids.tolist():
            reader.copy[row] = weights[row]
        stale = {row for row in range(NUM_ROWS) if reader.copy[row] != weights[row]}
        assert stale <= set(ages), (name, stale, ages)
        reader.cut, reader.left_out, reader.open_read = cut, ages, None

    def abort(self, name: str) -> None:
        reader = self.readers[name]
        if reader.open_read is not None:
            self.log.consumers.abort(reader.open_read[1])
            reader.open_read = None

    def add(self, name: str) -> None:
        if name not in self.readers:
            self.time += 1
            self.log.consumers.add(name)
            self.readers[name] = _Reader(self.time, list(self.weights))

    def remove(self, name: str) -> None:
        if name in self.readers and len(self.readers) > 1:
            self.log.consumers.remove(name)
            del self.readers[name]

    def clear(self, name: str) -> None:
        self.time += 1
        self.log.consumers.clear(name)
        self.readers[name] = _Reader(self.time, list(self.weights))

    def finish(self) -> None:
        """End every write; then every consumer's copy must become equal to the weights."""
        for key in self.in_progress:
            self.end(key)
        for name, reader in self.readers.items():
            self.read(name)
            self.commit(name)
            assert reader.copy == self.weights, (name, reader.copy, self.weights)
