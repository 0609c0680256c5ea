"""Mergeable aggregates of numbers: count, sum, mean, standard deviation, minimum, maximum, last value and histogram."""

import math
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Self

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor.buckets import LogBuckets

_PLAIN = ("value", "count", "sum", "mean", "min", "max", "std", "histogram")
_QUANTILE = re.compile(r"p(\d{1,2}(?:\.\d{1,4})?)")
_PLAIN_TYPES = frozenset({int, float})


def quantile_of(aggregation: str) -> float | None:
    """Return the fraction of a quantile, such as 0.95 for ``"p95"``; None if ``aggregation`` is not a quantile.

    Example:
        >>> quantile_of("p99.9"), quantile_of("mean")
        (0.999, None)
    """
    found = _QUANTILE.fullmatch(aggregation)
    return None if found is None else round(float(found[1]) / 100, 6)


def check_aggregations(aggregations: Iterable[str]) -> tuple[str, ...]:
    """Return ``aggregations`` as a tuple without duplicates. Raise InvalidArgumentError for an unknown aggregation."""
    if isinstance(aggregations, str):
        raise InvalidArgumentError("aggregations", aggregations, f"Pass a tuple: ({aggregations!r},)")
    found = tuple(dict.fromkeys(aggregations))
    for name in found:
        if type(name) is not str or (name not in _PLAIN and quantile_of(name) is None):
            raise InvalidArgumentError("aggregations", name, f"Use {', '.join(_PLAIN)}, or a quantile such as p95")
    return found


@cache
def needs_buckets(aggregations: tuple[str, ...]) -> bool:
    """Return True if any of the aggregations is computed from :class:`LogBuckets`."""
    return any(name == "histogram" or quantile_of(name) is not None for name in aggregations)


class Aggregate:
    """Running count, sum and other aggregates of finite numbers.

    Means and deviations are merged as in Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for
    computing sample variances" (1979).

    Args:
        with_spread: True to also compute the standard deviation.
        with_buckets: True to also count the numbers in buckets, for quantiles.
        is_counter: True to reject negative numbers.

    Attributes:
        total: weighted sum of the accepted numbers, exact for integers.
        weight: sum of the weights. Unweighted numbers have the weight 1. The mean is ``total / weight``.
        min: smallest accepted number; NaN if unknown. For example, ``DeviceMean`` does not record it.
        max: largest accepted number; NaN if unknown.
        last: newest accepted number; NaN if unknown.
        num_rejected: number of rejected values: NaN, infinity, and negative numbers if ``is_counter`` is True.
        buckets: histogram of the accepted numbers; None if ``with_buckets`` is False.
    """

    def __init__(self, *, with_spread: bool = False, with_buckets: bool = False, is_counter: bool = False) -> None:
        self.count = 0
        self.total: float = 0
        self.weight: float = 0
        self.min = self.max = self.last = math.nan
        self.num_rejected = 0
        self.buckets = LogBuckets() if with_buckets else None
        self._num_spread = 0  # less than count if the deviation was enabled later
        self._mean = 0.0
        self._squares: float | None = 0.0 if with_spread else None
        self._is_counter = is_counter

    @property
    def num_values(self) -> int:
        """Number of accepted and rejected values."""
        return self.count + self.num_rejected

    def extend(self, values: list[float]) -> list[float]:
        """Add ``values`` and return the accepted numbers. Rejected values are counted. Never raises."""
        numbers = self._accepted(values)
        if not numbers:
            return numbers
        count, total = len(numbers), _sum(numbers)
        if self._squares is not None:
            mean = total / count
            # A product overflows to infinity, where a power would raise.
            squares = sum((number - mean) * (number - mean) for number in numbers)
            self._add_spread(count, mean, squares)
        if self.buckets is not None:
            self.buckets.extend(numbers)
        self._add_sums(count, total, count)
        self._add_extremes(min(numbers), max(numbers), numbers[-1])
        return numbers

    def merge(self, newer: Self) -> None:
        """Add the numbers of ``newer`` to this aggregate. If ``newer.last`` is not NaN, it replaces ``last``."""
        self.num_rejected += newer.num_rejected
        if self._squares is not None and newer._squares is not None:
            self._add_spread(newer._num_spread, newer._mean, newer._squares)
        if self.buckets is not None and newer.buckets is not None:
            self.buckets.merge(newer.buckets)
        self._add_sums(newer.count, newer.total, newer.weight)
        self._add_extremes(newer.min, newer.max, newer.last)

    def value(self, aggregation: str) -> float | None:
        """Return the value of an aggregation such as ``"p95"``; None for ``"histogram"`` or an undefined value."""
        fraction = quantile_of(aggregation)
        if fraction is not None:
            return self._quantile(fraction)
        figures: dict[str, float | None] = {
            "value": self.last,
            "count": self.count,
            "sum": self.total,
            "mean": self.total / self.weight if self.weight else None,
            "min": self.min,
            "max": self.max,
            "std": self._deviation(),
        }
        figure = figures.get(aggregation)
        return None if figure is None or math.isnan(figure) else figure

    def _quantile(self, fraction: float) -> float | None:
        if self.buckets is None or self.buckets.count == 0:
            return None
        estimate = self.buckets.quantile(fraction)
        return estimate if math.isnan(self.min) else min(max(estimate, self.min), self.max)

    def _deviation(self) -> float | None:
        """Return the sample standard deviation, sqrt(sum((x - mean)^2) / (count - 1)); None if it is undefined."""
        if self._squares is None or self._num_spread <= 1:
            return None
        return math.sqrt(self._squares / (self._num_spread - 1))

    def _add_spread(self, count: int, mean: float, squares: float) -> None:
        assert self._squares is not None, "checked by the caller"
        if count:
            difference, both = mean - self._mean, self._num_spread + count
            self._squares += squares + difference * difference * self._num_spread * count / both
            self._mean += difference * count / both
            self._num_spread = both

    def _add_sums(self, count: int, total: float, weight: float) -> None:
        self.count += count
        self.total = _sum((self.total, total))
        self.weight += weight

    def _add_extremes(self, low: float, high: float, last: float) -> None:
        # NaN means unknown; min() and max() ignore it as the second argument only.
        self.min = low if math.isnan(self.min) else min(self.min, low)
        self.max = high if math.isnan(self.max) else max(self.max, high)
        self.last = self.last if math.isnan(last) else last

    def _accepted(self, values: list[float]) -> list[float]:
        """Return the accepted numbers among ``values``. Count the others as rejected."""
        with suppress(OverflowError):  # of integers beyond the range of a float
            # A finite sum has finite terms.
            if math.isfinite(sum(values)) and not (self._is_counter and min(values, default=0) < 0):
                return values
        low = 0 if self._is_counter else -sys.float_info.max
        kept = [value for value in values if low <= value <= sys.float_info.max]
        self.num_rejected += len(values) - len(kept)
        return kept


def _sum(numbers: Sequence[float]) -> float:
    """Return the sum of ``numbers``. Sums of integers are exact. A sum beyond the range of a float is infinite."""
    with suppress(OverflowError):
        total = sum(numbers)
        if math.isfinite(total):
            return total
    return sum(map(float, numbers))


def plain_number(value: Any) -> float:  # noqa: ANN401  users pass anything
    """Convert ``value`` to an int or float. Return NaN if ``value`` is not a number or is not on the CPU.

    Never raises or waits for a device. Integers in arrays and CPU tensors are converted exactly.
    """
    # Converting a tensor on a device would block. DeviceMean and similar classes record such tensors.
    device = getattr(value, "device", None)
    if device is not None and getattr(device, "type", "cpu") != "cpu":
        return math.nan
    numpy = sys.modules.get("numpy")  # imported if the caller has an array
    if numpy is not None and numpy.ma.is_masked(value):  # item() returns the value that the mask hides
        return math.nan
    with suppress(Exception):  # float() decides
        value = value.item()  # of arrays, their scalars and tensors
    try:
        if type(value) is bool:
            return int(value)
        return value if type(value) in _PLAIN_TYPES else float(value)
    except Exception:  # noqa: BLE001  values of any type are counted as rejected; training must continue
        return math.nan
