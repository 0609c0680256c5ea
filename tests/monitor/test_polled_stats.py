"""Passive stats are read once per collection, and one that raises does not affect others."""

from __future__ import annotations

import pytest

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor import Kind
from tests.monitor.figures import window_figures


def test_passive_stats_are_read_once_per_collection(monitor) -> None:
    readings = iter([3, None, {"x": 1}, 9, 4])
    monitor.passive("p", lambda: next(readings))
    total = iter([10, 25, 5])
    monitor.passive("total", lambda: next(total), kind=Kind.COUNTER)
    monitor.passive("by", lambda: {"a": 1, "b": 2}, labels=["k"])
    monitor.passive("pair", lambda: {("a", "b"): 1}, labels=["k", "l"])
    collections = [monitor.collect() for _ in range(3)]
    assert [window_figures(collection, "p") for collection in collections] == [[(1, {"value": 3})], [], []]
    assert [window_figures(collection, "total") for collection in collections] == [
        [(1, {"sum": 10})],
        [(1, {"sum": 15})],
        [(1, {"sum": 5})],
    ]
    assert {each.labels for each in collections[0].windows if each.definition.name == "by"} == {
        (("k", "a"),),
        (("k", "b"),),
    }
    with pytest.raises(InvalidArgumentError, match="callback"):
        monitor.passive("p", lambda: 1)


def test_a_callback_that_raises_does_not_affect_others(monitor, caplog) -> None:
    def broken() -> float:
        raise RuntimeError("broken on purpose")

    monitor.passive("broken", broken)
    monitor.passive("fine", lambda: 1)
    for _ in range(3):
        collection = monitor.collect()
    assert window_figures(collection, "fine") == [(1, {"value": 1})]
    assert len([record for record in caplog.records if "broken" in record.message]) == 1
    counts = {t.labels: t.figures.total for t in monitor.collect().totals if t.definition.name.endswith("_errors")}
    assert counts == {(("outlet", "broken"),): 1}
