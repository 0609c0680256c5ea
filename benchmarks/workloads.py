"""Workloads of the benchmarks: sets of tables, and a trainer of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from delta_tracker import ModelDeltaTracker


@dataclass(frozen=True, slots=True)
class Table:
    """One table, looked up by a feature of the same name."""

    name: str
    num_rows: int
    dim: int = 64


def tables(count: int, num_rows: int, dim: int = 64) -> tuple[Table, ...]:
    """Return ``count`` tables of the same size."""
    return tuple(Table(f"t{number}", num_rows, dim) for number in range(count))


@contextmanager
def one_rank() -> Iterator[None]:
    """Initialize a gloo process group of one rank, without a port."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def bags(
    table_set: Sequence[Table], optimizer: type[torch.optim.Optimizer] = torch.optim.SGD
) -> EmbeddingBagCollection:
    """Return a collection of the tables on the meta device, with the optimizer fused into the backward pass."""
    made = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=table.name, num_embeddings=table.num_rows, embedding_dim=table.dim, feature_names=[table.name]
            )
            for table in table_set
        ],
    )
    apply_optimizer_in_backward(optimizer, made.parameters(), {"lr": 0.1})
    return made


_CPU = torch.device("cpu")


def shard(
    model: nn.Module, table_set: Sequence[Table], device: torch.device = _CPU, kernel: str = "fused"
) -> DistributedModelParallel:
    """Shard a model whose submodule ``ebc`` is the :func:`bags` of the tables. Needs :func:`one_rank`.

    Args:
        model: the model.
        table_set: the tables.
        device: device of the rows.
        kernel: TorchRec's name of the compute kernel.
    """

    def sharding(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  of torchrec
        made = table_wise(rank=0)(*args, **kwargs)
        made.compute_kernel = kernel
        return made

    sharder = EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        model.get_submodule("ebc"),
        {table.name: sharding for table in table_set},
        sharder=sharder,
        local_size=1,
        world_size=1,
        device_type=device.type,
    )
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=device,
        plan=ShardingPlan({"ebc": plan}),
        sharders=[sharder],
    )


class Trainer:
    """Tables under DistributedModelParallel, with SGD fused into the backward pass. Needs :func:`one_rank`.

    Args:
        table_set: the tables, the first of which :meth:`train` looks up.
        device: device of the rows.
        kernel: TorchRec's name of the compute kernel.
    """

    def __init__(self, table_set: Sequence[Table], device: torch.device = _CPU, kernel: str = "fused") -> None:
        torch.manual_seed(0)
        self.tables = tuple(table_set)
        self.model = shard(nn.ModuleDict({"ebc": bags(table_set)}), table_set, device, kernel)

    @staticmethod
    def fqn(table: Table) -> str:
        """Return the table's name in the model and in a stream."""
        return f"ebc.embedding_bags.{table.name}"

    def train(self, ids: Tensor, tracker: ModelDeltaTracker) -> None:
        """Train one batch that looks up ``ids``, ``[N]`` int64, in the first table, each in its own bag."""
        features = KeyedJaggedTensor(
            keys=[table.name for table in self.tables],
            values=ids,
            lengths=torch.cat([torch.ones_like(ids), ids.new_zeros(len(ids) * (len(self.tables) - 1))]),
        )
        pooled = self.model.module["ebc"](features).values()
        pooled.backward(torch.rand(pooled.shape, device=pooled.device))
        tracker.step()
