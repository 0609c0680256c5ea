"""Interrupted calls of a tracker of a sharded table with a fused optimizer; each case runs on one rank."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from delta_tracker import TrackingMode
from tests.models import Spec, Table, shard
from tests.tracker.interrupted_calls import Trainer, World, problems

CALLS = (
    "backward", "get_delta", "get_delta_uncommitted", "commit", "step", "clear", "mark_changed", "load_state_dict",
    "reattach", "record_ids", "record_embeddings",
)  # fmt: skip


class _Sum(nn.Module):
    """Layer without parameters, because DistributedDataParallel fails after a backward pass that was interrupted."""

    in_features = 4

    def forward(self, rows: Tensor) -> Tensor:
        """Return the rows."""
        return rows


class _Fused(Trainer):
    """A sharded model whose optimizer writes rows in the backward pass."""

    def __init__(self) -> None:
        self.model = shard(Spec([Table("t", 16, "row", dim=4)], bag=True, optimizer="SGD"), dense=_Sum())
        self.optimizers = []

    def backward(self, *ids: int) -> None:
        """Train a batch."""
        features = KeyedJaggedTensor(keys=["t"], values=torch.tensor(ids), lengths=torch.tensor([len(ids)]))
        self.model(features).backward()


def _fused(mode: str) -> World:
    return World(_Fused(), TrackingMode[mode], delete_on_read=True)


def case(rank: int, world_size: int, call: str, mode: str, sample: int | None) -> list[str]:
    """Run all points of a call, or a sample of them, and return the promises that break."""
    del rank, world_size
    return problems(call, partial(_fused, mode), sample)
