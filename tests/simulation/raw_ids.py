"""A table of raw ids in training and in service. Only worlds with one import this, because torchrec takes seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardedTensor, ShardingEnv, ShardingPlan
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import LRU_EvictionPolicy, ManagedCollisionCollection, MCHManagedCollisionModule
from torchrec.optim import Adagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from delta_tracker import RawIdIndex
from tests.models import with_kernel
from tests.simulation.shards import Pieces, pieces

TABLE = "items._embedding_module.embeddings.item"
_NUM_ROWS, _DIM = 8, 4
RAW_IDS = torch.arange(30) + (1 << 40)
_NUM_TRAINED = 27  # the others never own a row
_HASH_SIZE = 100  # larger ids are sent to the rank of their remainder
_CPU = torch.device("cpu")


class Items(nn.Module):
    """Table with fewer rows than raw ids. Rows belong to the ids that were trained last.

    Args:
        resets: generator of the rows of newly admitted ids; ranks that are threads share the default one.
    """

    def __init__(self, resets: torch.Generator = torch.default_generator) -> None:
        super().__init__()
        limit = _NUM_ROWS**-0.5
        tables = [
            EmbeddingConfig(
                name="item",
                num_embeddings=_NUM_ROWS,
                embedding_dim=_DIM,
                feature_names=["item"],
                init_fn=partial(nn.init.uniform_, a=-limit, b=limit, generator=resets),
            )
        ]
        module = MCHManagedCollisionModule(
            zch_size=_NUM_ROWS,
            device=_CPU,
            eviction_policy=LRU_EvictionPolicy(),
            eviction_interval=2,
            input_hash_size=_HASH_SIZE,
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
    """The table in training, sharded by rows to all ranks. Its optimizer runs in the backward pass."""

    optimizer = None

    def __init__(self) -> None:
        self._resets = torch.Generator().manual_seed(torch.initial_seed())
        items, size = Items(self._resets), dist.get_world_size()
        apply_optimizer_in_backward(Adagrad, items.parameters(), {"lr": 0.1})
        sharder = ManagedCollisionEmbeddingCollectionSharder(
            ec_sharder=EmbeddingCollectionSharder(use_index_dedup=False)
        )
        plan = construct_module_sharding_plan(
            items.items,
            {"item": with_kernel(row_wise(), "fused")},
            sharder=sharder,
            local_size=size,
            world_size=size,
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
        """Return one value for each of some raw ids, of others on each rank."""
        self._resets.set_state(source.get_state())  # so that a restored trainer draws the same rows
        for _ in range(dist.get_rank() + 1):
            ids = RAW_IDS[torch.randint(_NUM_TRAINED, (4,), generator=source)]
        return self.module(ids).sum(1, keepdim=True)  # type: ignore[no-any-return]

    def copy(self) -> dict[str, Tensor]:
        return _answers(self.module)

    def states(self) -> dict[str, Tensor]:
        """Return the optimizer's state of each row of this rank."""
        return {name: each.local_shards()[0].tensor.clone() for name, each in self._states().items()}

    def pieces(self) -> tuple[Pieces, Pieces]:
        """Return the rows of all raw ids, which any rank reads, and the states of the rows of this rank."""
        whole = {name: [((0, 0), rows)] for name, rows in self.copy().items()}
        return whole, pieces(self._states())

    def rows(self) -> dict[str, Tensor]:
        """Return nothing: a row whose id is evicted changes without a step."""
        return {}

    def _states(self) -> dict[str, ShardedTensor]:
        (states,) = self.module.fused_optimizer.state_dict()["state"].values()
        return dict(states)


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
