"""Cases for the hook on output distributions, and the compaction of the log in it."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from delta_tracker import ModelDeltaTracker, TopK, TrackingMode
from delta_tracker.tracker.log_segments import LogSegments
from tests.models import Spec, batch, shard
from tests.tracker.collision_cases import collision_batch, shard_collision


class _Log:
    """A tracker whose two consumers leave segments to compact, and how much it holds."""

    def __init__(self, model: nn.Module, **kwargs: Any) -> None:
        self.tracker = ModelDeltaTracker(model, ["fast", "slow"], auto_compact=True, **kwargs)

    def crowd(self) -> int:
        """Read several times as one consumer, with changes in between; the bytes of the log then."""
        for _ in range(3):
            for fqn in self.tracker.tables:
                self.tracker.mark_changed(fqn)
            self.tracker.get_delta("fast")
        return self.num_bytes

    @property
    def num_bytes(self) -> int:
        return self.tracker.memory().log_bytes


def _model(world_size: int, *, bag: bool) -> tuple[Any, Spec, torch.Generator]:
    spec = Spec.every_sharding(world_size, bag=bag)
    return shard(spec), spec, torch.Generator().manual_seed(0)


def compacted(rank: int, world_size: int, bag: bool) -> dict[str, Any]:
    """A forward compacts the log of every tracker, and step() does not; no hook is left afterwards."""
    model, spec, generator = _model(world_size, bag=bag)
    collection = model.module.ec
    logs = [_Log(model), _Log(model)]
    crowded = [log.crowd() for log in logs]
    for log in logs:
        log.tracker.step()
    assert [log.num_bytes for log in logs] == crowded
    with torch.no_grad():
        model(batch(spec, generator))
    smaller = [log.num_bytes < before for log, before in zip(logs, crowded, strict=True)]
    for log in logs:
        assert log.tracker.num_hook_errors == 0
        assert all(len(rows) for fqn, rows in log.tracker.get_delta("slow").items() if log.tracker.shards[fqn].num_rows)
        log.tracker.detach()
    return {"smaller": smaller, "left": sum(len(dist._forward_hooks) for dist in collection._output_dists)}


def slot_is_free(rank: int, world_size: int) -> None:
    """TorchRec's slot keeps the function of another library, which is called as without a tracker."""
    model, spec, generator = _model(world_size, bag=True)
    collection = model.module.ec
    calls = []
    collection.register_post_odist_tracker_fn(holder := partial(calls.append, 1))
    logs = [_Log(model), _Log(model)]
    for num_attached in (2, 1, 0):
        crowded = [log.crowd() for log in logs[:num_attached]]
        before = len(calls)
        with torch.no_grad():
            model(batch(spec, generator))
        assert len(calls) == before + len(collection._lookups)
        assert collection.post_odist_tracker_fn is holder
        for log, size in zip(logs, crowded, strict=False):
            assert log.num_bytes < size
        if num_attached:
            logs[num_attached - 1].tracker.detach()


def managed_collisions(rank: int, world_size: int) -> bool:
    """The collection of a managed-collision module, whose slot TorchRec does not call."""
    model = shard_collision(world_size)
    generator = torch.Generator().manual_seed(rank)
    log = _Log(model)
    crowded = log.crowd()
    with torch.no_grad():
        model(collision_batch(generator))
    smaller = log.num_bytes < crowded
    log.tracker.detach()
    assert not any(dist._forward_hooks for dist in model.module.mc._embedding_module._output_dists)
    return smaller


class _Parts(nn.Module):
    """A model that the pipeline can take apart: the sharded collection is looked up with an input of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: Any) -> tuple[Tensor, Tensor]:
        loss = self.model(features)
        return loss, loss.detach()


def pipelined(rank: int, world_size: int, bag: bool) -> list[bool]:
    """TorchRec's pipeline calls the collection in two parts; each of its steps compacts the log."""
    model, spec, generator = _model(world_size, bag=bag)
    parts = _Parts(model)
    batches = iter([batch(spec, generator) for _ in range(6)])
    optimizer = torch.optim.SGD(model.module.dense.parameters(), lr=0.1)
    log = _Log(model)
    pipeline = TrainPipelineSparseDist(parts, optimizer, torch.device("cpu"), execute_all_batches=True)
    calls = 0

    def counting() -> None:
        nonlocal calls
        calls += 1

    model.module.ec.register_post_lookup_tracker_fn(lambda *_: counting())
    smaller = []
    for _ in range(6):
        crowded = log.crowd()
        pipeline.progress(batches)
        smaller.append(log.num_bytes < crowded)
    assert calls == 6 * len(model.module.ec._lookups), "the slots are called by the pipeline"
    assert log.tracker.num_hook_errors == 0
    log.tracker.detach()
    return smaller


def contained(rank: int, world_size: int) -> dict[str, Any]:
    """A fault in the compaction reaches no forward, and neither does a read of another thread that takes long."""
    model, spec, generator = _model(world_size, bag=True)
    log = _Log(model, mode=TrackingMode.EMBEDDING)
    log.crowd()
    healthy = LogSegments.compact

    def broken(self: LogSegments) -> None:
        raise KeyError("broken")

    LogSegments.compact = broken  # type: ignore[method-assign]
    try:
        with torch.no_grad():
            model(batch(spec, generator))
    finally:
        LogSegments.compact = healthy  # type: ignore[method-assign]
    num_errors = log.tracker.num_hook_errors
    inside, may_end = threading.Event(), threading.Event()

    def score(fqn: str, rows: Any) -> Tensor:
        inside.set()
        assert may_end.wait(30)
        return torch.ones(len(rows))

    crowded = log.crowd()
    reader = threading.Thread(target=lambda: log.tracker.get_delta("slow", top_k=TopK(fraction=1.0, score=score)))
    reader.start()
    assert inside.wait(30)
    with torch.no_grad():
        model(batch(spec, generator))  # would wait for the lock until the reader ends
    waited = may_end.is_set()
    may_end.set()
    reader.join(30)
    with torch.no_grad():
        model(batch(spec, generator))
    smaller = log.num_bytes < crowded
    log.tracker.detach()
    return {"errors": num_errors, "waited": waited, "smaller": smaller}
