"""A sink that keeps what it receives."""

from __future__ import annotations

from delta_tracker.monitor.collection_report import CollectionReport, WindowReport
from delta_tracker.monitor.sinks.base_sink import Sink


class Kept(Sink):
    def __init__(self) -> None:
        self.collections: list[CollectionReport] = []
        self.is_closed = False
        self.was_forgotten = False

    def deliver(self, collection: CollectionReport) -> None:
        assert not self.is_closed
        self.collections.append(collection)

    def close(self) -> None:
        self.is_closed = True

    def after_fork(self) -> None:
        self.was_forgotten = True

    def windows(self, name: str) -> list[WindowReport]:
        return [each for collection in self.collections for each in collection.windows if each.definition.name == name]
