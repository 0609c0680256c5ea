"""Policies: settings for the windows and aggregations of stats."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, get_args

from delta_tracker.arguments import check_count, check_switch
from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor.aggregate import check_aggregations

WhenEmpty = Literal["skip", "zero"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Conditions that close a window. A window is a sequence of records of a stat that are aggregated together.

    When one of the conditions is met, the window is closed and a new one is opened. If no condition is set, each
    collection closes the window.

    Args:
        count: close the window after this many records.
        every: close the window at the first collection at which the window is at least this old.
        epoch: close the window when :meth:`~delta_tracker.monitor.monitor.Monitor.end_epoch` is called.

    Raises:
        InvalidArgumentError: if ``count`` is below 1, or if ``every`` is 0 or less.
    """

    count: int | None = None
    every: timedelta | None = None
    epoch: bool = False

    def __post_init__(self) -> None:
        if self.count is not None:
            check_count("count", self.count)
        if self.every is not None and (type(self.every) is not timedelta or self.every <= timedelta(0)):
            raise InvalidArgumentError("every", self.every, "Pass a timedelta above 0, or None")

    def is_over(self, age_ns: int) -> bool:
        """Return True if a collection must close a window that is ``age_ns`` nanoseconds old."""
        if self.every is not None:
            return age_ns >= self.every // timedelta(microseconds=1) * 1000
        return self.count is None and not self.epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Settings of a stat: the windows, aggregates and samples to report.

    Set the policy when the stat is defined, or later with :meth:`~delta_tracker.monitor.monitor.Monitor.configure`.

    Args:
        aggregations: aggregates to report for each window: ``value`` (the newest record), ``count``, ``sum``, ``mean``,
            ``min``, ``max``, ``std``, ``histogram``, and quantiles such as ``p50``, ``p95``, ``p99.9``. The number of
            records is always reported.
        window: conditions that close a window.
        enabled: False to ignore all records.
        when_empty: ``"skip"`` to omit windows without records, or ``"zero"`` to report them with all aggregates 0.
        raw: maximum number of records of each window to report, chosen uniformly at random; 0 to report none.

    Raises:
        InvalidArgumentError: for an unknown aggregation, an invalid value, or a negative ``raw``.
    """

    aggregations: tuple[str, ...] = ("count", "mean", "min", "max")
    window: Window = Window()
    enabled: bool = True
    when_empty: WhenEmpty = "skip"
    raw: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "aggregations", check_aggregations(self.aggregations))
        if not isinstance(self.window, Window):
            raise InvalidArgumentError("window", self.window, "Pass Window(count=...), Window(every=...) or both")
        check_switch("enabled", self.enabled)
        if self.when_empty not in get_args(WhenEmpty):
            raise InvalidArgumentError("when_empty", self.when_empty, f"Pass one of {get_args(WhenEmpty)}")
        check_count("raw", self.raw, least=0)
