"""Reader of a log that applies entries to nothing: only its position moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import MagicMock

from delta_tracker.predictor.reader import Reader
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.reading.orders import Order, OrderPolicy
from delta_tracker.stream.reading.position import Position, Written
from delta_tracker.stream.reading.source import Sources
from delta_tracker.stream.storage.storage import Storage


class Nothing:
    """Writer of no rows, and gauges without metrics."""

    def __init__(self, position: Position | None) -> None:
        self.position = position
        self.written = Written(stream="")
        self.destination = self.age = self
        self.served = None
        self.recorder = MagicMock()

    def save_order(self, followed: Order) -> None: ...

    def restore(self) -> None: ...

    def notice_move(self) -> bool:
        return False

    def restart(self) -> None: ...

    def apply(self, entry: Manifest, storage: Storage, *, is_elsewhere: bool) -> None:
        self.position = Position.after(entry)

    def check_path(self, entries: Sequence[Manifest], storage: Storage) -> Iterator[Manifest]:
        yield from entries

    def write_path(self, entries: Sequence[Manifest], storage: Storage) -> None:
        self.position = Position.after(entries[-1])

    def resynced(self, fault: Exception) -> None: ...

    def failed_over(self, url: str) -> None: ...

    def read_loaded(self, log: StreamLog, position: Position | None) -> None: ...


def plain_reader(storage: Storage, position: Position | None = None) -> Reader:
    """Return a reader at a position."""
    target: Any = Nothing(position)
    return Reader(Sources(storage), target, target, OrderPolicy())
