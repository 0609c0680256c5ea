"""Logical counters in checkpoints: no count is lost or doubled at any world size."""

from __future__ import annotations

import json

import pytest
import torch
from torch.distributed import checkpoint as dcp

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor import Monitor
from delta_tracker.monitor.state import KEY, LogicalCounters, load, restore, state_dict, totals
from delta_tracker.tracker.checkpoint.counters import Mergeable

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


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


def _save(path, monitors: list[Monitor]) -> dcp.FileSystemReader:
    """Write a checkpoint as all ranks together would."""
    state = {}
    for rank, monitor in enumerate(monitors):
        state |= state_dict(rank, monitor)
    dcp.save({KEY: state, "weights": torch.ones(3)}, checkpoint_id=path, no_dist=True)
    return dcp.FileSystemReader(path)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_the_sum_over_ranks_stays(tmp_path, world_size) -> None:
    """Ranks that held 10 and 20 have 30 together, not 20 and not 60."""
    reader = _save(tmp_path, [_rank({"user": 10}, 0.5), _rank({"user": 20, "item": 7}), _rank({})])
    loaded = [_rank({"user": 1000}, 3, process=1) for _ in range(world_size)]
    taken = [load(reader, rank, world_size, monitor) for rank, monitor in enumerate(loaded)]
    assert sum(taken) == 3
    assert sum(_total(monitor, "rows") for monitor in loaded) == 37
    assert sum(_total(monitor, "samples") for monitor in loaded) == 0.5
    assert [_total(monitor, "process") for monitor in loaded] == [1] * world_size


def test_loading_twice_counts_once(tmp_path) -> None:
    reader = _save(tmp_path, [_rank({"user": 10})])
    monitor = _rank({"user": 3})
    for _ in range(3):
        assert load(reader, 0, 1, monitor) == 1
        assert _total(monitor, "rows") == 10
        monitor.find("rows")[0].cell(table="user").add(2)
        assert _total(monitor, "rows") == 12


def test_counts_after_a_restore_are_exact_and_windows_exclude_it(tmp_path) -> None:
    reader = _save(tmp_path, [_rank({"user": 10**15 + 1})])
    monitor = _rank({})
    load(reader, 0, 1, monitor)
    cell = monitor.find("rows")[0].cell(table="user")
    for _ in range(3000):
        cell.add(1)
    batch = monitor.collect()
    (window,) = (each for each in batch.windows if each.definition.name == "rows")
    assert window.values == {"sum": 3000}
    assert totals(monitor)["rows"] == [(["user"], 10**15 + 3001)]


def test_a_checkpoint_without_counters_changes_nothing(tmp_path) -> None:
    dcp.save({"weights": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    monitor = _rank({"user": 3})
    assert load(dcp.FileSystemReader(tmp_path), 0, 1, monitor) == 0
    assert _total(monitor, "rows") == 3


def test_counters_removed_from_the_program_are_left_out(tmp_path) -> None:
    reader = _save(tmp_path, [_rank({"user": 3}, 2)])
    monitor = Monitor()
    monitor.counter("samples", is_logical=True)
    load(reader, 0, 1, monitor)
    assert _total(monitor, "samples") == 2
    assert not monitor.find("rows")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b'{"other": {}}',
        json.dumps({"totals by label values": {"rows": [[["u"], -1]]}}).encode(),
        json.dumps({"totals by label values": {"rows": [[["u"], "1"]]}}).encode(),
        json.dumps({"totals by label values": {"rows": 3}}).encode(),
        json.dumps({"totals by label values": {"rows": [[["u", "v"], 1]]}}).encode(),
        b'{"totals by label values": {"rows": [[["u"], NaN]]}}',
    ],
)
def test_damaged_counters_are_refused_whole(tmp_path, text) -> None:
    tensor = torch.frombuffer(bytearray(text or b"\0"), dtype=torch.uint8)
    dcp.save({KEY: {"rank_0": tensor}}, checkpoint_id=tmp_path, no_dist=True)
    monitor = _rank({"user": 3})
    with pytest.raises(InvalidArgumentError):
        load(dcp.FileSystemReader(tmp_path), 0, 1, monitor)
    assert _total(monitor, "rows") == 3


def test_a_tensor_of_another_shape_is_refused_before_it_is_read(tmp_path) -> None:
    dcp.save({KEY: {"rank_0": torch.ones(2, 2)}}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(InvalidArgumentError, match="bytes"):
        load(dcp.FileSystemReader(tmp_path), 0, 1, Monitor())


def test_only_counters_can_be_logical() -> None:
    from delta_tracker.monitor.stat import Definition, Kind  # noqa: PLC0415

    with pytest.raises(InvalidArgumentError, match="counter"):
        Definition(name="g", kind=Kind.GAUGE, is_logical=True)


def test_restore_sums_parts() -> None:
    monitor = _rank({"user": 99})
    restore([{"rows": [(["user"], 1), (["item"], 2)]}, {"rows": [(["item"], 4)]}], monitor)
    assert {values[0]: total for values, total in totals(monitor)["rows"]} == {"user": 1, "item": 6}


def test_ranks_save_together(two_ranks, tmp_path) -> None:
    answers = two_ranks.run("tests.monitor.monitoring_cases:save_counters", path=str(tmp_path))
    assert answers == [10, 20]
    monitor = _rank({})
    load(dcp.FileSystemReader(tmp_path), 0, 1, monitor)
    assert _total(monitor, "rows") == 30


def test_a_trackers_checkpoint_can_carry_them() -> None:
    """In the required form: JSON-serializable parts that are merged before they are loaded."""
    ranks = [_rank({"user": 10}, 0.5), _rank({"user": 20, "item": 7}), _rank({})]
    counters = [LogicalCounters(monitor) for monitor in ranks]
    assert all(isinstance(each, Mergeable) for each in counters)
    parts = [json.loads(json.dumps(each.state_dict(), allow_nan=False)) for each in counters]
    loaded = _rank({"user": 99, "gone": 1}, 4)
    target = LogicalCounters(loaded)
    target.load_state_dict(json.loads(json.dumps(target.merge(parts))))
    assert {values[0]: total for values, total in totals(loaded)["rows"]} == {"user": 30, "item": 7}
    assert _total(loaded, "samples") == 0.5
    with pytest.raises(InvalidArgumentError, match="not in the counters' format"):
        target.merge([{"other": 1}])
    target.load_state_dict(target.merge([]))
    assert _total(loaded, "rows") == 0


def test_the_librarys_own_counters_are_restored_before_they_first_count() -> None:
    saved, loaded = Monitor(), Monitor()
    saved.metrics.touched_rows.cell(tracker="t", table="user", consumer="a").add(3)
    saved.metrics.published_rows.cell(publisher="p", table="user").add(2)
    target = LogicalCounters(loaded)
    target.load_state_dict(target.merge([LogicalCounters(saved).state_dict()]))
    assert totals(loaded) == totals(saved)
    loaded.metrics.touched_rows.cell(tracker="t", table="user", consumer="a").add(1)
    assert totals(loaded)["delta_tracker_touched_rows"] == [(["t", "user", "a"], 4)]


def test_cells_beyond_the_limit_are_summed() -> None:
    saved, loaded = _rank({"a": 1, "b": 2, "c": 4}), Monitor()
    loaded.counter("rows", labels=["table"], max_cells=1, is_logical=True)
    target = LogicalCounters(loaded)
    target.load_state_dict(target.merge([LogicalCounters(saved).state_dict()]))
    assert _total(loaded, "rows") == 7


def test_counters_with_other_labels_are_refused_before_anything_is_loaded() -> None:
    """A tracker first merges all registered counters, and only then loads them."""
    loaded = Monitor()
    loaded.counter("rows", labels=["table", "kind"], is_logical=True)
    with pytest.raises(InvalidArgumentError, match="Use the labels it was saved with"):
        LogicalCounters(loaded).merge([LogicalCounters(_rank({"user": 3})).state_dict()])
