"""Sharded models for the tests: a few tables, a linear layer, real TorchRec."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torchrec
from torch import Tensor, nn
from torch import distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import CacheAlgorithm, CacheParams, ShardingEnv, ShardingPlan, ShardingType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.types import DataType

# Set by .ci/matrix; every rank imports this module, so another torchrec is detected on each.
_UNDER_TEST = os.environ.get("TORCHREC_UNDER_TEST")
if _UNDER_TEST and not Path(torchrec.__file__).is_relative_to(_UNDER_TEST):
    raise ImportError(f"torchrec is imported from {torchrec.__file__}, not from {_UNDER_TEST}")


@dataclass
class Table:
    """One table of a test model.

    Its sharding is "row", "table:RANK", "column:RANK,RANK", "data", "table_row:HOST", "table_column:RANK,RANK" or
    "grid:HOST,HOST"; its kernel is the model's unless it has one of its own.
    """

    name: str
    rows: int
    sharding: str
    dim: int = 8
    features: tuple[str, ...] = ()
    dtype: str = "FP32"
    kernel: str | None = None

    def __post_init__(self) -> None:
        self.features = tuple(self.features) or (self.name,)


@dataclass
class Spec:
    """A test model: its tables and its kind."""

    tables: list[Table]
    bag: bool = False
    kernel: str = "fused"
    optimizer: str = "RowWiseAdagrad"
    local_size: int | None = None  # ranks per host, all of them unless given
    device: str = "cpu"
    features: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.features = list(dict.fromkeys(name for table in self.tables for name in table.features))

    @classmethod
    def every_sharding(cls, world_size: int, *, dtype: str = "FP32", **kwargs: object) -> Spec:
        """Row-wise, table-wise and column-wise tables, with all column shards on one rank too, and a shared feature."""
        last = world_size - 1
        tables = [
            Table("row", 17, "row", dtype=dtype),
            Table("first", 10, "table:0", features=("first", "second"), dtype=dtype),
            Table("last", 6, f"table:{last}", dtype=dtype),
            Table("column", 9, f"column:0,{last}", dtype=dtype),
            Table("stacked", 11, "column:0,0", dtype=dtype),
            Table("shared", 17, "row", features=("row",), dtype=dtype),
        ]
        return cls(tables, **kwargs)


class Model(nn.Module):
    """Looks all features up in one collection, and sums a linear layer over what comes out."""

    def __init__(self, spec: Spec, device: str) -> None:
        super().__init__()
        kind, config = (
            (EmbeddingBagCollection, EmbeddingBagConfig) if spec.bag else (EmbeddingCollection, EmbeddingConfig)
        )
        self.is_bag = spec.bag
        self.ec = kind(
            device=torch.device(device),
            tables=[
                config(
                    name=table.name,
                    num_embeddings=table.rows,
                    embedding_dim=table.dim,
                    feature_names=list(table.features),
                    data_type=DataType[table.dtype],
                )
                for table in spec.tables
            ],
        )
        self.dense = nn.Linear(spec.tables[0].dim, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        embedded = self.ec(features)
        rows = embedded.values() if self.is_bag else torch.cat([each.values() for each in embedded.values()])
        return self.dense(rows.reshape(-1, self.dense.in_features)).sum()


def with_kernel(generator: Callable[..., Any], kernel: str, kind: str | None = None) -> Callable[..., Any]:
    """A parameter's sharding with ``kernel``: only some generators take it, in torchrec 1.3 not even ``row_wise``.

    The cache of a table in unified memory has one set of 32 rows, if the table has at most 320 rows.
    """

    def generate(*args: Any, **kwargs: Any) -> Any:
        sharding = generator(*args, **kwargs)
        sharding.compute_kernel = kernel
        if kernel == "fused_uvm_caching":
            sharding.cache_params = CacheParams(algorithm=CacheAlgorithm.LRU, load_factor=0.1)
        sharding.sharding_type = kind or sharding.sharding_type
        return sharding

    return generate


def sharding_of(table: Table, kernel: str) -> Callable[..., Any]:
    """Return the generator of a table's sharding, with a compute kernel."""
    kind, _, places = table.sharding.partition(":")
    ranks = [int(rank) for rank in places.split(",") if rank]
    if kind == "data":
        return data_parallel()
    if kind == "table_column":
        # torchrec has no generator for it
        return with_kernel(column_wise(ranks=ranks), kernel, ShardingType.TABLE_COLUMN_WISE.value)
    generators = {
        "row": row_wise,
        "table": lambda: table_wise(rank=ranks[0]),
        "column": lambda: column_wise(ranks=ranks),
        "table_row": lambda: table_row_wise(host_index=ranks[0]),
        "grid": lambda: grid_shard(host_indexes=ranks),
    }
    return with_kernel(generators[kind](), kernel)


def shard(spec: Spec, learning_rate: float = 0.1, dense: nn.Module | None = None) -> DistributedModelParallel:
    """Build the model of ``spec``, sharded over all ranks as its tables define, with fused row-wise Adagrad.

    The layer on the rows is ``dense``, by default a new linear layer. It has ``in_features``.
    """
    torch.manual_seed(0)
    model = Model(spec, "meta")
    model.dense = nn.Linear(spec.tables[0].dim, 1, device=spec.device) if dense is None else dense
    fused_optimizer = {"SGD": torch.optim.SGD}.get(spec.optimizer) or getattr(torchrec.optim, spec.optimizer)
    parameters = dict(model.ec.named_parameters())
    for table in spec.tables:
        if not is_dense(spec, table):
            weight = parameters[f"{'embedding_bags' if spec.bag else 'embeddings'}.{table.name}.weight"]
            apply_optimizer_in_backward(fused_optimizer, [weight], {"lr": learning_rate})
    world_size = dist.get_world_size()
    # FBGEMM's module on a GPU accepts no bf16 cache, also where it has none, and its default is that of the rows.
    fused: dict[str, Any] = {}
    if any(table.dtype == "BF16" for table in spec.tables):
        # A cache of another dtype would round a row again, at random, each time that it is evicted or flushed.
        fused = {"cache_precision": DataType.FP32, "stochastic_rounding": spec.kernel != "fused_uvm_caching"}
    sharder = (EmbeddingBagCollectionSharder if spec.bag else EmbeddingCollectionSharder)(fused_params=fused)
    plan = construct_module_sharding_plan(
        model.ec,
        {table.name: sharding_of(table, table.kernel or spec.kernel) for table in spec.tables},
        sharder=sharder,
        local_size=spec.local_size or world_size,
        world_size=world_size,
        device_type=torch.device(spec.device).type,
    )
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device(spec.device),
        plan=ShardingPlan({"ec": plan}),
        sharders=[sharder],
    )


def lookups_of(collection: Any) -> list[Any]:
    """Return the lookups of a sharded collection on this rank, without a wrapper around them."""
    return [getattr(lookup, "module", lookup) for lookup in collection._lookups]


def kernels_of(collection: Any) -> list[Any]:
    """Return the kernels of a sharded collection on this rank."""
    return [kernel for lookup in lookups_of(collection) for kernel in lookup._emb_modules]


def is_dense(spec: Spec, table: Table) -> bool:
    """Return whether a table has an ordinary optimizer."""
    return table.sharding == "data" or (table.kernel or spec.kernel) == "dense"


def ordinary_optimizer(model: DistributedModelParallel, kind: str, **kwargs: float) -> KeyedOptimizerWrapper:
    """Return a torch optimizer for all parameters without a fused optimizer."""
    parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    return KeyedOptimizerWrapper(parameters, lambda these: getattr(torch.optim, kind)(these, **kwargs))


def batch(spec: Spec, generator: torch.Generator, size: int = 3, max_length: int = 2) -> KeyedJaggedTensor:
    """Return random ids for every feature, on the model's device: ``size`` bags of up to ``max_length`` ids."""
    rows = {name: table.rows for table in spec.tables for name in table.features}
    lengths = torch.randint(0, max_length + 1, (len(spec.features) * size,), generator=generator)
    values = [
        torch.randint(0, rows[name], (int(count),), generator=generator)
        for name, count in zip(spec.features, lengths.view(-1, size).sum(1), strict=True)
    ]
    features = KeyedJaggedTensor(keys=spec.features, values=torch.cat(values), lengths=lengths)
    return features.to(torch.device(spec.device))
