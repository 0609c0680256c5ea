"""Cases for models whose sharded modules are inside wrappers, towers or FSDP; each runs on every rank."""

from __future__ import annotations

import os
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed import comm, embedding_tower_sharding
from torchrec.distributed.embedding_tower_sharding import EmbeddingTowerCollectionSharder, EmbeddingTowerSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.sparse.jagged_tensor import KeyedTensor

from delta_tracker import ModelDeltaTracker
from delta_tracker.sharding.dense import dense_tensors
from tests.models import Spec, Table, batch, shard, with_kernel
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
    """Return the dense tensors of a managed-collision model whose state dict has them whole, and the errors."""
    model = shard_collision(world_size)
    start = "mc._managed_collision_collection._managed_collision_modules.a."
    answer = {
        "model": attempt(lambda: dense_tensors(model, model)),
        "name": attempt(lambda: dense_tensors(model, [f"{start}_mch_counts"])),
        "whole": sorted(dense_tensors(model, [f"{start}_current_iter_tensor"])),
        "kept": sorted(dense_tensors(model, model, skip_sharded=True)),
    }
    return answer | {"sharded": sorted(name for name in model.state_dict() if "_mch_" in name)}


class _Interaction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, embedded: KeyedTensor) -> torch.Tensor:
        return self.linear(embedded.values())


def _tower(name: str) -> EmbeddingTower:
    config = EmbeddingBagConfig(name=name, num_embeddings=6, embedding_dim=8, feature_names=[name])
    return EmbeddingTower(EmbeddingBagCollection(tables=[config]), _Interaction())


def towers(rank: int, world_size: int) -> dict[str, Any]:
    """Return the errors for real towers on two hosts of one rank each, and what is tracked without them."""
    groups = {name: None for name in vars(comm) if name.endswith("_PG")}

    def on_host(module: nn.Module, device_ids: Any, **kwargs: Any) -> DistributedDataParallel:
        return DistributedDataParallel(module, **kwargs)  # with device_ids it refuses the CPU

    with (
        mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "1"}),
        mock.patch.multiple(comm, **groups),
        mock.patch.object(embedding_tower_sharding, "DistributedDataParallel", on_host),
    ):
        model, plans = nn.Module(), {}
        model.one, model.some = _tower("a"), EmbeddingTowerCollection([_tower("b"), _tower("c")])
        sharders = {"one": EmbeddingTowerSharder(), "some": EmbeddingTowerCollectionSharder()}
        for name, hosts in (("one", {"a": 1}), ("some", {"b": 0, "c": 1})):
            tables = {table: with_kernel(table_row_wise(host_index=host), "fused") for table, host in hosts.items()}
            plans[name] = construct_module_sharding_plan(
                getattr(model, name), tables, sharder=sharders[name], local_size=1, world_size=2, device_type="cpu"
            )
        sharded = DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=torch.device("cpu"),
            plan=ShardingPlan(plans),
            sharders=list(sharders.values()),
        )
    root = nn.Module()
    root.towers, root.model = sharded, shard(Spec([Table("t", 6, "row")]))
    with ModelDeltaTracker(root, fqns_to_skip=["towers"]) as tracker:
        tables = list(tracker.tables)
    return {
        "keys": sorted(sharded.state_dict()),
        "refused": attempt(lambda: ModelDeltaTracker(root)),
        "tables": tables,
        "dense": attempt(lambda: dense_tensors(root, root)),
        "name": attempt(lambda: dense_tensors(root, ["towers.one.interaction.linear.bias"])),
        "part": sorted(dense_tensors(root, root.model)),
    }
