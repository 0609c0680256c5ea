"""Charts: positions of values, round ticks, and the paths of bars."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_tracker.cli.page import Slot, bars, chart_slots, round_values

_NUMBER = r"(-?[\d.]+)"


@given(st.floats(1e-9, 1e15))
def test_an_axis_reaches_its_highest_value_in_few_round_steps(highest: float) -> None:
    values = round_values(highest)
    assert highest * (1 - 1e-6) <= values[-1] <= 2 * highest * (1 + 1e-6)
    assert 2 <= len(values) <= 6
    assert values == pytest.approx([values[-1] * index / (len(values) - 1) for index in range(len(values))])
    assert f"{values[1]:.6e}"[:8] in ("1.000000", "2.000000", "5.000000")


def test_an_axis_of_nothing_has_a_height() -> None:
    assert round_values(0) == round_values(1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])


def test_bars_are_stacked_side_by_side() -> None:
    path = bars([Slot(25.0 * index, 25.0) for index in range(4)], [50, 0, 25, 100], [0, 0, 10, 0], 0.2)
    found = re.findall(rf"M{_NUMBER} {_NUMBER}v{_NUMBER}h{_NUMBER}v{_NUMBER}z", path)
    assert [tuple(map(float, each)) for each in found] == [
        (25.0, 100.0, -50.0, 200.0, 50.0),
        (525.0, 90.0, -25.0, 200.0, 25.0),
        (775.0, 100.0, -100.0, 200.0, 100.0),
    ]
    assert bars([], [], [], 0.2) == bars([Slot(0.0, 100.0)], [0.0], [0.0], 0.2) == ""


@given(st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 1e5)), min_size=2, max_size=30), st.floats(0.1, 1e4))
def test_slots_end_at_their_times_and_stay_on_the_axis(lengths: list[tuple[float, float]], usual: float) -> None:
    spans, now = [], 1e9
    for pause, length in lengths:
        spans.append((now + pause, now + pause + length))
        now += pause + length
    low, high = spans[0][0] - usual, spans[-1][1]
    for (_, end), slot in zip(spans, chart_slots(spans, usual), strict=True):
        assert slot.width >= 0.2 * (1 - 1e-9)
        assert slot.left >= 0
        assert slot.left + slot.width == pytest.approx(max(0.2, 100 * (end - low) / (high - low)), abs=1e-3)
