"""Models of two tables with managed collisions, for ``tests/system/raw_ids.py``, and what they read for raw ids."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.ao.quantization import PlaceholderObserver, QConfig
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.optim import Adagrad  # row-wise Adagrad's rows cannot be reset on CPU
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.quant.embedding_modules import (
    QuantManagedCollisionEmbeddingCollection,
    quant_prep_enable_quant_state_dict_split_scale_bias_for_types,
)

from tests.models import with_kernel

TABLES = ("a", "b")
DIM = 4
_CPU = torch.device("cpu")
_POLICIES: dict[str, Callable[[], Any]] = {
    "LFU": LFU_EvictionPolicy,
    "LRU": lambda: LRU_EvictionPolicy(decay_exponent=1.0),
    "DistanceLFU": lambda: DistanceLFU_EvictionPolicy(decay_exponent=1.0),
}
# Of (policy, a bag, input_hash_func, encoding, top-k): each value meets each other one.
_KINDS = (
    ("DistanceLFU", False, False, "F32", False), ("LRU", True, True, "INT8", False), ("LFU", False, True, "F32", True),
    ("LRU", False, False, "INT8", True), ("DistanceLFU", True, True, "F32", True), ("LFU", True, False, "F32", False),
    ("LRU", False, True, "F32", False), ("DistanceLFU", False, True, "INT8", True), ("LFU", True, False, "INT8", True),
    ("LRU", True, False, "F32", True),
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """Choices of a seed that do not change while it runs.

    Args:
        policy: eviction policy.
        is_bag: True for an ``EmbeddingBagCollection``.
        is_hashed: True for an ``input_hash_func``.
        encoding: encoding of the published rows.
        top_k: number of rows in a delta; None for all changed rows.
        style: call that publishes, ``"publish"`` or ``"step"``.
        num_rows: number of rows of each table.
        hash_size: size of the range of raw ids.
        interval: number of batches between two evictions.
    """

    policy: str
    is_bag: bool
    is_hashed: bool
    encoding: str
    top_k: int | None
    style: str
    num_rows: int
    hash_size: int
    interval: int

    @classmethod
    def of(cls, seed: int, world_size: int) -> Shape:
        """Return the shape of a seed."""
        draw = random.Random(f"shape {seed} {world_size}")
        policy, is_bag, is_hashed, encoding, has_top_k = _KINDS[seed % len(_KINDS)]
        return cls(
            policy, is_bag, is_hashed, encoding, draw.choice([1, 4, 12]) if has_top_k else None,
            style="step" if seed // 2 % 2 else "publish",
            num_rows=world_size * draw.choice([3, 4, 6] if world_size > 1 else [6, 12]),
            hash_size=draw.choice([100, 1000, 2**63 - 1] if is_hashed else [0, 100, 1000, 2**63 - 1]),
            interval=draw.choice([1, 2, 3]),
        )  # fmt: skip

    def raw_ids(self, ids: Tensor) -> Tensor:
        """Return the raw ids of ids: what the collision module sees."""
        return hashed(ids, self.hash_size) if self.is_hashed else ids


def hashed(ids: Tensor, hash_size: int) -> Tensor:
    """Hash ids to the range of raw ids, as an ``input_hash_func``."""
    return ((ids * 2_654_435_761) ^ (ids >> 7)) % hash_size


class Model(nn.Module):
    """Unsharded model.

    Args:
        shape: choices of the seed.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        config = EmbeddingBagConfig if shape.is_bag else EmbeddingConfig
        tables: Any = [
            config(name=name, num_embeddings=shape.num_rows, embedding_dim=DIM, feature_names=[name]) for name in TABLES
        ]
        modules: Any = {
            name: MCHManagedCollisionModule(
                zch_size=shape.num_rows,
                device=_CPU,
                eviction_policy=_POLICIES[shape.policy](),
                eviction_interval=shape.interval,
                input_hash_size=shape.hash_size,
                input_hash_func=hashed if shape.is_hashed else None,
            )
            for name in TABLES
        }
        collisions = ManagedCollisionCollection(modules, tables)
        self.mc: Any
        if shape.is_bag:
            bags = EmbeddingBagCollection(tables=tables, device=_CPU)
            self.mc = ManagedCollisionEmbeddingBagCollection(bags, collisions)
        else:
            rows = EmbeddingCollection(tables=tables, device=_CPU)
            self.mc = ManagedCollisionEmbeddingCollection(rows, collisions)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Return the sum of all embeddings."""
        return torch.cat(_embeddings(self.mc(features)[0], is_bag=self.shape.is_bag)).sum()


def _embeddings(found: Any, *, is_bag: bool) -> list[Tensor]:
    """Return the embeddings of each table, ``[N, D]``, of what a collection returned."""
    if not is_bag:
        return [found[name].values() for name in TABLES]
    by_key = dict(zip(found.keys(), found.values().split(DIM, dim=1), strict=True))
    return [by_key[name] for name in TABLES]


def shard(shape: Shape) -> DistributedModelParallel:
    """Return a model that is sharded by rows to all ranks."""
    model, world_size = Model(shape), dist.get_world_size()
    apply_optimizer_in_backward(Adagrad, model.mc._embedding_module.parameters(), {"lr": 0.1})
    sharder: Any = (
        ManagedCollisionEmbeddingBagCollectionSharder(ebc_sharder=EmbeddingBagCollectionSharder())
        if shape.is_bag
        else ManagedCollisionEmbeddingCollectionSharder(ec_sharder=EmbeddingCollectionSharder(use_index_dedup=False))
    )
    plan = construct_module_sharding_plan(
        model.mc,
        dict.fromkeys(TABLES, with_kernel(row_wise(), "fused")),
        sharder=sharder,
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
    )
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=_CPU,
        plan=ShardingPlan({"mc": plan}),
        sharders=[sharder],
    )


def quantized(shape: Shape) -> nn.Module:
    """Return an unsharded model with quantized tables, which TorchRec has for collections without bags."""
    model = Model(shape)
    quant_prep_enable_quant_state_dict_split_scale_bias_for_types(model, [EmbeddingCollection])
    model.mc.qconfig = QConfig(
        activation=PlaceholderObserver.with_args(dtype=torch.float),
        weight=PlaceholderObserver.with_args(dtype=torch.qint8),
    )
    model.mc = QuantManagedCollisionEmbeddingCollection.from_float(model.mc)
    return model.eval()


@torch.no_grad()
def answers(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the row that the evaluation of a model reads for each id, ``[T, N, D]``.

    A collective for a sharded model.
    """
    was_training = model.training
    model.eval()
    lengths = torch.ones(len(TABLES) * len(ids), dtype=torch.int64)
    found, _ = getattr(model, "module", model).mc(
        KeyedJaggedTensor(list(TABLES), ids.repeat(len(TABLES)), lengths=lengths)
    )
    is_bag = getattr(model, "module", model).shape.is_bag
    held = torch.stack([each.float() for each in _embeddings(found, is_bag=is_bag)])
    model.train(was_training)
    return held


def collision(model: Any, table: str) -> Any:
    """Return the collision module of a table, of this rank if the model is sharded."""
    return getattr(model, "module", model).mc._managed_collision_collection._managed_collision_modules[table]


def local_rows(model: DistributedModelParallel, table: str) -> Tensor:
    """Return this rank's rows of a table, as a view."""
    states = {name.rpartition(".weight")[0].rpartition(".")[2]: each for name, each in model.state_dict().items()}
    return states[table].local_shards()[0].tensor
