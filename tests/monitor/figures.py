"""Helpers that read the values of a monitor and of its collections."""

from __future__ import annotations

from datetime import timedelta

from delta_tracker.monitor import Kind, Monitor
from delta_tracker.monitor.collection_report import CollectionReport, WindowReport
from tests.monitor.recording import Kept


class Figures:
    """Values of the library's own metrics in a monitor, by name without prefix and unordered labels."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def now(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """Return each counter's total, each histogram's number of samples, and each gauge's last reading."""
        found = {}
        for each in self._monitor.collect().totals:
            figures, kind = each.figures, each.definition.kind
            value = {Kind.COUNTER: figures.total, Kind.GAUGE: figures.last}.get(kind, figures.count)
            found[each.definition.name.removeprefix("delta_tracker_"), frozenset(each.labels)] = value
        return found

    def of(self, name: str, **labels: str) -> float | None:
        """Return the value of one cell, None if it does not exist."""
        return self.now().get((name, frozenset(labels.items())))


def windows(collection: CollectionReport, name: str) -> list[WindowReport]:
    return [each for each in collection.windows if each.definition.name == name]


def window_figures(collection: CollectionReport, name: str) -> list[tuple[int, dict[str, float]]]:
    return [(each.count, each.values) for each in windows(collection, name)]


def total(source: CollectionReport | Monitor, name: str) -> float:
    """Return the sum of a stat's totals over its cells; a monitor is collected first."""
    collection = source if isinstance(source, CollectionReport) else source.collect()
    return sum(each.figures.total for each in collection.totals if each.definition.name == name)


def last_collection(monitor: Monitor) -> CollectionReport:
    """Stop the monitor, which closes its windows, and return the last collection."""
    sink = Kept()
    monitor.start([sink], interval=timedelta(hours=1), system=False)
    assert monitor.stop()
    (collection,) = sink.collections
    assert collection.is_last
    return collection
