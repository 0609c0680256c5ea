"""The estimate of a store's time contradicts no modification time, whatever this host's clock."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from delta_tracker.stream.store_clock import StoreClock


@given(
    st.floats(-1e5, 1e5),
    st.sampled_from([0.001, 1.0]),
    st.lists(st.tuples(st.floats(0.01, 100.0), st.booleans()), min_size=1, max_size=30),
)
@settings(deadline=None)
def test_the_estimate_is_as_exact_as_the_looks(skew: float, resolution: float, steps: list[tuple[float, bool]]) -> None:
    """Objects are written at random, and looked at after each pause."""
    true = 1e9
    clock = StoreClock(lambda: true + skew)
    modified = [true]
    is_bounded, exact = False, float("inf")
    for number, (pause, is_written) in enumerate(steps):
        if is_written:
            modified.append((true + pause / 2) // resolution * resolution)
        true += pause
        newest = max(modified)
        clock.observe("log", modified, began=clock.reader_time())
        assert clock.now() >= newest - 1e-6, "an age would be negative"
        # A coarse time may equal the one before, and then shows nothing new.
        if number and is_written and modified[-1] > max(modified[:-1]):
            is_bounded, exact = True, min(exact, pause + 1.0 + resolution)
        if is_bounded:
            assert abs(clock.now() - true) <= max(exact, 2.0) + 1e-3
        if skew == 0:
            assert clock.offset == 0


def test_a_clock_that_is_set_is_followed() -> None:
    reader = [1000.0]
    clock = StoreClock(lambda: reader[0])
    for number in range(3):
        clock.observe("log", [1000.0 + 10 * number], began=reader[0])
        reader[0] += 10
    assert clock.offset == 0
    reader[0] -= 3600
    clock.observe("log", [1030.0], began=reader[0])
    assert clock.now() == 1030.0
