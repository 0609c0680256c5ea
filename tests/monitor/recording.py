"""A sink that keeps what it receives."""

from __future__ import annotations

from delta_tracker.monitor.batch import Batch, WindowReport
from delta_tracker.monitor.sinks.base_sink import Sink


class Kept(Sink):
    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.is_closed = False
        self.was_forgotten = False

    def deliver(self, batch: Batch) -> None:
        assert not self.is_closed
        self.batches.append(batch)

    def close(self) -> None:
        self.is_closed = True

    def forget(self) -> None:
        self.was_forgotten = True

    def windows(self, name: str) -> list[WindowReport]:
        return [each for batch in self.batches for each in batch.windows if each.definition.name == name]
