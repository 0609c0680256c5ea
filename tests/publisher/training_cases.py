"""Cases for the training state of TorchRec models; each runs on every rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

import tests.models
from delta_tracker import ModelDeltaTracker
from delta_tracker.errors import InvalidArgumentError, UnsupportedModelError
from delta_tracker.publisher.host_copies import HostCopier
from delta_tracker.publisher.training import Recovery, TakenState, TrainingCuts
from delta_tracker.stream.format.state_tree import unpack
from tests.models import Spec, Table, batch, ordinary_optimizer, shard


def _cuts(tracker: ModelDeltaTracker, rank: int, training: Any, ranks: Any) -> TrainingCuts:
    objects = Recovery(training_state=training, rank_state=ranks)
    handle: Any = SimpleNamespace(name="default", position=0, others=dict)
    return TrainingCuts(tracker.live, tracker.progress, handle, objects, is_first=rank == 0)


def _stored(taken: TakenState) -> Any:
    assert not HostCopier().copy(taken.selections), "nothing to wait for on the CPU"
    return unpack(b"".join(taken.tree.buffers([selection.copied for selection in taken.selections])))


def _optimizer(model: DistributedModelParallel, *words: str) -> KeyedOptimizerWrapper:
    """Return Adam for the parameters without a fused optimizer whose names contain one of some words."""
    every = ordinary_optimizer(model, "Adam", lr=0.1).params
    chosen = {name: each for name, each in every.items() if any(word in name for word in words)}
    optimizer = KeyedOptimizerWrapper(chosen, lambda these: torch.optim.Adam(these, lr=0.1))
    optimizer.save_param_groups(True)
    return optimizer


def unfused(rank: int, world_size: int) -> None:
    """The optimizer of a table whose optimizer is not fused must be saved, on each rank unless it is replicated."""
    tables = [Table("row", 12, "row"), Table("parts", 10, "row", kernel="dense"), Table("same", 8, "data")]
    spec = Spec(tables, bag=True)
    model = shard(spec)
    top, parts, same = _optimizer(model, "dense."), _optimizer(model, "parts"), _optimizer(model, "same")
    with ModelDeltaTracker(model) as tracker:
        assert {fqn.rpartition(".")[2] for fqn in tracker.live.fused_tables} == {"row"}
        for training, ranks, table in (
            ({}, {}, "parts|same"),
            ({"top": top}, {"parts": parts}, "same"),
            ({"top": top, "same": same}, {}, "parts"),
            ({"top": top, "same": same, "parts": parts}, {}, "parts"),
        ):
            with pytest.raises(UnsupportedModelError, match=f"({table})' .*its optimizer is not fused"):
                _cuts(tracker, rank, training, ranks)
        cuts = _cuts(tracker, rank, {"top": top}, {"parts": parts, "same": same})
        cuts = _cuts(tracker, rank, {"top": top, "same": same}, {"parts": parts})

        generator = torch.Generator().manual_seed(rank)
        for _ in range(3):
            for each in (top, parts, same):
                each.zero_grad()
            model(batch(spec, generator)).backward()
            for each in (top, parts, same):
                each.step()
        state = _stored(cuts.take())
        assert state["training"].keys() == ({"top", "same"} if rank == 0 else set())
        assert state["library"]["shards"].keys() == tracker.tables.keys() - tracker.live.fused_tables
        assert state["library"]["kernels"].keys() == tracker.live.fused_tables
        for saved, optimizer in ((state["rank"].get("parts"), parts), (state["training"].get("same"), same)):
            for name, parameter in optimizer.params.items() if saved else ():
                moments = optimizer.state[parameter]
                assert float(moments["exp_avg"].abs().sum()) > 0
                assert all(torch.equal(saved["state"][name][key], moments[key]) for key in ("exp_avg", "exp_avg_sq"))
                assert saved["param_groups"][0]["lr"] == 0.1


def keyed_optimizers(rank: int, world_size: int) -> None:
    """TorchRec's optimizers must save their parameter groups, and must not contain fused optimizers."""
    spec = Spec([Table("row", 12, "row")])
    model = shard(spec)
    top = ordinary_optimizer(model, "SGD", lr=0.1, momentum=0.9)
    clipped = GradientClippingOptimizer(top, clipping=GradientClipping.NORM, max_gradient=1.0)
    with ModelDeltaTracker(model) as tracker:
        for optimizer in (top, clipped, CombinedOptimizer([top])):
            with pytest.raises(InvalidArgumentError, match=r"training_state\['opt'\].*save_param_groups"):
                _cuts(tracker, 0, {"opt": optimizer}, {})
        for optimizer in (top, clipped, CombinedOptimizer([top])):
            optimizer.save_param_groups(True)
            state = _stored(_cuts(tracker, 0, {"opt": optimizer}, {}).take())
            assert state["training"]["opt"]["param_groups"][0]["lr"] == 0.1
        fused = model.fused_optimizer
        fused.save_param_groups(True)
        both = CombinedOptimizer([("fused", fused), ("top", top)])
        with pytest.raises(InvalidArgumentError, match=r"training_state\['opt'\]\['state'\].*is not fused") as raised:
            _cuts(tracker, 0, {"opt": both}, {})
        assert "ShardedTensor" in str(raised.value.value)


def change_of_rate(rank: int, world_size: int) -> None:
    """A learning rate that a scheduler has changed is saved."""
    spec = Spec([Table("row", 12, "row")])
    model = shard(spec)
    top = ordinary_optimizer(model, "SGD", lr=0.1)
    top.save_param_groups(True)
    scheduler = torch.optim.lr_scheduler.StepLR(top._optimizer, step_size=1, gamma=0.5)
    with ModelDeltaTracker(model) as tracker:
        cuts = _cuts(tracker, 0, {"top": top, "scheduler": scheduler}, {})
        top.step()
        scheduler.step()
        state = _stored(cuts.take())["training"]
    assert state["top"]["param_groups"][0]["lr"] == 0.05
    assert state["scheduler"]["last_epoch"] == 1


class _Outer(nn.Module):
    """Module that contains a sharded model, and layers with buffers."""

    def __init__(self, model: DistributedModelParallel) -> None:
        super().__init__()
        self.inner = model
        self.norm = nn.BatchNorm1d(2)


def buffers(rank: int, world_size: int) -> None:
    """All ranks save their buffers, also those within a DistributedModelParallel that another module contains."""
    plain = tests.models.Model

    class Model(plain):
        def __init__(self, spec: Spec, device: str) -> None:
            super().__init__(spec, device)
            self.layers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
            self.register_buffer("shared", torch.ones(1))
            self.register_buffer("omitted", torch.ones(1), persistent=False)

    tests.models.Model = Model  # type: ignore[misc]
    try:
        outer = _Outer(shard(Spec([Table("row", 12, "row")])))
    finally:
        tests.models.Model = plain  # type: ignore[misc]
    with ModelDeltaTracker(outer) as tracker:
        cuts = _cuts(tracker, rank, {}, {})
        library = _stored(cuts.take())["library"]
    own = {"running_mean", "running_var", "num_batches_tracked"}
    expected = {f"{layer}.{name}" for layer in ("norm", "inner.layers.1") for name in own} | {"inner.shared"}
    if rank == 0:
        assert library["dense"].keys() > expected | {"norm.weight", "inner.layers.0.weight", "inner.dense.weight"}
    else:
        assert library["buffers"].keys() == expected
