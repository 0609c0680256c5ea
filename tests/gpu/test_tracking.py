"""Tracker, publisher and predictor on the device, with a collection of plain torch instead of torchrec's."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from benchmarks.plain_torchrec import PlainModel
from delta_tracker import ModelDeltaTracker, Predictor, Publisher, Storage, TrackingMode
from delta_tracker.sharding.watcher import Watcher
from tests.gpu.devices import ENGINES, IS_CUDA, IS_TINY, OF_MODULES, no_sync

pytestmark = pytest.mark.usefixtures("plain_torchrec")

_SCALE = 1 if IS_TINY else 1000
_TABLES = {"a": (200 * _SCALE, 8), "b": (31 * _SCALE, 16), "c": (77, 4)}
_MODES = [TrackingMode.ID_ONLY, TrackingMode.EMBEDDING]
# The simulated device holds no modules: there, the same cases run on the CPU with its fastest engine too.
_ENGINES = ENGINES if IS_CUDA else ["torch", None]


def _batch(seed: int, device: torch.device = OF_MODULES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(-1, rows + 1, (rows // 3 + 5,), generator=generator).clamp(0, rows - 1).to(device)
        for name, (rows, _) in _TABLES.items()
    }


def _copies(model: PlainModel) -> dict[str, Tensor]:
    return {fqn: table.cpu().clone() for fqn, table in model.weights().items()}


def _same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(table.view(torch.uint8), other[fqn].view(torch.uint8)) for fqn, table in one.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("engine", _ENGINES)
def test_reported_rows_are_those_whose_bits_changed(engine: str | None, dtype: torch.dtype, tmp_path) -> None:
    """Training is undisturbed too: a model without a tracker ends with the same bits."""
    model, twin = (PlainModel(_TABLES, OF_MODULES, dtype) for _ in range(2))
    storage = Storage(f"file://{tmp_path}")
    trackers = {mode: ModelDeltaTracker(model, ["reader", "stream"], mode=mode, engine=engine) for mode in _MODES}
    publisher = Publisher(trackers[TrackingMode.EMBEDDING], storage, "stream")
    served = {fqn: torch.zeros_like(table) for fqn, table in model.weights().items()}
    predictor = Predictor(served, storage)
    publisher.snapshot()
    for number in range(4):
        before = _copies(model)
        for each in (model, twin):
            each.train_on(_batch(number))
        now = _copies(model)
        for mode, tracker in trackers.items():
            tracker.step()
            delta = tracker.get_delta("reader", with_values=True)
            for fqn, table in now.items():
                changed = (table != before[fqn]).any(dim=1).nonzero().flatten()
                rows = delta[fqn]
                assert torch.equal(rows.ids.cpu(), changed), (fqn, mode)
                assert torch.equal(rows.values.cpu(), table[changed]), (fqn, mode)
                if mode is TrackingMode.EMBEDDING:
                    assert torch.equal(rows.states.cpu(), before[fqn][changed]), fqn
        publisher.snapshot() if number == 2 else publisher.publish()
        predictor.sync()
        assert _same_bits({fqn: table.cpu() for fqn, table in served.items()}, now)
    publisher.close()
    assert _same_bits(_copies(model), _copies(twin))
    assert [tracker.num_hook_errors for tracker in trackers.values()] == [0, 0]


@pytest.mark.parametrize("mode", _MODES)
@pytest.mark.parametrize("engine", _ENGINES)
def test_a_resumed_trainer_sends_the_rows_after_its_checkpoint(
    engine: str | None, mode: TrackingMode, tmp_path
) -> None:
    """The ids of these rows come from the stream, those of ``mark_changed`` from its caller: they are on the host."""
    model = PlainModel(_TABLES, OF_MODULES)
    storage = Storage(f"file://{tmp_path}")
    with ModelDeltaTracker(model, mode=mode, engine=engine) as tracker:
        publisher = Publisher(tracker, storage)
        publisher.snapshot()
        saved = tracker.state_dict()
        model.train_on(_batch(0))
        tracker.step()
        publisher.publish()
        publisher.close()
    served = {fqn: torch.zeros_like(table) for fqn, table in model.weights().items()}
    predictor = Predictor(served, storage)
    predictor.sync()
    with ModelDeltaTracker(model, mode=mode, engine=engine) as tracker:
        tracker.load_state_dict(saved)
        resumed = Publisher(tracker, storage)
        fqn = next(iter(tracker.tables))
        with torch.no_grad():
            model.weights()[fqn].data[3] = 7
        tracker.mark_changed(fqn, torch.tensor([3]))
        assert torch.equal(tracker.read_rows(fqn, torch.tensor([3])), model.weights()[fqn][3:4])
        assert resumed.publish().kind == "delta"
        resumed.close()
    predictor.sync()
    assert _same_bits({fqn: table.cpu() for fqn, table in served.items()}, _copies(model))


@pytest.mark.parametrize("record", ["updates", "lookups"])
@pytest.mark.parametrize("mode", _MODES)
@pytest.mark.parametrize("engine", _ENGINES)
def test_hooks_do_not_wait_for_the_device(engine: str | None, mode: TrackingMode, record: str) -> None:
    model = PlainModel(_TABLES, OF_MODULES)
    contained = Watcher._contained
    num_calls = 0

    def watched(self: Watcher, action: Any, *, otherwise: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        with no_sync():
            return contained(self, action, otherwise=otherwise)

    with ModelDeltaTracker(model, mode=mode, record=record, engine=engine) as tracker:
        model.train_on(_batch(0))
        with mock.patch.object(Watcher, "_contained", watched):
            for number in range(1, 4):
                model.train_on(_batch(number))
                with no_sync():
                    tracker.step()
        assert num_calls >= 3 * 3
        assert tracker.num_hook_errors == 0
        for fqn, rows in tracker.get_delta().items():
            name = fqn.rpartition(".")[2]
            assert torch.equal(rows.ids.cpu(), torch.cat([_batch(number)[name].cpu() for number in range(4)]).unique())


def test_memory_of_old_states_is_bounded_by_the_rows_that_changed() -> None:
    """40 batches of 65,536 ids over 50,000 rows once took 660 MiB on a device instead of 12.6."""
    num_rows, num_ids, dim = (50, 66, 8) if IS_TINY else (50_000, 65_536, 64)
    model = PlainModel({"t": (num_rows, dim)}, OF_MODULES)
    generator = torch.Generator().manual_seed(0)
    with ModelDeltaTracker(model, mode=TrackingMode.EMBEDDING) as tracker:
        if IS_CUDA:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        for _ in range(40):
            model.train_on({"t": torch.randint(0, num_rows, (num_ids,), generator=generator).to(OF_MODULES)})
            tracker.step()
        bound = 2 * num_rows * (4 * dim + 8) + (8 << 20)
        assert sum(store.log_bytes for store in tracker.store.values()) <= bound
        if IS_CUDA:
            per_batch = 8 * num_ids * (4 * dim + 8)  # the copies that a step needs at a time
            assert torch.cuda.max_memory_allocated() - before <= bound + per_batch
        assert len(tracker.get_delta()["ec.embeddings.t"]) == num_rows
