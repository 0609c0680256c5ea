"""A table of raw ids in training and in service. Only worlds with one import this, because torchrec takes seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

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
from torchrec.modules.mc_modules import LRU_EvictionPolicy, ManagedCollisionCollection, MCHManagedCollisionModule
from torchrec.optim import Adagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from delta_tracker import RawIdIndex
from tests.models import with_kernel

TABLE = "items._embedding_module.embeddings.item"
_NUM_ROWS, _DIM = 8, 4
RAW_IDS = torch.arange(30) + (1 << 40)
_NUM_TRAINED = 27  # the others never own a row
_CPU = torch.device("cpu")


class Items(nn.Module):
    """Table with fewer rows than raw ids. Rows belong to the ids that were trained last."""

    def __init__(self) -> None:
        super().__init__()
        tables = [EmbeddingConfig(name="item", num_embeddings=_NUM_ROWS, embedding_dim=_DIM, feature_names=["item"])]
        module = MCHManagedCollisionModule(
            zch_size=_NUM_ROWS, device=_CPU, eviction_policy=LRU_EvictionPolicy(), eviction_interval=2
        )
        collisions = ManagedCollisionCollection({"item": module}, tables)
        self.items = ManagedCollisionEmbeddingCollection(EmbeddingCollection(tables=tables), collisions)

    def forward(self, raw_ids: Tensor) -> Tensor:
        features = KeyedJaggedTensor(["item"], raw_ids, lengths=torch.ones_like(raw_ids))
        rows: Tensor = self.items(features)[0]["item"].values()
        return rows


@torch.no_grad()
def _answers(model: nn.Module) -> dict[str, Tensor]:
    """Return the row that an evaluation reads for each raw id."""
    was_training = model.training
    rows = model.eval()(RAW_IDS).clone()
    model.train(was_training)
    return {"item": rows}


class TrainedItems:
    """The table in training, sharded to one rank. Its optimizer runs in the backward pass."""

    optimizer = None

    def __init__(self) -> None:
        items = Items()
        apply_optimizer_in_backward(Adagrad, items.parameters(), {"lr": 0.1})
        sharder = ManagedCollisionEmbeddingCollectionSharder(
            ec_sharder=EmbeddingCollectionSharder(use_index_dedup=False)
        )
        plan = construct_module_sharding_plan(
            items.items,
            {"item": with_kernel(row_wise(), "fused")},
            sharder=sharder,
            local_size=1,
            world_size=1,
            device_type="cpu",
        )
        self.module = DistributedModelParallel(
            items,
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=_CPU,
            plan=ShardingPlan({"items": plan}),
            sharders=[sharder],
        )

    def predict(self, source: torch.Generator) -> Tensor:
        """Return one value for each of some raw ids."""
        ids = RAW_IDS[torch.randint(_NUM_TRAINED, (4,), generator=source)]
        return self.module(ids).sum(1, keepdim=True)  # type: ignore[no-any-return]

    def copy(self) -> dict[str, Tensor]:
        return _answers(self.module)

    def states(self) -> dict[str, Tensor]:
        """Return the optimizer's state of each row."""
        (states,) = self.module.fused_optimizer.state_dict()["state"].values()
        return {name: each.local_shards()[0].tensor.clone() for name, each in states.items()}


class ServedItems:
    """The table in a model of TorchRec."""

    raw_ids: Mapping[str, RawIdIndex] | None = None

    def __init__(self) -> None:
        self.target = Items().eval()

    def copy(self) -> dict[str, Tensor]:
        return _answers(self.target)

    def state(self) -> dict[str, Tensor]:
        return {name: each.clone() for name, each in self.target.state_dict().items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.target.load_state_dict(state)


class IndexedItems:
    """The table as a tensor with an index of its raw ids."""

    def __init__(self) -> None:
        self.target = {TABLE: torch.zeros(_NUM_ROWS, _DIM)}
        self.raw_ids = {TABLE: RawIdIndex(_NUM_ROWS)}

    def copy(self) -> dict[str, Tensor]:
        return {"item": self.target[TABLE][self.raw_ids[TABLE].rows_of(RAW_IDS)]}

    def state(self) -> dict[str, Tensor]:
        return {"rows": self.target[TABLE].clone(), **self.raw_ids[TABLE].state_dict()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        index = dict(state)
        self.target[TABLE].copy_(index.pop("rows"))
        self.raw_ids[TABLE].load_state_dict(index)


@contextmanager
def process_group() -> Iterator[None]:
    """Context manager of a group with one rank, in which the table is sharded."""
    dist.init_process_group("threaded", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
