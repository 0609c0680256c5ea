"""Cases for models whose sharded modules are inside wrappers, towers or FSDP; each runs on every rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torchrec.distributed.embedding_tower_sharding import ShardedEmbeddingTower, ShardedEmbeddingTowerCollection

from delta_tracker import ModelDeltaTracker
from delta_tracker.sharding.dense import dense_tensors
from tests.models import Spec, Table, batch, shard
from tests.publisher.publishing_cases import attempt
from tests.tracker.collision_cases import shard_collision


def _names(state: Any) -> list[list[str]]:
    """Return the names of the tables, and of the other tensors, of a state dict."""
    tables = [name.removesuffix(".weight") for name in state if "embeddings" in name]
    return [sorted(tables), sorted(name for name in state if "embeddings" not in name)]


def checkpoint_wrappers(rank: int, world_size: int) -> dict[str, Any]:
    """Return names of the state dict and of the tracker, with a wrapper around the collection and around its owner."""
    spec = Spec([Table("t", 6, "row"), Table("u", 5, f"table:{world_size - 1}")])
    answer = {}
    for name in ("collection", "owner"):
        root = nn.Module()
        root.model = shard(spec)
        inner = root.model._dmp_wrapped_module
        inner = getattr(inner, "module", inner)
        if name == "collection":
            inner.ec, inner.dense = checkpoint_wrapper(inner.ec), offload_wrapper(inner.dense)
        else:
            root.model = checkpoint_wrapper(root.model)
        tracker = ModelDeltaTracker(root)
        features = batch(spec, torch.Generator().manual_seed(1), size=8)
        inner(features).backward()
        found = [sorted(tracker.tables), sorted(dense_tensors(root, root))]
        part = sorted(dense_tensors(root, inner.dense))
        answer[name] = [found, _names(root.state_dict()), part, tracker.get_delta().num_rows > 0]
        tracker.detach()
    return answer


def fsdp(rank: int, world_size: int) -> dict[str, Any]:
    """Return the names of a model in FSDP that leaves the tables out, and the errors for its sharded parameters."""
    answer = {}
    for keeps in (False, True):
        root = nn.Module()
        root.model = shard(Spec([Table("t", 6, "row")]))
        root.over = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        make = partial(FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=keeps)
        wrapped = make(root, ignored_modules=[root.model])
        tracker = ModelDeltaTracker(wrapped)
        answer[str(keeps)] = {
            "tables": list(tracker.tables),
            "whole": sorted(dense_tensors(wrapped, ["model.dense.weight", "over.1.running_mean"])),
            "model": attempt(lambda wrapped=wrapped: dense_tensors(wrapped, wrapped)),
            "name": attempt(lambda wrapped=wrapped: dense_tensors(wrapped, ["over.0.weight"])),
            "part": sorted(dense_tensors(wrapped, root.model)),
        }
        tracker.detach()
    return answer


def collision_buffers(rank: int, world_size: int) -> dict[str, Any]:
    """Return the dense tensors of a managed-collision model, and the errors for its raw ids and counters."""
    model = shard_collision(world_size)
    model.module.mc.register_buffer("scale", torch.ones(1))
    start = "mc._managed_collision_collection."
    names = [f"_managed_collision_modules.a.{name}" for name in ("_mch_counts", "_current_iter_tensor")]
    assert {f"{start}{name}" for name in names} <= model.state_dict().keys()
    return {
        "dense": [*dense_tensors(model, model)],
        "names": {name: attempt(lambda name=name: dense_tensors(model, [f"{start}{name}"])) for name in names},
    }


class _Tower(ShardedEmbeddingTower):
    """Tower without its constructor, which needs several hosts, on a host without the tables."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.embedding, self.interaction = None, nn.Linear(8, 4)


class _Towers(ShardedEmbeddingTowerCollection):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.embeddings, self.interactions = nn.ModuleDict(), nn.ModuleDict({"0": nn.Linear(8, 4)})


def towers(rank: int, world_size: int) -> dict[str, Any]:
    """Return the errors for towers, and what is found without them."""
    root = nn.Module()
    root.one, root.some, root.model = _Tower(), _Towers(), shard(Spec([Table("t", 6, "row")]))
    with ModelDeltaTracker(root, fqns_to_skip=["one", "some"]) as tracker:
        tables = list(tracker.tables)
    return {
        "refused": attempt(lambda: ModelDeltaTracker(root)),
        "tables": tables,
        "dense": attempt(lambda: dense_tensors(root, root)),
        "name": attempt(lambda: dense_tensors(root, ["one.interaction.bias"])),
        "part": sorted(dense_tensors(root, root.model)),
        "kept": sorted(dense_tensors(root, root, skip_sharded=True)),
    }
