"""Quantiles in fixed memory: counts in buckets that grow by a constant factor.

Bucket ``i`` of a sign counts the magnitudes in ``(g**i, g**(i + 1)]`` with ``g = 2**(1 / 32)``. They are the buckets of
OpenTelemetry's exponential histogram and of Prometheus' native histogram at scale 5
(https://opentelemetry.io/docs/specs/otel/metrics/data-model/#exponentialhistogram), so nothing is lost on
the way there. The estimate of a quantile, from Masson, Rim and Lee, "DDSketch" (VLDB 2019), is off by at most the
fraction ``(g - 1) / (g + 1)``, 1.09 %.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate

SCALE = 5
PER_OCTAVE = 2**SCALE
RELATIVE_ERROR = (2 ** (1 / PER_OCTAVE) - 1) / (2 ** (1 / PER_OCTAVE) + 1)
"""The largest error of a quantile as a fraction of it, for magnitudes within :data:`MIN` and :data:`MAX`."""

_LOWEST_OCTAVE, _HIGHEST_OCTAVE = -40, 60
LOWEST, HIGHEST = _LOWEST_OCTAVE * PER_OCTAVE, _HIGHEST_OCTAVE * PER_OCTAVE - 1
MIN, MAX = 2.0**_LOWEST_OCTAVE, 2.0**_HIGHEST_OCTAVE

# Products of an octave's 32 parts and a base-2 logarithm, without a Python frame for each value.
_scaled = float(PER_OCTAVE).__mul__


def upper_bound(index: int) -> float:
    """The largest magnitude that bucket ``index`` counts."""
    return float(2.0 ** ((index + 1) / PER_OCTAVE))


def _indices(magnitudes: Iterable[float]) -> Counter[int]:
    """Bucket to how many of ``magnitudes``, all above 0, it counts; the outermost buckets take what is beyond them."""
    counts = Counter(map(math.ceil, map(_scaled, map(math.log2, magnitudes))))
    result: Counter[int] = Counter()
    for ceiling, count in counts.items():
        result[min(max(ceiling - 1, LOWEST), HIGHEST)] += count
    return result


class LogBuckets:
    """Counts of finite numbers by sign and magnitude; two can be merged, in any order, with the same result.

    Holds at most 6401 counts, and only those that are not 0.

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
        """Count finite numbers."""
        above = [value for value in values if value > 0]
        self.positive.update(_indices(above))
        if len(above) < len(values):
            below = [-value for value in values if value < 0]
            self.negative.update(_indices(below))
            self.zero += len(values) - len(above) - len(below)

    def merge(self, other: LogBuckets) -> None:
        """Add the counts of ``other``, which stays as it is."""
        self.positive.update(other.positive)
        self.negative.update(other.negative)
        self.zero += other.zero

    def copy(self) -> LogBuckets:
        """Another one with the same counts."""
        result = LogBuckets()
        result.merge(self)
        return result

    @property
    def count(self) -> int:
        """How many numbers were counted."""
        return self.positive.total() + self.negative.total() + self.zero

    def quantile(self, fraction: float) -> float:
        """An estimate of the number that ``floor(fraction * (count - 1))`` of all numbers precede.

        Args:
            fraction: in [0, 1].

        Returns:
            It is off by at most :data:`RELATIVE_ERROR` of the number; NaN if nothing was counted.
        """
        places = [(-index, -1) for index in sorted(self.negative, reverse=True)]
        counts = [self.negative[-place] for place, _ in places]
        if self.zero:
            places.append((0, 0))
            counts.append(self.zero)
        ascending = sorted(self.positive)
        places += [(index, 1) for index in ascending]
        counts += [self.positive[index] for index in ascending]
        cumulative = list(accumulate(counts))
        if not cumulative:
            return math.nan
        place, sign = places[bisect_left(cumulative, math.floor(fraction * (cumulative[-1] - 1)) + 1)]
        if sign == 0:
            return 0.0
        # The harmonic mean of the bucket's bounds is equally far, in proportion, from both.
        lower, upper = upper_bound(sign * place - 1), upper_bound(sign * place)
        return sign * 2 * lower * upper / (lower + upper)

    def cumulative(self, bounds: Sequence[float]) -> list[int]:
        """How many numbers are at most each of ``bounds``, which are powers of two, ascending, exactly.

        Args:
            bounds: powers of two above 0.

        Returns:
            One count for each bound.
        """
        limits = [round(math.log2(bound)) * PER_OCTAVE for bound in bounds]
        below = self.negative.total() + self.zero
        indices = sorted(self.positive)
        totals = [0, *accumulate(self.positive[index] for index in indices)]
        return [below + totals[bisect_left(indices, limit)] for limit in limits]
