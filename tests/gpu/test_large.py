"""A shard of more than 2^31 elements, whose last rows 32-bit offsets cannot reach."""

from __future__ import annotations

import pytest
import torch

from benchmarks.plain_torchrec import PlainModel
from delta_tracker import ModelDeltaTracker, TrackingMode
from delta_tracker.row_target import TensorTarget
from tests.gpu.devices import ENGINES, IS_CUDA, OF_MODULES

_DIM = 128
_FIRST = 2**31 // _DIM if IS_CUDA else 70
"""First row that begins at 2^31 elements or, without a GPU, any row."""
_NUM_ROWS = _FIRST + 1000
_NUM_BYTES = 2 * _NUM_ROWS * _DIM


def _needs_bytes(num_bytes: int) -> None:
    free = torch.cuda.mem_get_info()[0] if IS_CUDA else num_bytes
    if free < num_bytes:
        pytest.skip(f"needs {num_bytes >> 30} GiB of device memory, and {free >> 30} are free")


@pytest.mark.usefixtures("plain_torchrec")
@pytest.mark.parametrize("engine", ENGINES)
def test_rows_beyond_2_31_elements_are_tracked(engine: str) -> None:
    _needs_bytes(2 * _NUM_BYTES)
    model = PlainModel({"t": (_NUM_ROWS, _DIM)}, OF_MODULES, torch.float16)
    (weights,) = model.weights().values()
    ids = torch.tensor([0, 1, _FIRST - 1, _FIRST, _NUM_ROWS - 1], device=OF_MODULES)
    with ModelDeltaTracker(model, mode=TrackingMode.EMBEDDING, engine=engine) as tracker:
        weights[ids] = torch.arange(5, dtype=torch.float16, device=OF_MODULES).view(-1, 1)
        tracker.clear()
        model.train_on({"t": ids})
        rows = tracker.get_delta(with_values=True)["ec.embeddings.t"]
        assert torch.equal(rows.ids, ids)
        assert torch.equal(rows.states[:, 0].float().cpu(), torch.arange(5.0))
        assert torch.equal(rows.values[:, -1].float().cpu(), torch.arange(5.0) * 0.75 + 0.125)


def test_rows_beyond_2_31_elements_are_applied() -> None:
    _needs_bytes(2 * _NUM_BYTES)
    table = torch.zeros(_NUM_ROWS, _DIM, dtype=torch.float16, device=OF_MODULES)
    target = TensorTarget.of(table)
    ids = torch.tensor([0, 1, _FIRST - 1, _FIRST, _NUM_ROWS - 1])
    values = torch.rand(5, _DIM).half()
    target.write(ids, target.prepare(values, (0, _DIM)), (0, _DIM))
    last = slice(_NUM_ROWS - 4, _NUM_ROWS - 1)
    target.write(last, target.prepare(values[:3], (0, _DIM)), (0, _DIM))
    assert torch.equal(table[ids.to(OF_MODULES)].cpu(), values)
    assert torch.equal(table[last].cpu(), values[:3])
    assert int((table[:, 0] != 0).sum()) == len(ids) + 3
