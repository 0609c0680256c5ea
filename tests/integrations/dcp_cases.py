"""Cases for checkpoints of DCP that a rank without any shard saves and loads; each runs on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from delta_tracker import ModelDeltaTracker
from delta_tracker.integrations.dcp import SavedTracker
from tests.models import Spec, Table, batch, shard
from tests.recovery.restore_cases import same
from tests.tracker.checkpointing_cases import log_state
from tests.tracker.checkpointing_cases import same as same_log


class _Trainer:
    """Job whose only table is on rank 1, with a dense optimizer."""

    def __init__(self, seed: int, *, is_flat: bool, num_batches: int) -> None:
        spec = Spec([Table("t", 10, "table:1")], bag=True)
        self.model = shard(spec)
        self.top = self.model.module.dense
        self.optimizer, self.tracker = torch.optim.Adam(self.top.parameters()), ModelDeltaTracker(self.model)
        self._options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
        draw = torch.Generator().manual_seed(seed)
        for _ in range(num_batches):
            self.optimizer.zero_grad()
            self.model(batch(spec, draw)).backward()
            self.optimizer.step()
            self.tracker.step()

    def states(self, tracker: Any, *, has_empty: bool) -> dict[str, Any]:
        dense = get_optimizer_state_dict(self.top, self.optimizer, options=self._options)
        states = {"model": self.model, "optimizer": dense, "tracker": tracker}
        fused = self.model.fused_optimizer
        return {**states, "fused": fused} if has_empty or fused.state_dict()["state"] else states

    def load(self, path: str, *, has_empty: bool) -> None:
        dcp.load(loaded := self.states(SavedTracker(self.tracker, path), has_empty=has_empty), checkpoint_id=path)
        set_optimizer_state_dict(self.top, self.optimizer, optim_state_dict=loaded["optimizer"], options=self._options)

    def held(self) -> dict[str, Any]:
        return {
            "rows": dict(self.tracker.read_tables()),
            "sums": [self.tracker.live.state_views(fqn) for fqn in self.tracker.shards],
            "top": dict(self.top.named_parameters()),
            "optimizer": self.optimizer.state_dict(),
        }


def without_a_shard(rank: int, world_size: int, path: str, *, is_flat: bool, has_empty: bool) -> list[Any]:
    """Save and load a job; return the error of the load, and whether everything is restored."""
    source = _Trainer(rank, is_flat=is_flat, num_batches=3)
    dcp.save(source.states(source.tracker, has_empty=has_empty), checkpoint_id=path)
    target = _Trainer(rank + 7, is_flat=is_flat, num_batches=1)
    assert not same(target.held(), source.held())
    error = ""
    try:
        target.load(path, has_empty=has_empty)
    except CheckpointException as raised:
        error = str(raised)
    is_log = same_log(log_state(target.tracker), log_state(source.tracker))
    return [error, same(target.held(), source.held()) and is_log, sum(source.tracker.num_pending().values())]
