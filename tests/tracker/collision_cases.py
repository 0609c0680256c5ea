"""Minimal managed-collision EmbeddingCollection that trains on CPU, row-wise and fused."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch import distributed as dist
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
from torchrec.optim import Adagrad  # row-wise Adagrad's rows cannot be reset on CPU
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.models import with_kernel

_TABLES = ("a", "b")
_NUM_IDS = 60
_NUM_ROWS = 16


class _CollisionModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        device = torch.device("cpu")
        tables = [
            EmbeddingConfig(name=name, num_embeddings=_NUM_ROWS, embedding_dim=4, feature_names=[name])
            for name in _TABLES
        ]
        modules = {
            name: MCHManagedCollisionModule(
                zch_size=_NUM_ROWS,
                device=device,
                eviction_policy=DistanceLFU_EvictionPolicy(),
                eviction_interval=2,
                input_hash_size=_NUM_IDS,
            )
            for name in _TABLES
        }
        collection = EmbeddingCollection(tables=tables, device=device)
        self.mc = ManagedCollisionEmbeddingCollection(collection, ManagedCollisionCollection(modules, tables))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        embedded, _ = self.mc(features)
        return torch.cat([embedded[name].values() for name in _TABLES]).sum()


def shard_collision(world_size: int) -> DistributedModelParallel:
    torch.manual_seed(0)
    model = _CollisionModel()
    apply_optimizer_in_backward(Adagrad, model.mc._embedding_module.parameters(), {"lr": 0.1})
    sharder = ManagedCollisionEmbeddingCollectionSharder(ec_sharder=EmbeddingCollectionSharder(use_index_dedup=False))
    plan = construct_module_sharding_plan(
        model.mc,
        dict.fromkeys(_TABLES, with_kernel(row_wise(), "fused")),
        sharder=sharder,
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
    )
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"mc": plan}),
        sharders=[sharder],
    )


def collision_batch(generator: torch.Generator, size: int = 4) -> KeyedJaggedTensor:
    """Return a batch of random ids from a range far larger than the table, so that ids are evicted."""
    lengths = torch.randint(1, 3, (len(_TABLES) * size,), generator=generator)
    ids = torch.randint(0, _NUM_IDS, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(list(_TABLES), ids, lengths=lengths)
