"""A hook that fails loses no row: every allocation and every call of an engine in every hook fails."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from delta_tracker import ModelDeltaTracker
from delta_tracker.errors import MissingExtraError
from delta_tracker.tracker.row_sets import numba
from tests.sharding.hook_faults import Training, fail_at_every_point
from tests.sweeps import SWEEPS_ARE_WHOLE

_ROWS = 64


class _Plain(Training):
    """Training of sparse tables of plain modules."""

    def __init__(self, mode: str, engine: str) -> None:
        torch.manual_seed(0)
        self.model = nn.ModuleDict(
            {"a": nn.Embedding(_ROWS, 4, sparse=True), "b": nn.EmbeddingBag(_ROWS, 4, sparse=True)}
        )
        super().__init__(ModelDeltaTracker(self.model, mode=mode, engine=engine))
        weights = [table.weight for table in self.model.values()]
        self.optimizers = [torch.optim.Adagrad(weights[:1], lr=0.1), torch.optim.SGD(weights[1:], lr=0.1)]
        for optimizer in self.optimizers:
            optimizer.register_step_pre_hook(self.writing)
            optimizer.register_step_post_hook(self.written)

    def step(self, number: int) -> None:
        ids = torch.arange(8).view(2, 4) * 5 + number
        loss = self.model["a"](ids % _ROWS).sum() + self.model["b"](ids % _ROWS).sum()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()


@pytest.mark.promise("lossless", "contained")
@pytest.mark.parametrize("engine", ["torch", "numba"])
@pytest.mark.parametrize("mode", ["ID_ONLY", "EMBEDDING"])
def test_plain_tables(mode: str, engine: str) -> None:
    found = fail_at_every_point(_Plain(mode, engine), stride=1 if SWEEPS_ARE_WHOLE else 3)
    assert found["errors"] > found["failed"] > 0
