"""Random models of every sharding that TorchRec can train on a CPU, drawn from a seed.

A model has one to three collections with one to six tables together. The rows, dims, dtypes, optimizers and column
ranges of its tables are the same in all lives of a trainer; their shardings and kernels differ.

What TorchRec 1.8 cannot train on a CPU is not drawn: an EmbeddingCollection with a row-wise table that leaves a rank
without rows, with DENSE kernels or hierarchical shardings, dims that are no multiple of 4, and GRID_SHARD with row-wise
Adagrad.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torchrec
from torch import Tensor, nn
from torch import distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, PoolingType
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.types import DataType

from delta_tracker import TrackingMode
from tests.models import Spec, Table, batch, is_dense, sharding_of
from tests.system.resumed_trainer import blocks_of

Blocks = Sequence[tuple[str, tuple[int, int], Tensor, list[Tensor]]]
_GRID_DIM = 256  # cut at 128
_ROWS = (5, 6, 8, 17, 40, 97, 300)
_DIMS = (4, 8, 12, 16, 20, 64)  # fused kernels need a multiple of 4
_ODD_DIMS = (3, 5, 10)
_FUSED_KERNELS = ("fused", "fused", "fused_uvm", "fused_uvm_caching")
FUSED_OPTIMIZERS = ("SGD", "Adagrad", "RowWiseAdagrad")
DENSE_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1},
    "SGD momentum": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    "Adam": {"lr": 0.05},
    "AdamW": {"lr": 0.05},
    "Adagrad": {"lr": 0.1},
    "RMSprop": {"lr": 0.02, "momentum": 0.5},
}


@dataclass(frozen=True)
class Layout:
    """What all lives of a trainer have in common of a table.

    Args:
        kind: "whole" or "cut" for a table with a fused optimizer and one or two column ranges; "dense", "data" or
            "grid".
        table: the table; its sharding and kernel are drawn for each life.
        optimizer: its optimizer, a key of ``DENSE_OPTIMIZERS`` for "dense" and "data".
    """

    kind: str
    table: Table
    optimizer: str


@dataclass(frozen=True)
class Collection:
    """A collection of tables, in all lives of a trainer."""

    name: str
    is_bag: bool
    is_weighted: bool
    pooling: str
    layouts: tuple[Layout, ...]

    def fqn(self, table: str) -> str:
        """Return the FQN of a table."""
        return f"{self.name}.{'embedding_bags' if self.is_bag else 'embeddings'}.{table}"


def draw_collections(
    draw: random.Random, mode: TrackingMode, world_sizes: Sequence[int], *, has_dense: bool, has_grid: bool
) -> list[Collection]:
    """Draw the collections of a trainer.

    Args:
        draw: random generator.
        mode: mode of the tracker, which not every optimizer supports.
        world_sizes: numbers of ranks in all lives.
        has_dense: whether tables may have a DENSE kernel.
        has_grid: whether one table has GRID_SHARD on four ranks.
    """
    collections = []
    num_left = draw.randint(1, 6)
    while num_left > 0:
        number = len(collections)
        count = min(num_left, draw.randint(1, 4))
        num_left = 0 if number == 2 else num_left - count
        is_bag = (has_grid and number == 0) or draw.random() < 0.6
        dim = draw.choice(_DIMS)  # one for all tables of an EmbeddingCollection
        layouts = []
        for index in range(count):
            kinds = ["whole", "whole", "cut"]
            if is_bag and mode in (TrackingMode.ID_ONLY, TrackingMode.EMBEDDING):
                kinds += ["data"] + ["dense"] * has_dense
            kind = "grid" if has_grid and number == index == 0 else draw.choice(kinds)
            layouts.append(_draw_layout(draw, mode, world_sizes, f"t{index}", kind, is_bag=is_bag, dim=dim))
        for index, (layout, other) in enumerate(itertools.pairwise(layouts)):
            # A feature has ids of the smaller of its tables.
            if layout.table.rows == other.table.rows and draw.random() < 0.7:
                shared = replace(layout.table, features=(*layout.table.features, other.table.features[0]))
                layouts[index] = replace(layout, table=shared)
        pooling = draw.choice(["SUM", "SUM", "MEAN"])
        is_weighted = is_bag and pooling == "SUM" and draw.random() < 0.3
        collections.append(Collection(f"c{number}", is_bag, is_weighted, pooling, tuple(layouts)))
    return collections


def _draw_layout(
    draw: random.Random,
    mode: TrackingMode,
    world_sizes: Sequence[int],
    name: str,
    kind: str,
    *,
    is_bag: bool,
    dim: int,
) -> Layout:
    rows = draw.choice([each for each in _ROWS if all(_fills(each, size) for size in world_sizes)])
    dim = _GRID_DIM if kind == "grid" else dim
    if is_bag and kind != "grid":
        dim = draw.choice(_DIMS + _ODD_DIMS if kind in ("data", "dense") else _DIMS)
    if kind == "cut" and dim % 8:
        kind = "whole"
    features = (name,) if draw.random() < 0.7 else (name, f"{name}b")
    is_half = kind in ("whole", "cut") and draw.random() < 0.2
    table = Table(name, rows, "", dim=dim, features=features, dtype="FP16" if is_half else "FP32")
    if kind in ("dense", "data"):
        return Layout(kind, table, draw.choice(list(DENSE_OPTIMIZERS)))
    optimizers = {TrackingMode.MOMENTUM_LAST: FUSED_OPTIMIZERS[1:], TrackingMode.MOMENTUM_DIFF: FUSED_OPTIMIZERS[2:]}
    allowed = optimizers.get(mode, FUSED_OPTIMIZERS)
    return Layout(kind, table, draw.choice(allowed[:2] if kind == "grid" else allowed))


def _fills(rows: int, world_size: int) -> bool:
    """Return whether a row-wise table has rows on each rank."""
    return -(-rows // world_size) * (world_size - 1) < rows


def local_size(world_size: int) -> int:
    """Return the number of ranks per host."""
    return min(world_size, 2)


def draw_specs(draw: random.Random, collections: Sequence[Collection], world_size: int) -> list[Spec]:
    """Draw the shardings and kernels of the collections for one life on some ranks."""
    specs = []
    for collection in collections:
        tables = []
        for layout in collection.layouts:
            sharding = _draw_sharding(draw, layout, world_size, is_bag=collection.is_bag)
            kernel = "dense" if layout.kind in ("dense", "data") else draw.choice(_FUSED_KERNELS)
            tables.append(replace(layout.table, sharding=sharding, kernel=kernel))
        specs.append(Spec(tables, bag=collection.is_bag, local_size=local_size(world_size)))
    return specs


def _draw_sharding(draw: random.Random, layout: Layout, world_size: int, *, is_bag: bool) -> str:
    kind = layout.kind
    rank, other = draw.randrange(world_size), draw.randrange(world_size)
    host = draw.randrange(world_size // local_size(world_size))
    local = [host * local_size(world_size) + draw.randrange(local_size(world_size)) for _ in range(2)]
    if kind == "data":
        return "data"
    if kind == "grid":
        return "grid:0,1" if world_size == 4 else f"column:{rank},{other}"
    whole = ["row", "row", f"table:{rank}", *([f"table_row:{host}"] if is_bag else [])]
    cut = [f"column:{rank},{other}", *([f"table_column:{local[0]},{local[1]}"] if is_bag else [])]
    dense = [*whole[:3], cut[0]] if layout.table.dim % 2 == 0 else whole[:3]
    return draw.choice({"whole": whole, "cut": cut, "dense": dense}[kind])


class Model(nn.Module):
    """Looks the features of each collection up, and sums a nonlinear function of linear layers over what comes out."""

    def __init__(self, collections: Sequence[Collection], device: str) -> None:
        super().__init__()
        self.kinds = [(each.name, each.is_bag) for each in collections]
        for each in collections:
            setattr(self, each.name, _collection(each, device))
        dims = {layout.table.dim for each in collections for layout in each.layouts}
        self.dense = nn.ModuleDict({str(dim): nn.Linear(dim, 1) for dim in sorted(dims)})

    def forward(self, batches: Sequence[KeyedJaggedTensor]) -> Tensor:
        """Return the loss, a scalar."""
        losses = []
        for (name, is_bag), features in zip(self.kinds, batches, strict=True):
            embedded = getattr(self, name)(features)
            # a KeyedTensor of bags, or JaggedTensors by feature
            found = embedded.to_dict().values() if is_bag else [each.values() for each in embedded.values()]
            losses += [torch.sin(self.dense[str(each.shape[1])](each.float())).sum() for each in found]
        return torch.stack(losses).sum() + sum(layer.weight.sum() * 0.01 for layer in self.dense.values())


def _collection(collection: Collection, device: str) -> nn.Module:
    config = EmbeddingBagConfig if collection.is_bag else EmbeddingConfig
    tables = []
    for layout in collection.layouts:
        table = layout.table
        kwargs: dict[str, Any] = {"pooling": PoolingType[collection.pooling]} if collection.is_bag else {}
        kwargs |= {"name": table.name, "num_embeddings": table.rows, "embedding_dim": table.dim}
        tables.append(config(feature_names=list(table.features), data_type=DataType[table.dtype], **kwargs))
    if collection.is_bag:
        return EmbeddingBagCollection(tables=tables, is_weighted=collection.is_weighted, device=torch.device(device))
    return EmbeddingCollection(tables=tables, device=torch.device(device))


def _build(collections: Sequence[Collection], specs: Sequence[Spec], seed: int) -> DistributedModelParallel:
    """Build the sharded model of one life."""
    torch.manual_seed(seed)
    model = Model(collections, "meta")
    plans = {}
    for collection, spec in zip(collections, specs, strict=True):
        module = getattr(model, collection.name)
        for layout, table in zip(collection.layouts, spec.tables, strict=True):
            if not is_dense(spec, table):
                kind = torch.optim.SGD if layout.optimizer == "SGD" else getattr(torchrec.optim, layout.optimizer)
                weight = dict(module.named_parameters())[f"{collection.fqn(table.name).partition('.')[2]}.weight"]
                apply_optimizer_in_backward(kind, [weight], {"lr": 0.1})
        plans[collection.name] = construct_module_sharding_plan(
            module,
            {table.name: sharding_of(table, table.kernel or "fused") for table in spec.tables},
            sharder=EmbeddingBagCollectionSharder() if spec.bag else EmbeddingCollectionSharder(),
            local_size=spec.local_size,
            world_size=dist.get_world_size(),
            device_type="cpu",
        )
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan(plans),
        sharders=[EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()],
    )


def _ordinary_optimizers(
    model: DistributedModelParallel, collections: Sequence[Collection], specs: Sequence[Spec]
) -> tuple[list[torch.optim.Optimizer], list[torch.optim.Optimizer]]:
    """Return the optimizers of replicated parameters, and of tables with a DENSE kernel.

    The former are the dense layers with Adam, and each DATA_PARALLEL table with its own optimizer.
    """
    parameters = dict(model.named_parameters())
    replicated = [torch.optim.Adam(model.module.dense.parameters(), lr=0.01)]
    split = []
    for collection, spec in zip(collections, specs, strict=True):
        for layout, table in zip(collection.layouts, spec.tables, strict=True):
            if is_dense(spec, table):
                own = [parameters[name] for name in parameters if name == f"{collection.fqn(table.name)}.weight"]
                kwargs = DENSE_OPTIMIZERS[layout.optimizer]
                kind = getattr(torch.optim, layout.optimizer.partition(" ")[0])
                if own:
                    (replicated if table.sharding == "data" else split).append(kind(own, **kwargs))
    return replicated, split


def every(value: Any) -> list[Any]:
    """Return the values of all ranks. A collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


class Trained:
    """A model in training on one rank, with its optimizers and random batches.

    Args:
        collections: its collections.
        specs: their shardings.
        seed: seed of the model.
        seed_of_rank: seed of the batches.
    """

    def __init__(self, collections: Sequence[Collection], specs: Sequence[Spec], seed: int, seed_of_rank: int) -> None:
        self._collections, self._specs = collections, specs
        self.model = _build(collections, specs, seed)
        self.replicated, self.split = _ordinary_optimizers(self.model, collections, specs)
        self.generator = torch.Generator().manual_seed(seed_of_rank)

    def blocks(self) -> Blocks:
        """Return FQN, first row and column, rows and states of each block of this rank, as live views.

        They are read from the kernels, and not through the tracker.
        """
        return [
            (each.fqn(table), first, rows, states)
            for each in self._collections
            for table, first, rows, states in blocks_of(getattr(self.model.module, each.name))
        ]

    def dense(self) -> dict[str, Tensor]:
        """Return the dense tensors by name, as live views."""
        return {f"dense.{name}": each.detach() for name, each in self.model.module.dense.state_dict().items()}

    def batch(self) -> list[KeyedJaggedTensor]:
        """Return random ids for every feature of each collection, with weights if it has them."""
        drawn = []
        for collection, spec in zip(self._collections, self._specs, strict=True):
            features = batch(spec, self.generator)
            if collection.is_weighted:
                weights = torch.rand(len(features.values()), generator=self.generator)
                features = KeyedJaggedTensor(
                    keys=features.keys(), values=features.values(), lengths=features.lengths(), weights=weights
                )
            drawn.append(features)
        return drawn

    def looked_up(self, features: Sequence[KeyedJaggedTensor]) -> dict[str, set[int]]:
        """Return the global ids that any rank looks up in a batch, by FQN. A collective."""
        found: dict[str, set[int]] = {}
        for own in every([(each.keys(), each.lengths(), each.values()) for each in features]):
            for collection, spec, (keys, lengths, values) in zip(self._collections, self._specs, own, strict=True):
                ids = dict(zip(keys, values.split(lengths.view(len(keys), -1).sum(1).tolist()), strict=True))
                for table in spec.tables:
                    for name in table.features:
                        found.setdefault(collection.fqn(table.name), set()).update(ids[name].tolist())
        return found

    def step(self) -> None:
        """Step all ordinary optimizers, and drop the gradients."""
        for optimizer in (*self.replicated, *self.split):
            optimizer.step()
            optimizer.zero_grad()
