"""Cases for copies of tracked models, on real ranks."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist
from torch.optim.swa_utils import AveragedModel

from delta_tracker import ModelDeltaTracker
from tests.models import Spec, Table, batch, ordinary_optimizer, shard
from tests.sharding.replicated import replicate
from tests.tracker.collision_cases import collision_batch, shard_collision

_NATIVE: Any = torch._C._distributed_c10d


class _NoGroup:
    """Stands for the process groups of NCCL, which a torch for the CPU does not have."""


class _Memo(dict[int, Any]):
    """What a copy has copied so far. To torch it is no container: it would visit all of it at each sharded tensor."""


def _copy(value: Any) -> Any:
    return copy.deepcopy(value, _Memo())


@contextlib.contextmanager
def groups_are_shared() -> Iterator[None]:
    """Let copies share process groups. TorchRec's own context does so for the groups of other releases of torch."""
    has_nccl = hasattr(_NATIVE, "ProcessGroupNCCL")
    if not has_nccl:
        _NATIVE.ProcessGroupNCCL = _NoGroup
    dist.ProcessGroup.__deepcopy__ = lambda group, memo: group
    try:
        yield
    finally:
        del dist.ProcessGroup.__deepcopy__
        if not has_nccl:
            del _NATIVE.ProcessGroupNCCL


def _torchrec_copy(model: Any) -> Any:
    copied = model.copy(torch.device("cpu"))
    for kind in ("ProcessGroupGloo", "Work"):  # torchrec leaves None there, so that no later copy succeeds
        del getattr(_NATIVE, kind).__deepcopy__
    return copied


def _average(model: Any) -> Any:
    with mock.patch("torch.optim.swa_utils.deepcopy", _copy):
        return AveragedModel(model).module


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": _copy,
    "twice": lambda model: _copy(_copy(model)),
    "average": _average,
    "torchrec": _torchrec_copy,
}


def _spec(world_size: int) -> Spec:
    last = world_size - 1
    tables = [Table("row", 17, "row"), Table("one", 10, f"table:{last}"), Table("column", 9, f"column:0,{last}")]
    return Spec([*tables, Table("data", 12, "data"), Table("dense", 8, "table:0", kernel="dense")], bag=True)


class _Trainer:
    """A tracked model that is trained with batches of one generator."""

    def __init__(self, spec: Spec, model: Any, mode: str, seed: int) -> None:
        self.spec, self.model = spec, model
        self.tracker = ModelDeltaTracker(model, mode=mode)
        self._draw = torch.Generator().manual_seed(seed)

    def train(self, num_batches: int = 2) -> None:
        optimizer = ordinary_optimizer(self.model, "SGD", lr=0.1)
        for _ in range(num_batches):
            optimizer.zero_grad()
            self.model(batch(self.spec, self._draw)).backward()
            optimizer.step()

    def delta(self) -> dict[str, list[Any]]:
        return {
            fqn: [rows.ids.tolist(), None if rows.states is None else rows.states.tolist()]
            for fqn, rows in self.tracker.get_delta().items()
        }


def copied(rank: int, world_size: int, how: str, mode: str) -> dict[str, Any]:
    """Copy a tracked model, train the copy, track it, and compare with a model that is trained in the same way."""
    spec = _spec(world_size)
    original, control = (_Trainer(spec, shard(spec), mode, rank) for _ in range(2))
    for each in (original, control):
        each.train()
    with groups_are_shared():
        model = COPIES[how](original.model)
    for each in (original, control):
        each.train()
    assert original.delta() == control.delta()
    before = original.tracker.read_tables()
    # The copy is trained untracked.
    draw = torch.Generator().manual_seed(100 + rank)
    for _ in range(2):
        model(batch(spec, draw)).backward()
    reported = original.tracker.get_delta(commit=False)
    after = original.tracker.read_tables()
    changed = {fqn: (before[fqn] != after[fqn]).any(dim=1).nonzero().flatten() for fqn in before}
    for fqn, ids in changed.items():
        assert torch.isin(ids, reported[fqn].ids).all(), (fqn, ids, reported[fqn].ids)
    is_shared = any(map(len, changed.values()))
    if not is_shared:
        assert reported.num_rows == 0
        model.load_state_dict(model.state_dict())
        assert original.tracker.get_delta().num_rows == 0
        # The copy is tracked, and has the rows of the original, with the same batches.
        with groups_are_shared():
            again = _Trainer(spec, COPIES[how](original.model), mode, 7 + rank)
        same = _Trainer(spec, original.model, mode, 7 + rank)
        again.train()
        assert original.tracker.get_delta().num_rows == 0
        same.train()
        mine, its = again.delta(), same.delta()
        # An optimizer of a copy updates no table without a fused optimizer: torchrec copies parameter and memory apart.
        assert [mine[fqn] for fqn in again.tracker.live.fused_tables] == [
            its[fqn] for fqn in again.tracker.live.fused_tables
        ]
        again.model.load_state_dict(again.model.state_dict())
        assert original.tracker.get_delta(commit=False).num_rows == original.tracker.get_delta().num_rows
        again.tracker.detach()
        same.tracker.detach()
        errors = original.tracker.num_hook_errors + again.tracker.num_hook_errors
    else:
        model.load_state_dict(model.state_dict())
        shards = original.tracker.shards
        delta = original.tracker.get_delta()
        for fqn in original.tracker.live.fused_tables:
            assert len(delta[fqn]) == shards[fqn].num_rows
        errors = original.tracker.num_hook_errors
    original.tracker.detach()
    model(batch(spec, draw)).backward()
    return {"is_shared": is_shared, "errors": errors}


def shared_collisions(rank: int, world_size: int) -> int:
    """Let TorchRec copy a tracked model without copying its rows. Evictions by the copy are reported."""
    model = shard_collision(world_size)
    tracker = ModelDeltaTracker(model)
    draw = torch.Generator().manual_seed(rank)
    model(collision_batch(draw)).backward()
    with groups_are_shared():
        copied = _torchrec_copy(model)
    tracker.get_delta()
    num_rows = 0
    for _ in range(6):
        before, owners = tracker.read_tables(), {fqn: each.clone() for fqn, each in tracker.live.owner_views().items()}
        copied(collision_batch(draw)).backward()
        delta = tracker.get_delta()
        for fqn, rows in tracker.read_tables().items():
            is_changed = (before[fqn] != rows).any(dim=1) | (owners[fqn] != tracker.live.owner_views()[fqn])
            assert torch.isin(is_changed.nonzero().flatten(), delta[fqn].ids).all()
            num_rows += int((owners[fqn] != tracker.live.owner_views()[fqn]).sum())
    assert tracker.num_hook_errors == 0
    return num_rows


def copied_collisions(rank: int, world_size: int) -> list[int]:
    """Copy a tracked model with managed collisions. Evictions of the copy are not reported, and it can be tracked."""
    model = shard_collision(world_size)
    tracker = ModelDeltaTracker(model)
    draw = torch.Generator().manual_seed(rank)
    for _ in range(5):
        model(collision_batch(draw)).backward()
    with groups_are_shared():
        copied = _copy(model)
    tracker.get_delta()
    before = {fqn: owners.clone() for fqn, owners in tracker.live.owner_views().items()}
    again = ModelDeltaTracker(copied)
    for _ in range(5):
        copied(collision_batch(draw)).backward()
    moved = again.get_delta()
    assert tracker.get_delta().num_rows == 0
    assert all(torch.equal(owners, before[fqn]) for fqn, owners in tracker.live.owner_views().items())
    assert tracker.num_hook_errors + again.num_hook_errors == 0
    again.detach()
    copied(collision_batch(draw)).backward()
    for _ in range(5):
        model(collision_batch(draw)).backward()
    return [tracker.get_delta().num_rows, sum(len(rows.evicted) for rows in moved.values())]


def copied_replicas(rank: int, world_size: int) -> int:
    """Copy a tracked model in 2D parallelism. A sync of the copy is not reported."""
    spec = Spec([Table("t", 17, "row")], bag=True)
    model = replicate(spec, 2)
    tracker = ModelDeltaTracker(model)
    draw = torch.Generator().manual_seed(rank)
    model(batch(spec, draw)).backward()
    model.sync()
    with groups_are_shared():
        copied = _copy(model)
    tracker.get_delta()
    copied(batch(spec, draw)).backward()
    copied.sync()
    assert tracker.get_delta().num_rows == 0
    model(batch(spec, draw)).backward()
    model.sync()
    assert tracker.num_hook_errors == 0
    return tracker.get_delta().num_rows
