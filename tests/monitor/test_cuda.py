"""The tests of the simulated device on a real one, where torch raises if the host would wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from delta_tracker import DeltaStore, EmbdUpdateMode
from delta_tracker.monitor import Monitor, Window
from delta_tracker.monitor.device.classification import DeviceClassification
from delta_tracker.monitor.device.metrics import DeviceCounter, DeviceHistogram, DeviceMean, DeviceSum
from delta_tracker.tracker.store.segments import SegmentStore

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@contextmanager
def _no_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_device_stats() -> None:
    monitor = Monitor()
    stats = [kind(kind.__name__, monitor=monitor) for kind in (DeviceMean, DeviceSum, DeviceCounter, DeviceHistogram)]
    classes = DeviceClassification("classes", 10, monitor=monitor)
    values = torch.rand(100, device="cuda")
    scores, targets = torch.rand(8, 10, device="cuda"), torch.randint(0, 10, (8,), device="cuda")
    stats[0].update(values)  # the first one may allocate
    torch.cuda.synchronize()
    with _no_sync():
        for _ in range(3):
            for stat in stats:
                for value in (values, values[0], 1.5, torch.tensor(2.0)):
                    stat.update(value)
            stats[0].update(values, values)
            stats[0].update(values, torch.tensor(2.0))
            classes.update(scores, targets)
            monitor.end_epoch()
    reports = {each.definition.name: each for each in monitor._collector.collect(is_last=True).windows}
    assert reports["DeviceSum"].values["sum"] == pytest.approx(3 * (float(values.sum() + values[0]) + 3.5), rel=1e-5)
    assert reports["DeviceHistogram"].count == 3 * 103


def test_readings_are_exact_while_another_stream_records() -> None:
    monitor = Monitor()
    stat = DeviceSum("s", monitor=monitor, window=Window(epoch=True))
    streams = [torch.cuda.Stream() for _ in range(3)]
    one = torch.ones((), device="cuda")
    torch.cuda.synchronize()
    for number in range(300):
        with torch.cuda.stream(streams[number % 3]):
            stat.update(one)
        if number % 50 == 49:
            monitor.collect()
    monitor.end_epoch()
    (report,) = (each for each in monitor._collector.collect(is_last=True).windows if each.definition.name == "s")
    assert (report.values["sum"], report.count) == (300, 300)


@pytest.mark.parametrize("with_states", [False, True])
@pytest.mark.parametrize("engine", ["torch", "triton"])
def test_stores(engine: str, with_states: bool) -> None:
    if engine == "triton":
        pytest.importorskip("triton")
    weights = torch.rand(1000, 4, device="cuda")
    old_states = (lambda ids: weights.index_select(0, ids)) if with_states else None
    store = SegmentStore(1000, "cuda", engine=engine, old_states=old_states)
    raw = DeltaStore(EmbdUpdateMode.FIRST if with_states else EmbdUpdateMode.NONE)
    ids = torch.randint(0, 1000, (64,), device="cuda")
    store.open_batch(-1, ids)  # the first one may compile
    torch.cuda.synchronize()
    with _no_sync():
        for batch in range(3):
            store.open_batch(batch, ids)
            store.close_batch(batch)
            raw.append(batch, "t", ids, weights[:64] if with_states else None)
        store.mark(ids, is_written=True)
        store.cut(1)
    assert store.changed(0, 1).ids.tolist() == sorted(set(ids.tolist()))


@pytest.mark.parametrize("max_device_bytes", [0, 1 << 30])
def test_old_states_take_the_memory_of_their_rows(max_device_bytes: int) -> None:
    weights = torch.rand(1_000_000, 64, device="cuda")
    store = SegmentStore(
        len(weights), "cuda", old_states=lambda ids: weights.index_select(0, ids), max_device_bytes=max_device_bytes
    )
    batches = [torch.randint(0, 200_000, (65_536,), device="cuda") for _ in range(40)]
    rows = torch.cat(batches).unique()
    store.open_batch(-1, batches[0])  # the first one allocates
    torch.cuda.synchronize()
    with _no_sync():
        for batch, ids in enumerate(batches):
            store.open_batch(batch, ids)
            store.close_batch(batch)
    torch.cuda.synchronize()
    store.cut(1)
    changed = store.changed(0, 1)
    assert torch.equal(changed.ids, rows)
    assert torch.equal(changed.states, weights[rows])
    assert store.log_bytes <= len(weights) + len(rows) * (8 + 64 * 4) * 8 / 7 + (1 << 20)
