"""Charts: positions of values, round ticks, and the paths of bars and lines."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_tracker.cli.page import (
    HEIGHT,
    WIDTH,
    Scale,
    bars,
    even_slots,
    line,
    linear,
    logarithmic,
    slots_of,
)

_NUMBER = r"(-?[\d.]+)"


def test_values_have_their_places_between_the_ends() -> None:
    assert [Scale(0.0, 40.0)(value) for value in (-1, 0, 10, 40, 41)] == [0, 0, 25, 100, 100]
    scale = Scale(1.0, 1e4, is_log=True)
    assert [scale(value) for value in (0.1, 1, 10, 1e4, 1e5)] == pytest.approx([0, 0, 25, 100, 100])


@given(st.floats(1e-9, 1e15))
def test_a_linear_scale_reaches_its_highest_value_in_few_round_steps(highest: float) -> None:
    scale = linear(highest)
    ticks = scale.ticks(str)
    assert scale.low == 0
    assert scale.high >= highest * (1 - 1e-6)
    assert scale.high <= 2 * highest * (1 + 1e-6)
    assert 2 <= len(ticks) <= 6
    assert [tick.position for tick in ticks] == pytest.approx(
        [100 * i / (len(ticks) - 1) for i in range(len(ticks))], abs=0.01
    )


def test_a_scale_of_nothing_has_a_height() -> None:
    assert linear(0) == Scale(0.0, 1.0)
    assert logarithmic([]) == logarithmic([0.0, -1.0]) == Scale(1.0, 10.0, is_log=True)


def test_a_logarithmic_scale_lies_between_powers_of_ten() -> None:
    scale = logarithmic([0.0, 0.03, 700.0])
    assert (scale.low, scale.high) == pytest.approx((0.01, 1000.0))
    assert [tick.label for tick in scale.ticks("{:g}".format)] == ["0.01", "0.1", "1", "10", "100", "1000"]
    assert len(logarithmic([1e-9, 1e9]).ticks(str)) <= 6


def test_bars_are_stacked_side_by_side() -> None:
    path = bars(even_slots(4), [50, 0, 25, 100], [0, 0, 10, 0], 0.2)
    found = re.findall(rf"M{_NUMBER} {_NUMBER}v{_NUMBER}h{_NUMBER}v{_NUMBER}z", path)
    assert [tuple(map(float, each)) for each in found] == [
        (25.0, 100.0, -50.0, 200.0, 50.0),
        (525.0, 90.0, -25.0, 200.0, 25.0),
        (775.0, 100.0, -100.0, 200.0, 100.0),
    ]
    assert bars([], []) == bars(even_slots(1), [0.0]) == ""


def test_a_line_goes_through_its_points() -> None:
    assert line([(0.0, 0.0), (50.0, 75.0), (100.0, 100.0)]) == f"M0 {HEIGHT}L500 25L{WIDTH} 0"


@given(st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 1e5)), min_size=2, max_size=30), st.floats(0.1, 1e4))
def test_slots_end_at_their_times_and_stay_on_the_axis(lengths: list[tuple[float, float]], usual: float) -> None:
    spans, now = [], 1e9
    for pause, length in lengths:
        spans.append((now + pause, now + pause + length))
        now += pause + length
    low, high = spans[0][0] - usual, spans[-1][1]
    for (_, end), slot in zip(spans, slots_of(spans, usual), strict=True):
        assert slot.width >= 0.2 * (1 - 1e-9)
        assert slot.left >= 0
        assert slot.right == pytest.approx(max(0.2, 100 * (end - low) / (high - low)), abs=1e-3)
