"""Models of two tables with managed collisions, unsharded, quantized and sharded, and what they read for raw ids."""

from __future__ import annotations

from collections.abc import Callable
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
    ManagedCollisionCollection,
    MCHEvictionPolicy,
    MCHManagedCollisionModule,
)
from torchrec.optim import Adagrad  # row-wise Adagrad's rows cannot be reset on CPU
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.quant.embedding_modules import (
    QuantManagedCollisionEmbeddingBagCollection,
    QuantManagedCollisionEmbeddingCollection,
    quant_prep_enable_quant_state_dict_split_scale_bias_for_types,
)

from tests.models import with_kernel

TABLES = ("a", "b")
NUM_IDS = 60  # raw ids of the training
NUM_ROWS = 16
_CPU = torch.device("cpu")


def hashed(raw_ids: Tensor, size: int) -> Tensor:
    """Hash ids to other ones, as an ``input_hash_func``."""
    return (raw_ids * 7 + 5) % size


class Model(nn.Module):
    """Unsharded model of a table for each of ``TABLES``.

    Args:
        is_bag: True for an ``EmbeddingBagCollection``.
        is_hashed: True for an ``input_hash_func``.
        policy: class of the eviction policy.
        need_preprocess: False if a sharded model does not call ``input_hash_func``.
    """

    def __init__(
        self,
        *,
        is_bag: bool = False,
        is_hashed: bool = False,
        policy: Callable[[], MCHEvictionPolicy] = DistanceLFU_EvictionPolicy,
        need_preprocess: bool = True,
    ) -> None:
        super().__init__()
        config = EmbeddingBagConfig if is_bag else EmbeddingConfig
        tables: Any = [
            config(name=name, num_embeddings=NUM_ROWS, embedding_dim=4, feature_names=[name]) for name in TABLES
        ]
        modules: Any = {
            name: MCHManagedCollisionModule(
                zch_size=NUM_ROWS,
                device=_CPU,
                eviction_policy=policy(),
                eviction_interval=2,
                input_hash_size=NUM_IDS,
                input_hash_func=hashed if is_hashed else None,
            )
            for name in TABLES
        }
        collisions = ManagedCollisionCollection(modules, tables, need_preprocess=need_preprocess)
        self.mc: Any
        if is_bag:
            bags = EmbeddingBagCollection(tables=tables, device=_CPU)
            self.mc = ManagedCollisionEmbeddingBagCollection(bags, collisions)
        else:
            rows = EmbeddingCollection(tables=tables, device=_CPU)
            self.mc = ManagedCollisionEmbeddingCollection(rows, collisions)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Return the sum of all embeddings."""
        return torch.cat(list(_lookups(self.mc, features).values())).sum()


def _lookups(collection: Any, features: KeyedJaggedTensor) -> dict[str, Tensor]:
    """Return the rows of each table."""
    found, _ = collection(features)
    found = found.wait() if hasattr(found, "wait") else found
    return {name: found[name] if isinstance(found[name], Tensor) else found[name].values() for name in TABLES}


def sharded(model: Model, world_size: int, sizes: list[int] | None = None) -> DistributedModelParallel:
    """Return the model with fused row-wise tables.

    Args:
        model: the model.
        world_size: number of ranks.
        sizes: number of rows on each rank; None for equal ones.
    """
    apply_optimizer_in_backward(Adagrad, model.mc._embedding_module.parameters(), {"lr": 0.1})
    if isinstance(model.mc, ManagedCollisionEmbeddingBagCollection):
        sharder: Any = ManagedCollisionEmbeddingBagCollectionSharder(ebc_sharder=EmbeddingBagCollectionSharder())
    else:
        ec_sharder = EmbeddingCollectionSharder(use_index_dedup=False)
        sharder = ManagedCollisionEmbeddingCollectionSharder(ec_sharder=ec_sharder)
    plan = construct_module_sharding_plan(
        model.mc,
        dict.fromkeys(TABLES, with_kernel(row_wise(), "fused")),
        sharder=sharder,
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
    )
    if sizes is not None:
        for table in plan.values():
            first = 0
            for shard, size in zip(table.sharding_spec.shards, sizes, strict=True):
                shard.shard_offsets, shard.shard_sizes = [first, 0], [size, 4]
                first += size
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=_CPU,
        plan=ShardingPlan({"mc": plan}),
        sharders=[sharder],
    )


def quantized(model: Model, dtype: torch.dtype) -> Model:
    """Return the model with quantized tables."""
    is_bag = isinstance(model.mc, ManagedCollisionEmbeddingBagCollection)
    kinds = [EmbeddingBagCollection if is_bag else EmbeddingCollection]
    quant_prep_enable_quant_state_dict_split_scale_bias_for_types(model, kinds)
    model.mc.qconfig = QConfig(
        activation=PlaceholderObserver.with_args(dtype=torch.float),
        weight=PlaceholderObserver.with_args(dtype=dtype),
    )
    kind = QuantManagedCollisionEmbeddingBagCollection if is_bag else QuantManagedCollisionEmbeddingCollection
    model.mc = kind.from_float(model.mc)
    return model.eval()


def batch(generator: torch.Generator, size: int = 4) -> KeyedJaggedTensor:
    """Return a batch of random ids, many more than the rows, so that ids are evicted."""
    lengths = torch.randint(1, 3, (len(TABLES) * size,), generator=generator)
    ids = torch.randint(0, NUM_IDS, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(list(TABLES), ids, lengths=lengths)


@torch.no_grad()
def answers(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Return the ``[N, 4]`` rows that a model's evaluation reads for ``[N]`` ids. A collective for a sharded model."""
    was_training = model.training
    model.eval()
    lengths = torch.ones(len(TABLES) * len(ids), dtype=torch.int64)
    features = KeyedJaggedTensor(list(TABLES), ids.repeat(len(TABLES)), lengths=lengths)
    held = {name: rows.clone() for name, rows in _lookups(getattr(model, "module", model).mc, features).items()}
    model.train(was_training)
    return held
