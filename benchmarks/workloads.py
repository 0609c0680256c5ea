"""What the benchmarks work on: ids as real lookups draw them, sets of tables, and a trainer of one rank.

Letters: ``N`` ids, ``R`` rows of a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

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


def uniform_ids(num_rows: int, num_ids: int, generator: torch.Generator) -> Tensor:
    """``[N]`` int64 ids, each row as likely as any other."""
    return torch.randint(num_rows, (num_ids,), generator=generator)


def zipf_ids(num_rows: int, num_ids: int, generator: torch.Generator, exponent: float = 1.05) -> Tensor:
    """``[N]`` int64 ids of which the k-th most frequent has a probability like ``k ** -exponent``; 0 is the first.

    By inversion of the continuous law on ``[1, R + 1)``: its distribution function is
    ``(1 - x ** (1 - exponent)) / (1 - (R + 1) ** (1 - exponent))``.

    Args:
        num_rows: ``R``.
        num_ids: ``N``.
        generator: where the random numbers come from.
        exponent: over 1.
    """
    uniform = torch.rand(num_ids, generator=generator, dtype=torch.float64)
    power = 1 - exponent
    ranks: Tensor = (1 - uniform * (1 - (num_rows + 1.0) ** power)) ** (1 / power)
    return (ranks.long() - 1).clamp_(0, num_rows - 1)


def distinct_ids(num_rows: int, num_ids: int, generator: torch.Generator) -> Tensor:
    """``[N]`` int64 ids, ascending, each once, every set of them as likely as any other."""
    chosen: Tensor = torch.randperm(num_rows, generator=generator)[:num_ids]
    return chosen.sort()[0]


@dataclass(frozen=True, slots=True)
class Table:
    """One table, looked up by a feature of its name."""

    name: str
    num_rows: int
    dim: int = 64


def tables(count: int, num_rows: int, dim: int = 64) -> tuple[Table, ...]:
    """A set of equal tables."""
    return tuple(Table(f"t{number}", num_rows, dim) for number in range(count))


@contextmanager
def one_rank() -> Iterator[None]:
    """A gloo group of this process alone, without a port."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def bags(table_set: Sequence[Table]) -> EmbeddingBagCollection:
    """A collection of the tables, not made yet, with SGD to be fused into the backward pass."""
    made = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=table.name, num_embeddings=table.num_rows, embedding_dim=table.dim, feature_names=[table.name]
            )
            for table in table_set
        ],
    )
    apply_optimizer_in_backward(torch.optim.SGD, made.parameters(), {"lr": 0.1})
    return made


def shard(model: nn.Module, table_set: Sequence[Table]) -> DistributedModelParallel:
    """A model whose submodule ``ebc`` is the :func:`bags` of the tables, on this one rank. Needs :func:`one_rank`."""
    sharder = EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        model.get_submodule("ebc"),
        {table.name: table_wise(rank=0) for table in table_set},
        sharder=sharder,
        local_size=1,
        world_size=1,
        device_type="cpu",
    )
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"ebc": plan}),
        sharders=[sharder],
    )


class Trainer:
    """Tables under DistributedModelParallel on the CPU, with SGD fused into the backward pass. Needs :func:`one_rank`.

    Args:
        table_set: the tables, the first of which :meth:`train` looks up.
    """

    def __init__(self, table_set: Sequence[Table]) -> None:
        torch.manual_seed(0)
        self.tables = tuple(table_set)
        self.model = shard(nn.ModuleDict({"ebc": bags(table_set)}), table_set)

    @staticmethod
    def fqn(table: Table) -> str:
        """The table's name in the model and in a stream."""
        return f"ebc.embedding_bags.{table.name}"

    def train(self, ids: Tensor, tracker: ModelDeltaTracker) -> None:
        """One batch, in which each of ``ids``, ``[N]`` int64, is looked up in the first table by a bag of its own."""
        features = KeyedJaggedTensor(
            keys=[table.name for table in self.tables],
            values=ids,
            lengths=torch.cat([torch.ones_like(ids), ids.new_zeros(len(ids) * (len(self.tables) - 1))]),
        )
        pooled = self.model.module["ebc"](features).values()
        pooled.backward(torch.rand(pooled.shape))
        tracker.step()
