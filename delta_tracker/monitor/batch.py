"""Data of one collection, as delivered to the sinks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from delta_tracker.monitor.aggregate import Aggregate
from delta_tracker.monitor.buckets import LogBuckets
from delta_tracker.monitor.event import Event
from delta_tracker.monitor.names import Labels
from delta_tracker.monitor.policy import Policy
from delta_tracker.monitor.series import ClosedWindow
from delta_tracker.monitor.stat import Definition


@dataclass(frozen=True, slots=True)
class WindowReport:
    """The figures of one window.

    Args:
        definition: definition of the stat.
        labels: labels of the cell.
        values: aggregation to figure; aggregations without data are omitted.
        count: number of accepted records.
        num_rejected: number of rejected records, such as NaN.
        window: times, step, raw records.
    """

    definition: Definition
    labels: Labels
    values: Mapping[str, float]
    count: int
    num_rejected: int
    window: ClosedWindow

    @property
    def buckets(self) -> LogBuckets | None:
        """Histogram of the window, or None if the policy has no histogram or quantiles."""
        return self.window.aggregate.buckets

    @classmethod
    def of(cls, definition: Definition, labels: Labels, policy: Policy, window: ClosedWindow) -> WindowReport:
        """Build the report of a window according to a policy."""
        figures = {name: window.aggregate.value(name) for name in policy.aggregations if name != "histogram"}
        if window.aggregate.count == 0 and policy.when_empty == "zero":
            figures = dict.fromkeys(figures, 0)
        values = {name: figure for name, figure in figures.items() if figure is not None}
        return cls(definition, labels, values, window.aggregate.count, window.aggregate.num_rejected, window)


@dataclass(frozen=True, slots=True)
class TotalReport:
    """The figures of a cell since the process started, for sinks that sample totals.

    Args:
        definition: definition of the stat.
        labels: labels of the cell.
        figures: count, sum, newest number, buckets.
    """

    definition: Definition
    labels: Labels
    figures: Aggregate


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One collection.

    Args:
        time_ns: time of the collection, nanoseconds since the epoch.
        begin_ns: time at which the totals started at 0, nanoseconds since the epoch.
        attributes: attributes that identify the process, such as its rank.
        windows: windows closed since the last collection.
        totals: totals of all cells with records, and of all enabled counters.
        events: events since the last collection.
        is_last: True for the final collection before the monitor stops.
    """

    time_ns: int
    begin_ns: int
    attributes: Mapping[str, str] = field(default_factory=dict)
    windows: tuple[WindowReport, ...] = ()
    totals: tuple[TotalReport, ...] = ()
    events: tuple[Event, ...] = ()
    is_last: bool = False
