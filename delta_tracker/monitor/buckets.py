"""Histogram that estimates quantiles in bounded memory. The width of its buckets grows exponentially.

Positive and negative numbers have separate buckets. Bucket ``i`` counts the numbers whose magnitude is in
``(g**i, g**(i + 1)]``, where ``g = 2**(1 / 32)``. These are the buckets of OpenTelemetry's exponential histogram and of
Prometheus' native histogram at scale 5, so they are exported without loss
(https://opentelemetry.io/docs/specs/otel/metrics/data-model/#exponentialhistogram). Quantiles are estimated as in
Masson, Rim and Lee, "DDSketch" (VLDB 2019). The relative error is at most ``(g - 1) / (g + 1)``, 1.09 %, for magnitudes
between :data:`MIN` and :data:`MAX`.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate

SCALE = 5
PER_OCTAVE = 2**SCALE
RELATIVE_ERROR = (2 ** (1 / PER_OCTAVE) - 1) / (2 ** (1 / PER_OCTAVE) + 1)
"""Largest relative error of a quantile, for magnitudes between :data:`MIN` and :data:`MAX`."""

_LOWEST_OCTAVE, _HIGHEST_OCTAVE = -40, 60
LOWEST, HIGHEST = _LOWEST_OCTAVE * PER_OCTAVE, _HIGHEST_OCTAVE * PER_OCTAVE - 1
MIN, MAX = 2.0**_LOWEST_OCTAVE, 2.0**_HIGHEST_OCTAVE

# Multiplies by 32 in C: no Python frame per value.
_scaled = float(PER_OCTAVE).__mul__


def upper_bound(index: int) -> float:
    """Return the largest magnitude in bucket ``index``."""
    return float(2.0 ** ((index + 1) / PER_OCTAVE))


def _indices(magnitudes: Iterable[float]) -> Counter[int]:
    """Return the number of ``magnitudes`` in each bucket, by bucket index.

    All magnitudes must be positive. Magnitudes outside the range from :data:`MIN` to :data:`MAX` are counted
    in the first or last bucket.
    """
    counts = Counter(map(math.ceil, map(_scaled, map(math.log2, magnitudes))))
    result: Counter[int] = Counter()
    for ceiling, count in counts.items():
        result[min(max(ceiling - 1, LOWEST), HIGHEST)] += count
    return result


class LogBuckets:
    """Histogram of finite numbers, with a bucket for each sign and range of magnitudes.

    Merging is associative and commutative. Only nonzero counts are stored, at most 6401.

    Attributes:
        positive: counts of positive numbers, keyed by bucket index.
        negative: counts of negative numbers, keyed by bucket index.
        zero: number of zeros.

    Example:
        >>> buckets = LogBuckets()
        >>> buckets.extend([1.0, 3.0, 4.0])
        >>> abs(buckets.quantile(0.5) / 3.0 - 1) < RELATIVE_ERROR
        True
    """

    __slots__ = ("negative", "positive", "zero")

    def __init__(self) -> None:
        self.positive: Counter[int] = Counter()
        self.negative: Counter[int] = Counter()
        self.zero = 0

    def extend(self, values: Sequence[float]) -> None:
        """Count ``values`` in their buckets. All values must be finite."""
        above = [value for value in values if value > 0]
        self.positive.update(_indices(above))
        if len(above) < len(values):
            below = [-value for value in values if value < 0]
            self.negative.update(_indices(below))
            self.zero += len(values) - len(above) - len(below)

    def merge(self, other: "LogBuckets") -> None:
        """Add the counts of ``other`` to this object. Does not change ``other``."""
        self.positive.update(other.positive)
        self.negative.update(other.negative)
        self.zero += other.zero

    @property
    def count(self) -> int:
        """Total number of values in the histogram."""
        return self.positive.total() + self.negative.total() + self.zero

    def quantile(self, fraction: float) -> float:
        """Estimate a quantile by the nearest-rank method. ``fraction`` is in [0, 1], for example 0.5 for the median.

        The result is NaN if no numbers were counted. The relative error is at most :data:`RELATIVE_ERROR` for
        magnitudes between :data:`MIN` and :data:`MAX`.
        """
        ranges = self.ranges()
        if not ranges:
            return math.nan
        cumulative = list(accumulate(count for _, _, count in ranges))
        rank = math.ceil(round(fraction * cumulative[-1], 6))  # 0.07 * 100 is 7.000000000000001
        lower, upper, _ = ranges[bisect_left(cumulative, max(1, rank))]
        # The harmonic mean of the bucket's bounds has the same relative distance to both.
        return 2 * lower * upper / (lower + upper) if upper else 0.0

    def ranges(self) -> list[tuple[float, float, int]]:
        """Return the lower bound, upper bound and count of each nonempty bucket, in ascending order.

        Zeros are counted in a bucket from ``-MIN`` to 0.
        """
        negative, positive = sorted(self.negative, reverse=True), sorted(self.positive)
        return [
            *((-upper_bound(index), -upper_bound(index - 1), self.negative[index]) for index in negative),
            *([(-MIN, 0.0, self.zero)] if self.zero else []),
            *((upper_bound(index - 1), upper_bound(index), self.positive[index]) for index in positive),
        ]

    def cumulative(self, bounds: Sequence[float]) -> list[int]:
        """Return, for each of ``bounds``, the number of counted values that are less than or equal to the bound.

        ``bounds`` are powers of ``2**(1 / 32)`` in ascending order. The counts are exact if the magnitude of each
        counted value is above :data:`MIN` and at most :data:`MAX`.
        """
        limits = [round(math.log2(bound) * PER_OCTAVE) for bound in bounds]
        below = self.negative.total() + self.zero
        indices = sorted(self.positive)
        totals = [0, *accumulate(self.positive[index] for index in indices)]
        return [below + totals[bisect_left(indices, limit)] for limit in limits]
