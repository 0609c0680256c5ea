"""Hooks return while the device sleeps for 200 ms. Without a GPU, the device is simulated: a sleep ends with a wait."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks.plain_torchrec import PlainModel
from delta_tracker import ModelDeltaTracker, TrackingMode
from delta_tracker.sharding.watcher import Watcher
from delta_tracker.tracker.change_log import ChangeLog
from delta_tracker.tracker.store.segments import SegmentStore
from tests.fake_streams.simulation import fake_streams
from tests.gpu.devices import ENGINES, IS_CUDA, OF_MODULES
from tests.gpu.waits import Sleep, run_asleep

_LATE = 1  # seed with which simulated operations run as late as possible
_CUDA = torch.device("cuda", 0)
_ROWS = 100_000 if IS_CUDA else 100


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    """A GPU, or a simulated one."""
    if IS_CUDA:
        yield
        return
    with fake_streams(_LATE):
        yield


def test_a_sleep_is_over_only_after_a_wait() -> None:
    on_it = torch.zeros(1).to(_CUDA)
    for wait in (torch.cuda.synchronize, on_it.tolist):
        torch.cuda.synchronize()
        sleep = Sleep()
        on_it.add_(1)
        assert not sleep.is_over
        wait()
        assert sleep.is_over


@pytest.mark.parametrize("with_states", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_marks_return_while_the_device_sleeps(engine: str, with_states: bool) -> None:
    weights = torch.rand(_ROWS, 4).to(_CUDA)
    old_states = (lambda ids: weights.index_select(0, ids)) if with_states else None
    store = SegmentStore(_ROWS, _CUDA, engine=engine, old_states=old_states)
    log = ChangeLog({"t": store}, ["a"], delete_on_read=True, max_bytes=None)
    lists = [torch.randint(0, _ROWS, (_ROWS // 2,)) for _ in range(4)]
    on_it = [ids.to(_CUDA) for ids in lists]
    for number, ids in enumerate(on_it):
        torch.cuda.synchronize()
        sleep = Sleep()
        log.writes.begin_write(number, {"t": ids})
        log.writes.end_write(number, {"t": ids})
        log.consumers.step()
        assert number < 2 or not sleep.is_over, number  # the first ones compile kernels and allocate pinned memory
    read = log.consumers.read("a")
    assert torch.equal(read.rows["t"].ids.cpu(), torch.cat(lists).unique())


@pytest.mark.usefixtures("plain_torchrec")
@pytest.mark.parametrize("record", ["updates", "lookups"])
@pytest.mark.parametrize("mode", [TrackingMode.ID_ONLY, TrackingMode.EMBEDDING])
@pytest.mark.parametrize("engine", ENGINES)
def test_hooks_return_while_the_device_sleeps(engine: str, mode: TrackingMode, record: str) -> None:
    tables = {"a": (_ROWS, 8), "b": (_ROWS // 10, 16)}
    model = PlainModel(tables, OF_MODULES)
    generator = torch.Generator().manual_seed(0)
    batches = [
        {name: torch.randint(0, rows, (rows // 3,), generator=generator) for name, (rows, _) in tables.items()}
        for _ in range(5)
    ]
    on_it = [{name: ids.to(OF_MODULES) for name, ids in each.items()} for each in batches]
    model.train_on(on_it[0])
    assert run_asleep(lambda: model.train_on(on_it[0])).num_others == 0, "a step without a tracker waits"
    with ModelDeltaTracker(model, mode=mode, record=record, engine=engine) as tracker:

        def step(number: int) -> None:
            model.train_on(on_it[number])
            tracker.step()

        step(0)
        run_asleep(partial(step, 1))  # the first one may allocate pinned memory
        for number in range(2, 5):
            found = run_asleep(partial(step, number))
            assert found.waiting == []
            assert found.num_others == 0, "step() of the tracker waits"
            assert found.num_hooks >= 3
        assert tracker.num_hook_errors == 0
        for fqn, rows in tracker.get_delta().items():
            name = fqn.rpartition(".")[2]
            assert torch.equal(rows.ids.cpu(), torch.cat([each[name] for each in batches]).unique())


@pytest.mark.usefixtures("plain_torchrec")
def test_a_hook_that_waits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = PlainModel({"a": (_ROWS, 8)}, OF_MODULES)
    ids = {"a": torch.arange(10).to(OF_MODULES)}
    contained = Watcher._contained

    def waiting(self: Watcher, action: Any, *, otherwise: Any) -> Any:
        torch.cuda.current_stream().record_event().synchronize()
        return contained(self, action, otherwise=otherwise)

    with ModelDeltaTracker(model):
        model.train_on(ids)
        run_asleep(lambda: model.train_on(ids))
        assert run_asleep(lambda: model.train_on(ids)).waiting == []
        monkeypatch.setattr(Watcher, "_contained", waiting)
        found = run_asleep(lambda: model.train_on(ids))
        assert len(found.waiting) == found.num_hooks > 0
