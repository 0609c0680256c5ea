"""Stats: their windows, with a clock that the test sets."""

from __future__ import annotations

from datetime import timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from delta_tracker.monitor import Monitor, Window
from tests.monitor.clocks import ManualClock
from tests.monitor.figures import last_collection, total, window_figures, windows

_MEAN = ("mean", "sum")


@settings(max_examples=60, deadline=None)
@given(
    st.one_of(st.none(), st.integers(1, 7)),
    st.one_of(st.none(), st.integers(1, 5)),
    st.booleans(),
    st.lists(st.sampled_from(["add", "add", "add", "tick", "collect", "epoch"]), max_size=80),
)
def test_windows_against_a_slow_reference(count, seconds, epoch, schedule) -> None:
    clock = ManualClock()
    monitor = Monitor(clock)
    every = None if seconds is None else timedelta(seconds=seconds)
    window = Window(count=count, every=every, epoch=epoch)
    stat = monitor.stat("s", window=window, aggregations=("sum",))
    expected, is_open, begin, found, number = [], [], clock.now_ns, [], 0
    collects = count is None and seconds is None and not epoch

    def close() -> None:
        nonlocal is_open, begin
        if is_open:
            expected.append((tuple(is_open), begin, clock.now_ns))
        is_open, begin = [], clock.now_ns

    for action in schedule:
        if action == "add":
            number += 1
            stat.add(number)
            is_open.append(number)
            if len(is_open) == count:
                close()
        elif action == "tick":
            clock.go(1)
        elif action == "collect":
            found += windows(monitor.collect(), "s")
            if collects or (seconds is not None and clock.now_ns - begin >= seconds * 1e9):
                close()
        else:
            monitor.end_epoch()
            if epoch:
                close()
    found += windows(last_collection(monitor), "s")
    close()
    assert [(w.values["sum"], w.count, w.window.begin_ns, w.window.end_ns) for w in found] == [
        (sum(records), len(records), begin, end) for records, begin, end in expected
    ]
    assert total(monitor.collect(), "s") == number * (number + 1) / 2


def test_windows_by_count_carry_the_step_and_time_of_their_last_record(monitor, clock) -> None:
    stat = monitor.stat("loss", window=Window(count=20), aggregations=_MEAN)
    for step in range(50):
        monitor.step(step)
        stat.add(step)
        clock.go(1)
    reports = windows(monitor.collect(), "loss")
    assert [report.window.step for report in reports] == [19, 39]
    assert [report.values["mean"] for report in reports] == [9.5, 29.5]
    assert reports[1].window.time_ns - reports[0].window.time_ns == 20 * 10**9


def test_a_large_count_is_split_exactly(monitor) -> None:
    stat = monitor.stat("s", window=Window(count=1500), aggregations=("sum",))
    for number in range(4000):
        stat.add(number)
    found = window_figures(last_collection(monitor), "s")
    sums = [sum(range(1500)), sum(range(1500, 3000)), sum(range(3000, 4000))]
    assert found == [(1500, {"sum": sums[0]}), (1500, {"sum": sums[1]}), (1000, {"sum": sums[2]})]


def test_no_data_is_not_zero(monitor) -> None:
    monitor.stat("silent")
    monitor.gauge("zeroed", when_empty="zero", aggregations=("value", "mean"))
    collection = monitor.collect()
    assert window_figures(collection, "silent") == []
    assert window_figures(collection, "zeroed") == [(0, {"value": 0, "mean": 0})]
    assert not [total for total in collection.totals if total.definition.name in ("silent", "zeroed")]


def test_a_figure_without_data_is_left_out(monitor) -> None:
    stat = monitor.stat("s", aggregations=("std", "mean"))
    stat.add(4)
    assert window_figures(monitor.collect(), "s") == [(1, {"mean": 4})]
