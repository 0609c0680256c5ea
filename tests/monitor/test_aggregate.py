"""Aggregated values against straightforward computations."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor.aggregate import Aggregate, check_aggregations, plain_number
from delta_tracker.monitor.buckets import MAX, MIN

_magnitudes = st.floats(MIN, MAX, exclude_min=True)

_numbers = st.one_of(_magnitudes, _magnitudes.map(lambda x: -x), st.just(0.0), st.integers(-(10**6), 10**6))

_lists = st.lists(_numbers, max_size=60)


def _aggregate(values) -> Aggregate:
    result = Aggregate(with_spread=True, with_buckets=True)
    result.extend(values)
    return result


@given(_lists, _lists, _lists)
def test_merging_is_associative_and_the_same_as_recording_everything(first, second, third) -> None:
    left = _aggregate(first)
    left.merge(_aggregate(second))
    left.merge(_aggregate(third))
    tail = _aggregate(second)
    tail.merge(_aggregate(third))
    right = _aggregate(first)
    right.merge(tail)
    whole = _aggregate([*first, *second, *third])
    for merged in (left, right):
        for name in ("count", "min", "max", "value"):
            assert merged.value(name) == whole.value(name)
        largest = max(map(abs, (*first, *second, *third)), default=0)
        for name in ("sum", "mean", "std"):
            exact = whole.value(name)
            assert merged.value(name) == (None if exact is None else pytest.approx(exact, abs=1e-9 * largest))
        assert merged.buckets.positive == whole.buckets.positive
        assert merged.buckets.negative == whole.buckets.negative
        assert merged.buckets.zero == whole.buckets.zero


@given(st.lists(st.lists(st.integers(-1000, 1000), max_size=9), max_size=9))
def test_figures(chunks) -> None:
    aggregate = Aggregate(with_spread=True)
    for chunk in chunks:
        aggregate.extend(chunk)
    values = [value for chunk in chunks for value in chunk]
    assert (aggregate.value("count"), aggregate.value("sum")) == (len(values), sum(values))
    if not values:
        assert all(aggregate.value(name) is None for name in ("value", "mean", "min", "max", "std"))
        return
    assert aggregate.value("value") == values[-1]
    assert (aggregate.value("min"), aggregate.value("max")) == (min(values), max(values))
    assert aggregate.value("mean") == pytest.approx(statistics.fmean(values))
    deviation = statistics.stdev(values) if len(values) > 1 else None
    assert aggregate.value("std") == (None if deviation is None else pytest.approx(deviation, abs=1e-9))


def test_a_small_spread_on_a_large_mean_is_not_lost() -> None:
    aggregate = Aggregate(with_spread=True)
    for number in range(10_000):
        aggregate.extend([1e9 + number % 2])
    assert aggregate.value("std") == pytest.approx(0.5, rel=1e-3)


class _Raises:
    def __float__(self) -> float:
        raise RuntimeError("no number")


class _OnDevice:
    class device:  # noqa: N801
        type = "cuda"

    def __float__(self) -> float:
        raise AssertionError("this would wait for the device")


def test_non_finite_numbers_are_counted_and_left_out() -> None:
    aggregate = _aggregate([1, 2.5])
    values = [math.nan, math.inf, -math.inf, "x", None, _Raises(), _OnDevice(), 10**400, 3]
    aggregate.extend(list(map(plain_number, values)))
    aggregate.extend([math.nan])
    assert (aggregate.count, aggregate.num_rejected, aggregate.total) == (3, 9, 6.5)
    assert math.isfinite(aggregate.value("p99"))


def test_masked_values_are_rejected() -> None:
    aggregate = _aggregate([1, 2.5])
    values = [np.ma.masked, np.ma.array(7.0, mask=True), np.ma.array([8.0], mask=[True]), np.ma.array(3.0)]
    aggregate.extend(list(map(plain_number, values)))
    assert (aggregate.count, aggregate.num_rejected, aggregate.total) == (3, 3, 6.5)


def test_sums_beyond_a_float_raise_nothing() -> None:
    for values in ([1e308] * 20, [10**308] * 20, [*[10**308] * 20, 0.5], [-1e308, 10**308, 1e308, 1e308]):
        aggregate = _aggregate(values)
        aggregate.extend(values)
        assert aggregate.count == 2 * len(values)
        assert aggregate.value("p50") is not None


def test_integers_are_summed_exactly() -> None:
    aggregate = Aggregate(is_counter=True)
    aggregate.extend([2**60, 1])
    aggregate.extend([True, 2**60])
    assert aggregate.total == 2**61 + 2


def test_a_counter_refuses_negative_values() -> None:
    aggregate = Aggregate(is_counter=True)
    aggregate.extend([5, -3, 2])
    assert (aggregate.total, aggregate.num_rejected) == (7, 1)


def test_extreme_magnitudes_are_counted_at_the_ends() -> None:
    aggregate = _aggregate([5e-324, 1e-300, 1e300, -1e300])
    assert aggregate.buckets.count == 4
    assert aggregate.value("min") == -1e300
    assert aggregate.value("p0") == pytest.approx(-MAX, rel=0.1)
    assert aggregate.value("p75") == pytest.approx(MIN, rel=0.1)
    assert len(aggregate.buckets.positive) == 2


@pytest.mark.parametrize("bad", ["mean", ("median",), ("p100",), ("p",), (3,)])
def test_unknown_aggregations_are_refused(bad) -> None:
    with pytest.raises(InvalidArgumentError, match="aggregations"):
        check_aggregations(bad)
