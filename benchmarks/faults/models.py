"""Small sharded models, with access to their rows in the kernels' memory, independent of both trackers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

CPU = torch.device("cpu")
DIM = 8
LEARNING_RATE = 0.1

SHARDINGS: dict[str, Callable[[], Any]] = {
    "rows": row_wise,
    "rank 0": lambda: table_wise(rank=0),
    "columns": lambda: column_wise(ranks=[0, 0]),
    "replicated": data_parallel,
}


@dataclass(frozen=True)
class Table:
    """One table.

    Args:
        name: name of the table.
        rows: number of rows.
        sharding: a key of ``SHARDINGS``.
        feature: name of its feature, by default the table's name.
    """

    name: str
    rows: int = 12
    sharding: str = "rank 0"
    feature: str | None = None


class Model(nn.Module):
    """Collections that all look up the same features, with a linear layer if ``has_dense``."""

    def __init__(self, *, has_dense: bool, **collections: nn.Module) -> None:
        super().__init__()
        self.names = list(collections)
        for name, collection in collections.items():
            self.add_module(name, collection)
        self.dense = nn.Linear(DIM, 1, bias=False) if has_dense else nn.Identity()

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Return the loss of a batch. The gradient of a row grows with the number of its lookups."""
        losses = []
        for name in self.names:
            found = getattr(self, name)(features)
            if isinstance(found, tuple):  # a managed-collision module also returns the remapped ids
                found = found[0]
            values = found.values()  # a tensor, or a jagged tensor per feature
            rows = values if isinstance(values, Tensor) else torch.cat([each.values() for each in values])
            rows = rows.reshape(-1, DIM)
            losses.append(self.dense(rows).sum())
        return torch.stack(losses).sum()


@dataclass
class Training:
    """A sharded model and its training.

    Args:
        model: the model.
        optimizer: optimizer of the parameters without a fused optimizer; None if there are none.
    """

    model: DistributedModelParallel
    optimizer: torch.optim.Optimizer | None = None
    shards: dict[str, list[Shard]] = field(init=False)

    def __post_init__(self) -> None:
        self.shards = find_shards(self.model)

    def train(self, **ids: Sequence[int]) -> None:
        """Train one batch, given as feature to ids."""
        self.forward(**ids).backward()
        self.step()

    def forward(self, **ids: Sequence[int]) -> Any:  # noqa: ANN401  mypy has backward() untyped
        """Return the loss of one batch, a tensor."""
        return self.model(batch(ids))

    def step(self) -> None:
        """Step the optimizer, if any."""
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def rows(self, table: str) -> Tensor:
        """Return a copy of this rank's rows of a table, ``[R, D]``, with its column shards concatenated."""
        return torch.cat([shard.weight.clone() for shard in self.shards[table]], dim=1)


@dataclass(frozen=True)
class Shard:
    """One block of a table in a kernel of this rank.

    Args:
        weight: ``[R, columns]`` live view.
        row_offset: global id of the first row.
        first_column: index of the first column in the table.
        sums: ``[R]`` live optimizer state, if the fused optimizer keeps one number per row.
    """

    weight: Tensor
    row_offset: int
    first_column: int
    sums: Tensor | None


def batch(ids: Mapping[str, Sequence[int]]) -> KeyedJaggedTensor:
    """Build a batch of one sample from feature to ids."""
    return KeyedJaggedTensor(
        keys=list(ids),
        values=torch.tensor([each for values in ids.values() for each in values], dtype=torch.int64),
        lengths=torch.tensor([len(values) for values in ids.values()], dtype=torch.int32),
    )


def collection(tables: Sequence[Table], *, bag: bool = False) -> nn.Module:
    """Return an EmbeddingCollection or EmbeddingBagCollection on the meta device."""
    kind, config = (EmbeddingBagCollection, EmbeddingBagConfig) if bag else (EmbeddingCollection, EmbeddingConfig)
    module: nn.Module = kind(
        device=torch.device("meta"),
        tables=[
            config(
                name=table.name,
                num_embeddings=table.rows,
                embedding_dim=DIM,
                feature_names=[table.feature or table.name],
            )
            for table in tables
        ],
    )
    return module


def build(*tables: Table, bag: bool = False, fused: Any = RowWiseAdagrad, dense: Any = None) -> Training:  # noqa: ANN401
    """Build a model with one collection, ``ec``.

    Args:
        tables: its tables.
        bag: pool the rows.
        fused: optimizer class of the tables, for fused kernels.
        dense: optimizer class of all parameters, for DENSE kernels; None for fused kernels.
    """
    embedding = collection(tables, bag=bag)
    sharder = EmbeddingBagCollectionSharder() if bag else EmbeddingCollectionSharder()
    if dense is None:
        apply_optimizer_in_backward(fused, embedding.parameters(), {"lr": LEARNING_RATE})
    plan = module_plan(embedding, tables, sharder, kernel="fused" if dense is None else "dense")
    sharded = shard(Model(has_dense=True, ec=embedding), {"ec": plan}, sharder)
    return Training(sharded, None if dense is None else dense(sharded.parameters(), lr=LEARNING_RATE))


def build_managed(slots: Sequence[int]) -> Training:
    """Build a model with one managed-collision collection.

    Its table ``t`` has a row for each id in ``slots``, ascending, and the row of unknown ids.
    """
    table = Table("t", len(slots) + 1, "rows")
    embedding: Any = collection([table])
    policy = MCHManagedCollisionModule(
        zch_size=table.rows,
        device=CPU,
        eviction_interval=1000,  # no eviction within a case: resetting rows has no CPU kernel
        eviction_policy=DistanceLFU_EvictionPolicy(),
        input_hash_size=max(slots) + 1,
    )
    managed = ManagedCollisionEmbeddingCollection(
        embedding, ManagedCollisionCollection({table.name: policy}, embedding.embedding_configs())
    )
    apply_optimizer_in_backward(RowWiseAdagrad, embedding.parameters(), {"lr": LEARNING_RATE})
    sharder = ManagedCollisionEmbeddingCollectionSharder()
    plan = module_plan(managed, [table], sharder, kernel="fused")
    training = Training(shard(Model(has_dense=True, ec=managed), {"ec": plan}, sharder))
    for name, buffer in training.model.named_buffers():
        if name.endswith("_mch_sorted_raw_ids"):
            buffer[:-1] = torch.tensor(slots)
    return training


def build_several(tables: Mapping[str, Sequence[Table]], *, has_dense: bool) -> Training:
    """Build a model with several collections, by name."""
    model = Model(has_dense=has_dense, **{name: collection(each) for name, each in tables.items()})
    apply_optimizer_in_backward(RowWiseAdagrad, [p for p in model.parameters() if p.is_meta], {"lr": LEARNING_RATE})
    sharder = EmbeddingCollectionSharder()
    plans = {name: module_plan(getattr(model, name), each, sharder, kernel="fused") for name, each in tables.items()}
    return Training(shard(model, plans, sharder))


def module_plan(module: nn.Module, tables: Sequence[Table], sharder: Any, *, kernel: str) -> Any:  # noqa: ANN401
    """Return the sharding plan of a module."""
    plan = construct_module_sharding_plan(
        module,
        {table.name: SHARDINGS[table.sharding]() for table in tables},
        sharder=sharder,
        local_size=dist.get_world_size(),
        world_size=dist.get_world_size(),
        device_type="cpu",
    )
    for name, table in ((table.name, table) for table in tables):
        if table.sharding != "replicated":
            plan[name].compute_kernel = kernel
    return plan


def shard(model: nn.Module, plans: Mapping[str, Any], sharder: Any) -> DistributedModelParallel:  # noqa: ANN401
    """Shard the model over all ranks, with random initial rows."""
    torch.manual_seed(0)
    if isinstance(model.dense, nn.Linear):
        nn.init.ones_(model.dense.weight)
    return DistributedModelParallel(model, device=CPU, plan=ShardingPlan(dict(plans)), sharders=[sharder])


def kernels(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield every kernel of this rank with the FQN prefix of its tables."""
    for path, module in model.named_modules():
        if not hasattr(module, "_lookups"):
            continue
        holder = "embedding_bags" if "Bag" in type(module).__name__ else "embeddings"
        owner = ".".join(part for part in path.split(".") if part not in ("_dmp_wrapped_module", "module"))
        for lookup in module._lookups:  # noqa: SLF001
            inner = lookup.module if isinstance(lookup, DistributedDataParallel) else lookup
            for kernel in inner._emb_modules:  # noqa: SLF001
                yield f"{owner}.{holder}", kernel


def find_shards(model: nn.Module) -> dict[str, list[Shard]]:
    """Return table FQN to its blocks on this rank, sorted by column."""
    found: dict[str, list[Shard]] = {}
    for owner, kernel in kernels(model):
        for slot, config in enumerate(kernel.config.embedding_tables):
            found.setdefault(f"{owner}.{config.name}", []).append(_shard(kernel, slot, config))
    return {fqn: sorted(shards, key=lambda each: each.first_column) for fqn, shards in found.items()}


def _shard(kernel: Any, slot: int, config: Any) -> Shard:  # noqa: ANN401
    metadata = config.local_metadata
    row_offset, first_column = metadata.shard_offsets if metadata is not None else (0, 0)
    states: Any = ()
    if config.compute_kernel.value == "fused":
        states = kernel.emb_module.split_optimizer_states()
    sums = states[slot][0] if states and states[slot] else None
    return Shard(kernel.split_embedding_weights()[slot], row_offset, first_column, sums)
