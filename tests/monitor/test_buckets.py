"""Quantiles against sorting, and counts below bounds."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from delta_tracker.monitor.buckets import MAX, MIN, PER_OCTAVE, RELATIVE_ERROR, LogBuckets

_magnitudes = st.floats(MIN, MAX, exclude_min=True)

_numbers = st.one_of(_magnitudes, _magnitudes.map(lambda x: -x), st.just(0.0), st.integers(-(10**6), 10**6))

_ROUNDING = 1e-12

_POWERS = [2.0**exponent for exponent in range(-6, 9)]


@given(st.lists(_numbers, min_size=1, max_size=200), st.floats(0, 1))
def test_a_quantile_is_off_by_the_stated_fraction_at_most(values, fraction) -> None:
    buckets = LogBuckets()
    buckets.extend(values)
    rank = math.ceil(round(fraction * len(values), 6))
    exact = sorted(values)[max(0, rank - 1)]
    assert abs(buckets.quantile(fraction) - exact) <= (RELATIVE_ERROR + _ROUNDING) * abs(exact)


def test_a_small_window_has_its_slow_value_in_the_high_quantiles() -> None:
    buckets = LogBuckets()
    buckets.extend([0.1, 30.0])
    assert [round(buckets.quantile(fraction), 0) for fraction in (0.5, 0.95, 0.99)] == [0, 30, 30]


def test_the_stated_error_is_reached() -> None:
    """The stated error is not larger than necessary."""
    worst = 0.0
    for step in range(2000):
        value = 2 ** (step / 2000)
        buckets = LogBuckets()
        buckets.extend([value])
        worst = max(worst, abs(buckets.quantile(0.5) / value - 1))
    assert 0.98 * RELATIVE_ERROR < worst <= RELATIVE_ERROR + _ROUNDING


@settings(max_examples=50)
@given(st.lists(st.floats(-(2.0**8), 2.0**8), max_size=50))
def test_counts_below_bounds_are_exact(values) -> None:
    buckets = LogBuckets()
    buckets.extend(values)
    bounds = [2.0 ** (exponent / PER_OCTAVE) for exponent in range(-6 * PER_OCTAVE, 8 * PER_OCTAVE + 1)]
    # A number within a rounding of the bound may fall to either side: numbers that are powers of two never do.
    expected = [sum(value <= bound for value in values) for bound in bounds]
    close = [any(abs(value / bound - 1) < 1e-12 and value not in _POWERS for value in values) for bound in bounds]
    for found, exact, is_close in zip(buckets.cumulative(bounds), expected, close, strict=True):
        assert found == exact or is_close
