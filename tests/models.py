"""Sharded models for the tests: a few tables, a linear layer, real TorchRec."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torchrec
from torch import Tensor, nn
from torch import distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.types import DataType


@dataclass
class Table:
    """One table of a test model; sharding is "row", "table:RANK" or "column:RANK,RANK"."""

    name: str
    rows: int
    sharding: str
    dim: int = 8
    features: tuple[str, ...] = ()
    dtype: str = "FP32"

    def __post_init__(self) -> None:
        self.features = tuple(self.features) or (self.name,)


@dataclass
class Spec:
    """A test model: its tables and its kind."""

    tables: list[Table]
    bag: bool = False
    kernel: str = "fused"
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


def _sharding(table: Table, kernel: str) -> object:
    kind, _, ranks = table.sharding.partition(":")
    if kind == "row":
        return row_wise(compute_kernel=kernel)
    if kind == "table":
        return table_wise(rank=int(ranks), compute_kernel=kernel)
    return column_wise(ranks=[int(rank) for rank in ranks.split(",")], compute_kernel=kernel)


def shard(spec: Spec, learning_rate: float = 0.1) -> DistributedModelParallel:
    """The model of ``spec``, sharded over all ranks as its tables say, with fused row-wise Adagrad."""
    torch.manual_seed(0)
    model = Model(spec, "meta")
    model.dense = nn.Linear(spec.tables[0].dim, 1)
    apply_optimizer_in_backward(torchrec.optim.RowWiseAdagrad, model.ec.parameters(), {"lr": learning_rate})
    world_size = dist.get_world_size()
    sharder = EmbeddingBagCollectionSharder() if spec.bag else EmbeddingCollectionSharder()
    plan = construct_module_sharding_plan(
        model.ec,
        {table.name: _sharding(table, spec.kernel) for table in spec.tables},
        sharder=sharder,
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
    )
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"ec": plan}),
        sharders=[sharder],
    )


def batch(spec: Spec, generator: torch.Generator, size: int = 3, max_length: int = 2) -> KeyedJaggedTensor:
    """Random ids for every feature: ``size`` bags of up to ``max_length`` ids."""
    rows = {name: table.rows for table in spec.tables for name in table.features}
    lengths = torch.randint(0, max_length + 1, (len(spec.features) * size,), generator=generator)
    values = [
        torch.randint(0, rows[name], (int(count),), generator=generator)
        for name, count in zip(spec.features, lengths.view(-1, size).sum(1), strict=True)
    ]
    return KeyedJaggedTensor(keys=spec.features, values=torch.cat(values), lengths=lengths)
