"""Cases for models to which ``fully_shard`` is applied after they are tracked; each runs on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from delta_tracker import ModelDeltaTracker
from tests.models import Spec, Table, batch, shard
from tests.publisher.publishing_cases import attempt


class _Model(nn.Module):
    def __init__(self, *, is_sparse: bool) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(20, 4, sparse=is_sparse, mode="sum")
        self.over = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.over(self.table(ids)).sum()


def _tracked(*, is_sparse: bool) -> tuple[_Model, ModelDeltaTracker]:
    torch.manual_seed(0)
    model = _Model(is_sparse=is_sparse)
    is_alone = dist.get_world_size() == 1
    return model, ModelDeltaTracker(model if is_alone else DistributedDataParallel(model), ["a", "b"])


def refused(rank: int, world_size: int, is_sparse: bool) -> list[str]:
    """Return the errors of reads after each way to shard a table."""
    mesh = init_device_mesh("cpu", (world_size,))
    ways: dict[str, Callable[[_Model], object]] = {
        "model": lambda model: fully_shard(model, mesh=mesh),
        "module": lambda model: fully_shard(model.table, mesh=mesh),
    }
    messages = []
    for apply in ways.values():
        model, tracker = _tracked(is_sparse=is_sparse)
        with tracker.reserve("b") as handle:
            apply(model)
            reads: list[Callable[[], Any]] = [
                lambda tracker=tracker: tracker.get_delta("a"),
                tracker.state_dict,
                lambda tracker=tracker: tracker.reserve("a"),
                lambda handle=handle: handle.read(),
            ]
            messages += [attempt(read) for read in reads]
            output = model(torch.tensor([[1, 2]]))  # the weight is whole between the forward and the backward pass
            messages += [attempt(read) for read in reads]
            if not is_sparse:
                output.backward()
                messages += [attempt(read) for read in reads]
        assert tracker.num_hook_errors == 0
        tracker.detach()
    return messages


def ignored(rank: int, world_size: int) -> list[list[int]]:
    """Train a model whose table ``fully_shard`` leaves out; return the ids of two deltas."""
    model, tracker = _tracked(is_sparse=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)), ignored_params={model.table.weight})
    deltas = []
    for ids in ([[1, 2]], [[3, 3]]):
        optimizer = torch.optim.SGD([model.table.weight], lr=0.1)
        model(torch.tensor(ids)).backward()
        optimizer.step()
        optimizer.zero_grad()
        deltas.append(tracker.get_delta_ids("a")["table"].tolist())
    return deltas


def beside_sharded_tables(rank: int, world_size: int) -> bool:
    """Shard the dense part of a sharded model after it is tracked; return whether reads are those of another model."""
    spec = Spec([Table("row", 17, "row"), Table("one", 12, "table:0")], bag=True)
    found = []
    for is_sharded in (False, True):
        model = shard(spec)
        tracker = ModelDeltaTracker(model)
        inner = model._dmp_wrapped_module
        inner = getattr(inner, "module", inner)
        if is_sharded:
            fully_shard(inner.dense, mesh=init_device_mesh("cpu", (world_size,)))
        draw = torch.Generator().manual_seed(rank)
        for _ in range(2):
            inner(batch(spec, draw)).backward()
        found.append({fqn: ids.tolist() for fqn, ids in tracker.get_delta_ids().items()})
        tracker.detach()
    return found[0] == found[1] and any(found[0].values())
