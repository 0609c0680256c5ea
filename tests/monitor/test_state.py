"""Logical counters in checkpoints: no count is lost or doubled at any world size."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor import Monitor
from delta_tracker.monitor.state import LogicalCounters
from delta_tracker.tracker.checkpoint.counters import Mergeable


def _rank(rows: dict[str, int], samples: float = 0, process: int = 5) -> Monitor:
    """Return the monitor of a rank with these counts."""
    monitor = Monitor()
    counter = monitor.counter("rows", labels=["table"], is_logical=True)
    for table, number in rows.items():
        counter.cell(table=table).add(number)
    if samples:
        monitor.counter("samples", is_logical=True).add(samples)
    else:
        monitor.counter("samples", is_logical=True)
    monitor.counter("process").add(process)
    return monitor


def _total(monitor: Monitor, name: str) -> float:
    return sum(each.figures.total for each in monitor.collect().totals if each.definition.name == name)


def _saved(*monitors: Monitor) -> list[dict[str, Any]]:
    """Return the states of all ranks, as they are in a checkpoint."""
    return [json.loads(json.dumps(LogicalCounters(each).state_dict(), allow_nan=False)) for each in monitors]


def _load(states: Sequence[Mapping[str, Any]], monitor: Monitor) -> None:
    counters = LogicalCounters(monitor)
    counters.load_state_dict(counters.merge(states))


def _totals(monitor: Monitor, name: str) -> dict[tuple[str, ...], float]:
    """Return the nonzero totals of a counter by label values."""
    (by_name,) = LogicalCounters(monitor).state_dict().values()
    return {tuple(values): total for values, total in by_name[name]}


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_the_sum_over_ranks_stays(world_size) -> None:
    """Ranks that held 10 and 20 have 30 together, not 20 and not 60."""
    states = _saved(_rank({"user": 10}, 0.5), _rank({"user": 20, "item": 7}), _rank({}))
    loaded = [_rank({"user": 1000}, 3, process=1) for _ in range(world_size)]
    for rank, monitor in enumerate(loaded):
        _load(states[rank::world_size], monitor)
    assert sum(_total(monitor, "rows") for monitor in loaded) == 37
    assert sum(_total(monitor, "samples") for monitor in loaded) == 0.5
    assert [_total(monitor, "process") for monitor in loaded] == [1] * world_size


def test_loading_twice_counts_once() -> None:
    states = _saved(_rank({"user": 10}))
    monitor = _rank({"user": 3})
    for _ in range(3):
        _load(states, monitor)
        assert _total(monitor, "rows") == 10
        monitor.find("rows")[0].cell(table="user").add(2)
        assert _total(monitor, "rows") == 12


def test_counts_after_a_restore_are_exact_and_windows_exclude_it() -> None:
    monitor = _rank({})
    _load(_saved(_rank({"user": 10**15 + 1})), monitor)
    cell = monitor.find("rows")[0].cell(table="user")
    for _ in range(3000):
        cell.add(1)
    collection = monitor.collect()
    (window,) = (each for each in collection.windows if each.definition.name == "rows")
    assert window.values == {"sum": 3000}
    assert _totals(monitor, "rows") == {("user",): 10**15 + 3001}


def test_counters_removed_from_the_program_are_left_out() -> None:
    monitor = Monitor()
    monitor.counter("samples", is_logical=True)
    _load(_saved(_rank({"user": 3}, 2)), monitor)
    assert _total(monitor, "samples") == 2
    assert not monitor.find("rows")


@pytest.mark.parametrize(
    "state",
    [
        [],
        {"other": {}},
        {"totals by label values": {"rows": [[["u"], -1]]}},
        {"totals by label values": {"rows": [[["u"], "1"]]}},
        {"totals by label values": {"rows": 3}},
        {"totals by label values": {"rows": [[["u", "v"], 1]]}},
        {"totals by label values": {"rows": [[["u"], float("nan")]]}},
    ],
)
def test_damaged_counters_are_refused_whole(state) -> None:
    monitor = _rank({"user": 3})
    with pytest.raises(InvalidArgumentError):
        LogicalCounters(monitor).load_state_dict(state)
    assert _total(monitor, "rows") == 3


def test_only_counters_can_be_logical() -> None:
    from delta_tracker.monitor.stat import Definition, Kind  # noqa: PLC0415

    with pytest.raises(InvalidArgumentError, match="counter"):
        Definition(name="g", kind=Kind.GAUGE, is_logical=True)


def test_a_trackers_checkpoint_can_carry_them() -> None:
    """In the required form: JSON-serializable parts that are merged before they are loaded."""
    ranks = [_rank({"user": 10}, 0.5), _rank({"user": 20, "item": 7}), _rank({})]
    loaded = _rank({"user": 99, "gone": 1}, 4)
    target = LogicalCounters(loaded)
    assert isinstance(target, Mergeable)
    target.load_state_dict(json.loads(json.dumps(target.merge(_saved(*ranks)))))
    assert _totals(loaded, "rows") == {("user",): 30, ("item",): 7}
    assert _total(loaded, "samples") == 0.5
    with pytest.raises(InvalidArgumentError, match="not in the counters' format"):
        target.merge([{"other": 1}])
    _load([], loaded)
    assert _total(loaded, "rows") == 0


def test_the_librarys_own_counters_are_restored_before_they_first_count() -> None:
    saved, loaded = Monitor(), Monitor()
    saved.metrics.touched_rows.cell(tracker="t", table="user", consumer="a").add(3)
    saved.metrics.published_rows.cell(publisher="p", table="user").add(2)
    _load(_saved(saved), loaded)
    assert _saved(loaded) == _saved(saved)
    loaded.metrics.touched_rows.cell(tracker="t", table="user", consumer="a").add(1)
    assert _totals(loaded, "delta_tracker_touched_rows") == {("t", "user", "a"): 4}


def test_cells_beyond_the_limit_are_summed() -> None:
    saved, loaded = _rank({"a": 1, "b": 2, "c": 4}), Monitor()
    loaded.counter("rows", labels=["table"], max_cells=1, is_logical=True)
    _load(_saved(saved), loaded)
    assert _total(loaded, "rows") == 7


def test_counters_with_other_labels_are_refused_before_anything_is_loaded() -> None:
    """A tracker first merges all registered counters, and only then loads them."""
    loaded = Monitor()
    loaded.counter("rows", labels=["table", "kind"], is_logical=True)
    with pytest.raises(InvalidArgumentError, match="Use the labels it was saved with"):
        LogicalCounters(loaded).merge(_saved(_rank({"user": 3})))
