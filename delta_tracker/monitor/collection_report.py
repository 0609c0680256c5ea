"""Reports that the collector delivers to sinks: the report of a collection contains reports of windows and totals."""

from collections.abc import Callable, Mapping
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
    """Aggregates of one window of a cell. A cell contains the records of a stat with the same label values.

    Args:
        definition: definition of the stat.
        labels: label names and values of the cell.
        values: aggregates by name, such as ``mean``. Undefined aggregates are omitted.
        count: number of accepted records in the window.
        num_rejected: number of rejected records in the window, such as NaN.
        window: closed window, including its times, step and sample of records.
    """

    definition: Definition
    labels: Labels
    values: Mapping[str, float]
    count: int
    num_rejected: int
    window: ClosedWindow

    @property
    def buckets(self) -> LogBuckets | None:
        """Histogram of the window's records; None if the stat reports neither a histogram nor quantiles."""
        return self.window.aggregate.buckets

    @classmethod
    def of(cls, definition: Definition, labels: Labels, policy: Policy, window: ClosedWindow) -> "WindowReport":
        """Return a report of ``window`` that contains the aggregations selected by ``policy``."""
        figures = {name: window.aggregate.value(name) for name in policy.aggregations if name != "histogram"}
        if window.aggregate.count == 0 and policy.when_empty == "zero":
            figures = dict.fromkeys(figures, 0)
        values = {name: figure for name, figure in figures.items() if figure is not None}
        return cls(definition, labels, values, window.aggregate.count, window.aggregate.num_rejected, window)


@dataclass(frozen=True, slots=True)
class TotalReport:
    """Aggregate of all records of a cell since the process started, for sinks that export totals.

    Args:
        figures: aggregate of the records. The sum of a logical counter includes the total restored from a checkpoint.
        function: function passed to ``Gauge.set_function()``, which returns the current value, or None for no data.
            This argument is None if no function was set.
    """

    definition: Definition
    labels: Labels
    figures: Aggregate
    function: Callable[[], float | None] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionReport:
    """Windows, totals and events of one collection.

    If the delivery to a sink fails, the next report for this sink also contains the undelivered windows and events.

    Args:
        time_ns: time of the collection, in nanoseconds since the epoch.
        begin_ns: time at which the totals started at 0, in nanoseconds since the epoch.
        attributes: names and values that identify the process, such as its rank.
        windows: windows closed since the last collection.
        totals: totals of all cells with records, and of all enabled cells of counters.
        events: events since the last collection.
        is_last: True for the last collection before the monitor stops.
    """

    time_ns: int
    begin_ns: int
    attributes: Mapping[str, str] = field(default_factory=dict)
    windows: tuple[WindowReport, ...] = ()
    totals: tuple[TotalReport, ...] = ()
    events: tuple[Event, ...] = ()
    is_last: bool = False
