"""What a collection hands to the sinks."""

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
        definition: of the stat.
        labels: of the cell.
        values: aggregation to figure; one that has no data is left out.
        count: how many finite numbers they are made of.
        num_rejected: how many records were no finite numbers.
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
        """The window's histogram, if one is kept."""
        return self.window.aggregate.buckets

    @classmethod
    def of(cls, definition: Definition, labels: Labels, policy: Policy, window: ClosedWindow) -> WindowReport:
        """What a policy makes of a window."""
        figures = {name: window.aggregate.value(name) for name in policy.aggregations if name != "histogram"}
        if window.aggregate.count == 0 and policy.when_empty == "zero":
            figures = dict.fromkeys(figures, 0)
        values = {name: figure for name, figure in figures.items() if figure is not None}
        return cls(definition, labels, values, window.aggregate.count, window.aggregate.num_rejected, window)


@dataclass(frozen=True, slots=True)
class TotalReport:
    """The figures of a cell since the process began, for sinks that sample what accumulates.

    Args:
        definition: of the stat.
        labels: of the cell.
        figures: count, sum, newest number, buckets.
    """

    definition: Definition
    labels: Labels
    figures: Aggregate


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One collection.

    Args:
        time_ns: when, nanoseconds since the epoch.
        begin_ns: when the totals began to count, nanoseconds since the epoch.
        attributes: what tells this process from others, such as its rank.
        windows: those that closed since the last collection.
        totals: of all cells that ever had a record.
        events: those since the last collection.
        is_last: no other collection follows.
    """

    time_ns: int
    begin_ns: int
    attributes: Mapping[str, str] = field(default_factory=dict)
    windows: tuple[WindowReport, ...] = ()
    totals: tuple[TotalReport, ...] = ()
    events: tuple[Event, ...] = ()
    is_last: bool = False
