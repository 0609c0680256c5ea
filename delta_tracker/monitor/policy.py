"""How a stat is aggregated: set where it is defined, changed by whoever runs the program."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, get_args

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor.aggregate import check_aggregations

WhenEmpty = Literal["skip", "zero"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """When the numbers that were recorded are summed up and a new window begins.

    With neither ``count`` nor ``every`` nor ``epoch``, at every collection.

    Args:
        count: after so many records; such windows compare, because their means come from equally many samples.
        every: at the first collection so long after the window began, or later.
        epoch: when :meth:`~delta_tracker.monitor.monitor.Monitor.end_epoch` is called.

    Several may be given: the first to come closes the window.

    Raises:
        InvalidArgumentError: for a count below 1 or a duration of 0 or less.
    """

    count: int | None = None
    every: timedelta | None = None
    epoch: bool = False

    def __post_init__(self) -> None:
        if self.count is not None and (type(self.count) is not int or self.count < 1):
            raise InvalidArgumentError("count", self.count, "Pass a whole number of 1 or more, or None")
        if self.every is not None and (type(self.every) is not timedelta or self.every <= timedelta(0)):
            raise InvalidArgumentError("every", self.every, "Pass a timedelta above 0, or None")

    @property
    def closes_at_collections(self) -> bool:
        """Whether nothing but a collection closes it."""
        return self.count is None and self.every is None and not self.epoch

    def is_over(self, age_ns: int) -> bool:
        """Whether a collection closes a window that began ``age_ns`` nanoseconds ago."""
        if self.every is not None:
            return age_ns >= self.every // timedelta(microseconds=1) * 1000
        return self.closes_at_collections


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What is made of a stat's records.

    Args:
        aggregations: which figures of a window are reported: value, count, sum, mean, min, max, std, histogram, and
            quantiles as p50, p95, p99.9. The number of records is reported with any of them.
        window: when a window ends.
        enabled: whether records are taken at all.
        when_empty: of a window without records report nothing (``skip``), or every figure as 0 (``zero``).
        raw: how many single records of a window are passed on beside the figures, drawn at random, all equally likely.

    Raises:
        InvalidArgumentError: for an unknown aggregation or policy, or a negative ``raw``.
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
        if type(self.enabled) is not bool:
            raise InvalidArgumentError("enabled", self.enabled, "Pass True or False")
        if self.when_empty not in get_args(WhenEmpty):
            raise InvalidArgumentError("when_empty", self.when_empty, f"Pass one of {get_args(WhenEmpty)}")
        if type(self.raw) is not int or self.raw < 0:
            raise InvalidArgumentError("raw", self.raw, "Pass how many records of a window to pass on, 0 for none")
