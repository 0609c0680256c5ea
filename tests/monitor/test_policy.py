"""Policies: the program's settings override those in code, and invalid settings change nothing."""

from __future__ import annotations

import pytest

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor import Window
from tests.monitor.figures import total, window_figures, windows


def test_user_settings_override_those_in_code(monitor) -> None:
    before = monitor.stat("training.loss", aggregations=("mean",))
    assert monitor.configure("training.*", aggregations=("p95", "count"), window=Window(count=3)) == ["training.loss"]
    after = monitor.stat("training.accuracy", aggregations=("mean",))
    other = monitor.stat("serving.loss", aggregations=("mean",))
    for stat in (before, after, other):
        for value in (1.0, 2.0, 3.0):
            stat.add(value)
    collection = monitor.collect()
    assert set(windows(collection, "training.loss")[0].values) == {"p95", "count"}
    assert set(windows(collection, "training.accuracy")[0].values) == {"p95", "count"}
    assert window_figures(collection, "serving.loss") == [(3, {"mean": 2.0})]


def test_the_latest_pattern_wins_setting_by_setting(monitor) -> None:
    stat = monitor.stat("a.b")
    monitor.configure("a.*", raw=3, aggregations=("sum",))
    monitor.configure("*", aggregations=("max",))
    assert (stat.policy.raw, stat.policy.aggregations) == (3, ("max",))
    monitor.configure("a.*", raw=4)
    assert (stat.policy.raw, stat.policy.aggregations) == (4, ("sum",))


def test_a_changed_policy_ends_the_window_and_loses_nothing(monitor) -> None:
    stat = monitor.stat("s", aggregations=("sum",), window=Window(count=10))
    stat.add(1)
    monitor.configure("s", aggregations=("std", "p50"), window=Window())
    stat.add(2)
    stat.add(4)
    first, second = windows(monitor.collect(), "s")
    assert first.window.is_partial
    assert first.window.aggregate.total == 1
    assert second.values["std"] == pytest.approx(2**0.5)
    assert total(monitor.collect(), "s") == 7


def test_disabled_stats_take_nothing_until_they_are_enabled(monitor) -> None:
    stat = monitor.counter("c", enabled=False)
    cell = stat.cell()
    assert not stat.enabled
    stat.add(1)
    cell.add(1)
    assert not monitor.collect().totals
    monitor.configure("c", enabled=True)
    cell.add(5)
    assert window_figures(monitor.collect(), "c") == [(1, {"sum": 5})]


@pytest.mark.parametrize(
    "settings_",
    [{"windows": 3}, {"raw": -1}, {"when_empty": "hide"}, {"aggregations": ("x",)}, {"enabled": 1}, {"window": 5}],
    ids=str,
)
def test_bad_settings_change_nothing(monitor, settings_) -> None:
    stat = monitor.stat("s")
    policy = stat.policy
    with pytest.raises(InvalidArgumentError):
        monitor.configure("*", **settings_)
    with pytest.raises(InvalidArgumentError):
        monitor.stat("t", **settings_)
    assert stat.policy == policy
    assert [each.name for each in monitor.find()] == ["s"]
