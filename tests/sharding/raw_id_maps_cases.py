"""Predictor of a sharded managed-collision model: every raw id reads what it reads in the trainer's module."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

from delta_tracker import ModelTarget, Predictor
from delta_tracker.errors import ModelMismatchError
from tests.models import with_kernel
from tests.predictor.identity_histories import DIM, FQN, History


def _sharded(history: History, world_size: int) -> tuple[DistributedModelParallel, Any]:
    """Return a model with one row-wise table, and its collection."""
    device = torch.device("cpu")
    table = EmbeddingConfig(name="t", num_embeddings=history.num_rows, embedding_dim=DIM, feature_names=["f"])
    module = MCHManagedCollisionModule(
        zch_size=history.num_rows,
        device=device,
        eviction_policy=DistanceLFU_EvictionPolicy(),
        eviction_interval=2,
        input_hash_size=history.hash_size,
    )
    model = nn.Module()
    model.mc = ManagedCollisionEmbeddingCollection(
        EmbeddingCollection(tables=[table], device=device), ManagedCollisionCollection({"t": module}, [table])
    )
    sharder = ManagedCollisionEmbeddingCollectionSharder(ec_sharder=EmbeddingCollectionSharder(use_index_dedup=False))
    plan = construct_module_sharding_plan(
        model.mc,
        {"t": with_kernel(row_wise(), "fused")},
        sharder=sharder,
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
    )
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=device,
        plan=ShardingPlan({"mc": plan}),
        sharders=[sharder],
    ).eval()
    return sharded, sharded.module.mc


def _history(num_buckets: int, hash_size: int, num_rows: int = 8) -> History:
    """Return the same history on each rank."""
    return History(0, num_buckets, num_rows=num_rows, hash_size=hash_size, has_defaults=True)


@torch.no_grad()
def answers(rank: int, world_size: int, num_buckets: int, hash_size: int, num_rows: int = 8) -> int:
    """Look all raw ids up after each version of a stream. Return the number of ids that were known at some time."""
    history = _history(num_buckets, hash_size, num_rows)
    model, collection = _sharded(history, world_size)
    predictor = Predictor(
        ModelTarget(model, names={FQN: "mc._embedding_module.embeddings.t"}, dense=False), history.storage
    )
    features = KeyedJaggedTensor(["f"], history.raw_ids, lengths=torch.ones(len(history.raw_ids), dtype=torch.int64))
    num_known = 0
    for step in ("delta", "delta", "snapshot", "delta", "delta"):
        predictor.sync()
        found, _ = collection(features)
        state = history.states[history.version]
        slots = state.slots_of(history.raw_ids)
        assert torch.equal(found["f"].values(), state.rows[slots]), f"rank {rank}"
        num_known += int((state.owners[slots] == history.raw_ids).sum())
        getattr(history, step)()
    return num_known


def refusal(rank: int, world_size: int, num_buckets: int) -> str:
    """Return the reason why a model of ``world_size`` ranks cannot serve the buckets of another number of ranks."""
    history = _history(num_buckets, 100)
    model, _ = _sharded(history, world_size)
    predictor = Predictor(
        ModelTarget(model, names={FQN: "mc._embedding_module.embeddings.t"}, dense=False), history.storage
    )
    try:
        predictor.sync()
    except ModelMismatchError as error:
        return error.found
    return ""
