"""Cases for trackers of models without sharding on several ranks; each runs on every rank."""

from __future__ import annotations

import tempfile

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from delta_tracker import ModelDeltaTracker, Predictor, Publisher
from delta_tracker.errors import UnsupportedModelError

_ROWS = 24


def _model() -> nn.ModuleDict:
    torch.manual_seed(3)
    return nn.ModuleDict({"user": nn.EmbeddingBag(_ROWS, 4, sparse=True), "item": nn.Embedding(_ROWS, 2)})


class _Both(nn.Module):
    """Sum of the rows of both tables."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = _model()

    def forward(self, ids: Tensor) -> Tensor:
        user, item = self.tables["user"](ids[None]), self.tables["item"](ids)
        found: Tensor = user.sum() + item.sum()
        return found


def _trained() -> tuple[DistributedDataParallel, list[torch.optim.Optimizer]]:
    model = DistributedDataParallel(_Both())
    tables = model.module.tables
    return model, [
        torch.optim.Adagrad([tables["user"].weight], lr=0.1),
        torch.optim.Adam([tables["item"].weight], lr=0.1),
    ]


def _step(model: nn.Module, optimizers: list[torch.optim.Optimizer], ids: list[int]) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    model(torch.tensor(ids)).backward()
    for optimizer in optimizers:
        optimizer.step()


def _url() -> str:
    held = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(held)
    return f"file://{held[0]}"


def replicas(rank: int, world_size: int) -> None:
    """Every rank tracks the rows that any rank's batch changed."""
    model, optimizers = _trained()
    tracker = ModelDeltaTracker(model)
    _step(model, optimizers, [rank, 5 + rank])
    delta = tracker.get_delta()
    expected = sorted({*range(world_size), *range(5, 5 + world_size)})
    assert delta["tables.user"].ids.tolist() == expected
    assert set(delta["tables.item"].ids.tolist()) >= set(expected)


def publishes(rank: int, world_size: int) -> None:
    """After each version, a predictor equals the trainer."""
    del world_size
    model, optimizers = _trained()
    tracker = ModelDeltaTracker(model)
    url = _url()
    publisher = Publisher(tracker, url)
    publisher.snapshot()
    served = _Both()
    predictor = Predictor(served, url)
    for number in range(4):
        _step(model, optimizers, [rank, number, 7])
        with model.no_sync():
            model(torch.tensor([rank + 10])).backward()
        tracker.step()
        version = publisher.publish()
        dist.barrier()
        predictor.sync()
        assert predictor.version == version.version
        for name, tensor in served.state_dict().items():
            assert torch.equal(tensor, model.module.state_dict()[name]), name
    dist.barrier()
    publisher.close()


def not_replicated(rank: int, world_size: int) -> None:
    """A table that the ranks may train apart is refused by name."""
    del rank, world_size
    groups = [dist.new_group([each]) for each in range(dist.get_world_size())]
    apart = _Both()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(apart, ["tables.item.weight"])
    models = {
        "tables.user": _Both(),
        "tables.user ": DistributedDataParallel(_Both(), process_group=groups[dist.get_rank()]),
        "tables.item": DistributedDataParallel(apart),
    }
    for fqn, model in models.items():
        with pytest.raises(UnsupportedModelError, match=f"'{fqn.strip()}'.*DistributedDataParallel"):
            ModelDeltaTracker(model)


def sharded_by_torch(rank: int, world_size: int) -> None:
    """Tables of which FSDP keeps a part on each rank are refused by name."""
    del rank, world_size
    with pytest.raises(UnsupportedModelError, match=r"'tables\.user\.weight'"):
        ModelDeltaTracker(fully_shard(_Both(), mesh=init_device_mesh("cpu", (dist.get_world_size(),))))
    for keeps_names in (False, True):
        flat = FullyShardedDataParallel(_Both(), device_id=torch.device("cpu"), use_orig_params=keeps_names)
        with pytest.raises(UnsupportedModelError, match=r"'tables\.user'.*(FSDP|not an nn.Parameter)"):
            ModelDeltaTracker(flat)


def checkpoint(rank: int, world_size: int) -> None:
    """Pending rows of two ranks are pending in one process without a process group, and on two ranks again."""
    model, optimizers = _trained()
    tracker = ModelDeltaTracker(model)
    _step(model, optimizers, [rank, 9])
    state = tracker.state_dict(strategy="gather")
    parts: list[dict[str, Tensor]] = [state]
    dist.broadcast_object_list(parts)
    expected = tracker.get_delta_ids()
    _step(model, optimizers, [3])
    tracker.load_state_dict(parts[0])
    again = tracker.get_delta_ids()
    assert again["tables.user"].tolist() == expected["tables.user"].tolist() == sorted({*range(world_size), 9})
