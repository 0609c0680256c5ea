"""The slow, obviously right reference of a shard's store, and the schedule that drives both side by side.

The reference keeps every batch with the times at which it opened and closed. A consumer's read must hold exactly the
rows of the batches that opened since its last committed cut or were open at that cut. Beside it runs a table of
counters that stands for the weights: a copy that takes each committed read must end up equal to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from delta_tracker.cursors import Cursors
from delta_tracker.store.segments import SegmentStore
from delta_tracker.types import Delta, DeltaRows

NUM_ROWS = 12
CONSUMERS = ("a", "b")


@dataclass
class _Batch:
    rows: set[int]
    opened: int
    closed: int | None = None
    written: bool = False


@dataclass
class _Reader:
    cut: int = 0
    copy: list[int] = field(default_factory=lambda: [0] * NUM_ROWS)
    read: tuple[int, Delta, list[int]] | None = None


class Schedule:
    """A store under test, the reference, and one method per event that can happen to both."""

    def __init__(self, store: SegmentStore | None = None, *, delete_on_read: bool = True) -> None:
        self.store = store or SegmentStore(NUM_ROWS)
        self.cursors = Cursors(CONSUMERS)
        self.delete_on_read = delete_on_read
        self.position = 0
        self.time = 0
        self.weights = [0] * NUM_ROWS
        self.batches: dict[int, _Batch] = {}
        self.readers = {name: _Reader() for name in CONSUMERS}
        self.num_reads = {"nothing open": 0, "something open": 0, "empty": 0}

    @property
    def open_batches(self) -> list[int]:
        return [key for key, batch in self.batches.items() if batch.closed is None]

    def open(self, ids: list[int]) -> int:
        self.time += 1
        key = len(self.batches)
        self.batches[key] = _Batch({i if 0 <= i < NUM_ROWS else 0 for i in ids}, self.time)
        self.store.open_batch(key, torch.tensor(ids, dtype=torch.int64))
        return key

    def write(self, key: int) -> None:
        batch = self.batches[key]
        if batch.closed is None and not batch.written:
            batch.written = True
            for row in batch.rows:
                self.weights[row] += 1

    def close(self, key: int) -> None:
        self.write(key)
        self.time += 1
        if self.batches[key].closed is None:
            self.batches[key].closed = self.time
        self.store.close_batch(key)

    def fail_hook(self) -> int:
        self.time += 1
        key = len(self.batches)
        self.batches[key] = _Batch(set(range(NUM_ROWS)), self.time)
        self.store.open_batch(key, None)
        return key

    def compact(self) -> None:
        self.store.compact(self.cursors.pinned)
        if self.delete_on_read:
            self.store.delete(self.cursors.oldest)

    def read(self, name: str) -> None:
        self.time += 1
        self.position += 1
        self.store.cut(self.position)
        start, _ = self.cursors.start(name)
        ids = self.store.changed(start, self.position)
        self.check(name, ids)
        delta = Delta({"t": DeltaRows(ids)}, consumer=name, start=start, stop=self.position, batches=(0, 0))
        self.cursors.seal(delta)
        self.compact()
        self.readers[name].read = (self.time, delta, list(self.weights))

    def check(self, name: str, ids: torch.Tensor) -> None:
        cut = self.readers[name].cut
        expected: set[int] = set()
        for batch in self.batches.values():
            if batch.opened > cut or batch.closed is None or batch.closed > cut:
                expected |= batch.rows
        assert ids.tolist() == sorted(expected), (name, ids.tolist(), sorted(expected))
        self.num_reads["something open" if self.open_batches else "nothing open"] += 1
        self.num_reads["empty"] += not expected

    def commit(self, name: str) -> None:
        reader = self.readers[name]
        if reader.read is None:
            return
        cut, delta, weights = reader.read
        self.cursors.commit(delta)
        self.compact()
        for row in delta["t"].ids.tolist():
            reader.copy[row] = weights[row]
        assert reader.copy == weights, (name, reader.copy, weights)
        reader.cut, reader.read = cut, None

    def abort(self, name: str) -> None:
        reader = self.readers[name]
        if reader.read is not None:
            self.cursors.abort(reader.read[1])
            self.compact()
            reader.read = None

    def finish(self) -> None:
        """Close everything; every consumer's copy must then become equal to the weights."""
        for key in self.open_batches:
            self.close(key)
        for name in CONSUMERS:
            self.read(name)
            self.commit(name)
            assert self.readers[name].copy == self.weights
