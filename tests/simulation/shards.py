"""Two tables that are sharded to the ranks of a job, perhaps in replicas. Only worlds with several ranks use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardedTensor, ShardingEnv, ShardingPlan
from torchrec.optim import Adagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.models import with_kernel
from tests.sharding.replicated import Replicated

_DIM = 4
_CPU = torch.device("cpu")
SIZES = {"bag": 12, "plain": 10}


class Bags(nn.Module):
    """Model with one collection of tables."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(name=name, num_embeddings=size, embedding_dim=_DIM, feature_names=[name])
            for name, size in SIZES.items()
        ]
        self.tables = EmbeddingBagCollection(tables=configs, device=device)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        values: Tensor = self.tables(features).values()
        return values


class TrainedShards:
    """The tables on one rank: one is sharded by rows. The optimizer runs in the backward pass.

    Args:
        replicas: number of replicas of the tables, each on an equal part of the ranks.
        are_adjacent: True if the ranks of a replica are adjacent, False if they alternate.
    """

    optimizer = None

    def __init__(self, replicas: int, *, are_adjacent: bool) -> None:
        bags = Bags(torch.device("meta"))
        apply_optimizer_in_backward(Adagrad, bags.parameters(), {"lr": 0.1})
        sharder, size = EmbeddingBagCollectionSharder(), dist.get_world_size() // replicas
        replica = dist.get_rank() // size if are_adjacent else dist.get_rank() % replicas
        self._is_read = replica == 0  # as the guide promises between two syncs
        plan = construct_module_sharding_plan(
            bags.tables,
            {"bag": with_kernel(row_wise(), "fused"), "plain": with_kernel(table_wise(rank=size - 1), "fused")},
            sharder=sharder,
            local_size=size,
            world_size=size,
            device_type="cpu",
        )
        options: dict[str, Any] = {"device": _CPU, "plan": ShardingPlan({"tables": plan}), "sharders": [sharder]}
        self.module: DistributedModelParallel
        if replicas == 1:
            env = ShardingEnv.from_process_group(dist.group.WORLD)
            self.module = DistributedModelParallel(bags, env=env, init_data_parallel=False, **options)
        else:
            self.module = Replicated(
                bags,
                world_size=dist.get_world_size(),
                sharding_group_size=size,
                global_pg=dist.group.WORLD,
                use_inter_host_allreduce=are_adjacent,
                init_data_parallel=False,
                **options,
            )

    def predict(self, source: torch.Generator) -> Tensor:
        """Return one value for each of two bags, of other ids on each rank."""
        for _ in range(dist.get_rank() + 1):
            ids = torch.cat([torch.randint(size, (4,), generator=source) for size in SIZES.values()])
        features = KeyedJaggedTensor(list(SIZES), ids, lengths=torch.full((4,), 2))
        return self.module(features).sum(1, keepdim=True)  # type: ignore[no-any-return]

    def average(self, *, with_states: bool) -> None:
        """Average the replicas."""
        self.module.sync(include_optimizer_state=with_states)

    def pieces(self) -> tuple[Pieces, Pieces]:
        """Return the shards of this rank: of the tables, and of the optimizer's states.

        Predictors serve those of the first replica. States of replicas cannot be published.
        """
        if isinstance(self.module, DMPCollection):
            return self._tables() if self._is_read else {}, {}
        states = self.module.fused_optimizer.state_dict()["state"]
        named = {f"{fqn} {name}": each for fqn, held in states.items() for name, each in held.items()}
        return self._tables(), pieces(named)

    def rows(self) -> dict[str, Tensor]:
        """Return the rows of this rank, by the FQN of the table. Those of each replica change."""
        return {name.removesuffix(".weight"): shard for name, shards in self._tables().items() for _, shard in shards}

    def _tables(self) -> Pieces:
        tables: Any = self.module.state_dict()
        if isinstance(self.module, DMPCollection):
            return {name: _held(each) for name, each in tables.items()}
        return pieces(dict(tables))


Piece = tuple[tuple[int, ...], Tensor]
"""Offsets of a shard, and a copy of its values."""
Pieces = dict[str, list[Piece]]
"""Shards of each tensor."""


def pieces(tensors: dict[str, ShardedTensor]) -> Pieces:
    """Return copies of the shards of this rank."""
    return {
        name: [(tuple(shard.metadata.shard_offsets), shard.tensor.detach().clone()) for shard in each.local_shards()]
        for name, each in tensors.items()
    }


def _held(tensor: DTensor) -> list[Piece]:
    """Return copies of the shards of this rank of a tensor with replicas. A rank without a shard has an offset."""
    held: Any = tensor.to_local()
    return [
        (tuple(at), each.detach().clone()) for at, each in zip(held.local_offsets(), held.local_shards(), strict=False)
    ]


def joined(of_ranks: Sequence[Pieces]) -> dict[str, Tensor]:
    """Return the whole tensors, from the pieces of all ranks."""
    found = {}
    for name in {name: None for of in of_ranks for name in of}:
        held = [piece for of in of_ranks for piece in of.get(name, [])]
        sizes = [max(at[axis] + each.shape[axis] for at, each in held) for axis in range(held[0][1].dim())]
        found[name] = whole = torch.zeros(sizes)
        for at, each in held:
            whole[tuple(slice(begin, begin + size) for begin, size in zip(at, each.shape, strict=True))] = each
    return found


class ServedShards:
    """The tables in service, on one host."""

    raw_ids = None

    def __init__(self) -> None:
        self.target = Bags(_CPU)
        self.load({name: torch.zeros_like(each) for name, each in self.copy().items()})

    def copy(self) -> dict[str, Tensor]:
        return {name: each.clone() for name, each in self.target.state_dict().items()}

    state = copy

    def load(self, state: dict[str, Tensor]) -> None:
        self.target.load_state_dict(state)
