"""Trainer of the resume oracle: its loader, its model on any number of ranks, and everything that it has to continue.

The data is partitioned independently of the number of ranks: batch ``k`` of partition ``p`` depends on the seed, ``p``
and ``k`` only, and every rank has some of the partitions. Each step has dropout, a BatchNorm whose statistics differ by
rank, optimizers with moments, a scheduler, learning rates of fused optimizers that change, and evaluations.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from delta_tracker.sharding.torchrec_api import tbe_of
from tests.models import Spec, Table, is_dense, kernels_of, shard

_DIM = 8
_NUM_PARTITIONS = 4
_BAGS = 2  # of each feature in a batch of a partition
_OPTIMIZERS = ("SGD", "Adagrad", "RowWiseAdagrad")
_KERNELS = ("fused", "fused_uvm", "fused_uvm_caching")
_EXTRAS = ("none", "data", "dense", "grid")


@dataclass(frozen=True)
class Job:
    """What a seed trains, on any number of ranks.

    Args:
        seed: seed of the data.
        optimizer: fused optimizer of the tables.
        kernel: kernel of the tables.
        extra: sharding or kernel of one more table.
        is_bag: True for an EmbeddingBagCollection.
        num_ahead: number of batches that the loop draws before it trains one.
    """

    seed: int
    optimizer: str
    kernel: str
    extra: str
    is_bag: bool
    num_ahead: int

    @classmethod
    def of(cls, seed: int) -> Job:
        """Return the job of a seed: consecutive seeds have different optimizers and extras."""
        draw = random.Random(f"job of {seed}")
        extra = _EXTRAS[seed % 4]
        # TorchRec 1.8 cannot build GRID_SHARD with row-wise Adagrad.
        optimizer = _OPTIMIZERS[seed // 4 % 2] if extra == "grid" else _OPTIMIZERS[(seed + 2) % 3]
        return cls(
            seed,
            optimizer,
            draw.choice(_KERNELS),
            extra,
            is_bag=extra != "none" or draw.random() < 0.5,  # an EmbeddingCollection has no such tables
            num_ahead=draw.randrange(3),
        )

    @property
    def world_size(self) -> int:
        """Number of ranks that train until they are killed."""
        return 4 if self.extra == "grid" else 2

    def spec(self, world_size: int) -> Spec:
        """Return the model of this job on some ranks, with the same column ranges on any number of ranks."""
        last = world_size - 1
        is_same = world_size == self.world_size
        tables = [
            Table("row", 17, "row" if is_same else f"table:{last}"),
            Table("table", 10, f"table:{last}" if is_same else "row"),
            Table("column", 30, f"column:0,{last}"),
        ]
        if self.extra == "data":
            tables.append(Table("extra", 11, "data"))
        if self.extra == "dense":
            tables.append(Table("extra", 11, "row", kernel="dense"))
        if self.extra == "grid":
            # Its columns are cut at 128.
            tables.append(Table("extra", 12, "grid:0,1" if world_size == 4 else f"column:0,{last}", dim=256))
        hosts = 2 if self.extra == "grid" and world_size == 4 else None
        return Spec(tables, bag=self.is_bag, kernel=self.kernel, optimizer=self.optimizer, local_size=hosts)


class Loader:
    """Batches of some partitions, one after the other; its state is the next batch of each partition."""

    def __init__(self, spec: Spec, seed: int) -> None:
        self._spec, self._seed = spec, seed
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self._next = {part: 0 for part in range(_NUM_PARTITIONS) if part % world_size == rank}

    def __iter__(self) -> Iterator[KeyedJaggedTensor]:
        while True:
            drawn = [self._draw(part, number) for part, number in self._next.items()]
            for part in self._next:
                self._next[part] += 1
            # from partitions of features to features of partitions
            lengths = [torch.cat([each[0] for each in feature]) for feature in zip(*drawn, strict=True)]
            ids = [torch.cat([each[1] for each in feature]) for feature in zip(*drawn, strict=True)]
            yield KeyedJaggedTensor(keys=self._spec.features, lengths=torch.cat(lengths), values=torch.cat(ids))

    def _draw(self, part: int, number: int) -> list[tuple[Tensor, Tensor]]:
        """Return lengths and ids of each feature."""
        generator = torch.Generator().manual_seed((self._seed * _NUM_PARTITIONS + part) * 1_000_003 + number)
        drawn = []
        for table in self._spec.tables:
            lengths = torch.randint(1, 3, (_BAGS,), generator=generator)
            drawn.append((lengths, torch.randint(table.rows, (int(lengths.sum()),), generator=generator)))
        return drawn

    def state_dict(self) -> dict[int, int]:
        """Return the live state, as some loaders do."""
        return self._next

    def load_state_dict(self, state: Mapping[int, int]) -> None:
        """Continue where another loader of the same partitions was."""
        assert state.keys() == self._next.keys(), (state, self._next)
        self._next = dict(state)

    def load_rank_states(self, states: Sequence[Mapping[int, int]]) -> None:
        """Continue where the loaders of any number of ranks were."""
        every = {part: number for state in states for part, number in state.items()}
        assert every.keys() == set(range(_NUM_PARTITIONS)), states
        self._next = {part: every[part] for part in self._next}


class _Head(nn.Sequential):
    """Layers on the rows."""

    in_features = _DIM

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(_DIM, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4, 1), nn.Softplus()
        )


class Trainer:
    """A model with its optimizers, and a training step.

    Args:
        job: what it trains.
    """

    def __init__(self, job: Job) -> None:
        self.spec = job.spec(dist.get_world_size())
        torch.manual_seed(0)
        self.model = shard(self.spec, dense=_Head())
        parameters = dict(self.model.named_parameters())
        kinds = {f"ec.{self._kind}.{each.name}.weight": each for each in self.spec.tables if is_dense(self.spec, each)}
        split = [parameters[fqn] for fqn, table in kinds.items() if table.sharding != "data"]
        whole = [parameters[fqn] for fqn, table in kinds.items() if table.sharding == "data"]
        self.optimizer = torch.optim.Adam([*self.model.module.dense.parameters(), *whole], lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 4, 0.7)
        self.sharded_optimizer = torch.optim.Adam(split, lr=0.05) if split else None
        self.loader = Loader(self.spec, job.seed)
        self._num_steps = 0
        torch.manual_seed(100 * job.seed + dist.get_rank())

    @property
    def _kind(self) -> str:
        return "embedding_bags" if self.spec.bag else "embeddings"

    @property
    def training_state(self) -> dict[str, Any]:
        """What rank 0 has to continue."""
        return {"optimizer": self.optimizer, "scheduler": self.scheduler, "steps": self}

    @property
    def rank_state(self) -> dict[str, Any]:
        """What each rank has to continue, without its random numbers."""
        return {} if self.sharded_optimizer is None else {"sharded": self.sharded_optimizer}

    def state_dict(self) -> dict[str, int]:
        """Return the number of steps."""
        return {"steps": self._num_steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Set the number of steps."""
        self._num_steps = state["steps"]

    def step(self, features: KeyedJaggedTensor) -> float:
        """Train one batch; return the loss."""
        fused = self.model.fused_optimizer
        optimizers = [each for each in (self.optimizer, self.sharded_optimizer, fused) if each is not None]
        for each in optimizers:
            each.zero_grad()
        loss = self.model(features)
        loss.backward()
        for each in optimizers:
            each.step()
        self.scheduler.step()
        self._num_steps += 1
        if self._num_steps % 3 == 0:
            self.model.eval()
            with torch.no_grad():
                self.model(features)
            self.model.train()
        for group in fused.param_groups:
            group["lr"] *= 0.98  # at each step, so that a restore of another step's rate is found at any kill
        return float(loss.detach())

    def blocks(self) -> list[tuple[str, tuple[int, int], Tensor, list[Tensor]]]:
        """Return table, first row and column, rows, and states ``[R, C]`` or ``[R, 1]`` of each block of this rank."""
        return blocks_of(self.model.module.ec)

    def scalars(self) -> dict[str, dict[str, float]]:
        """Return counters and learning rates of each table with a fused optimizer on this rank."""
        found = {}
        for kernel in kernels_of(self.model.module.ec):
            tbe = tbe_of(kernel)
            if not hasattr(tbe, "iter_cpu"):
                continue
            values = {
                "iter": int(tbe.iter),
                "iter_cpu": int(tbe.iter_cpu),
                "lr": float(tbe.learning_rate_tensor),
                "group_lr": float(kernel.fused_optimizer.param_groups[0]["lr"]),
            }
            found |= {config.name: values for config in kernel.config.embedding_tables}
        return found

    def record(self) -> dict[str, Any]:
        """Return a copy of everything that this rank has to continue, without its position in the data."""
        return {
            "blocks": [
                (table, first, rows.clone(), [each.clone() for each in states])
                for table, first, rows, states in self.blocks()
            ],
            "scalars": self.scalars(),
            "dense": {name: tensor.clone() for name, tensor in self.model.module.dense.state_dict().items()},
            "training": {name: each.state_dict() for name, each in self.training_state.items()},
            "rank": {name: each.state_dict() for name, each in self.rank_state.items()},
            "random": torch.get_rng_state(),
        }


def blocks_of(collection: Any) -> list[tuple[str, tuple[int, int], Tensor, list[Tensor]]]:
    """Return table, first row and column, rows, and states ``[R, C]`` or ``[R, 1]`` of each block of a rank."""
    found = []
    for kernel in kernels_of(collection):
        tbe = tbe_of(kernel)
        tbe.flush() if hasattr(tbe, "flush") else None
        states = tbe.split_optimizer_states() if hasattr(tbe, "split_optimizer_states") else []
        for index, (config, rows) in enumerate(
            zip(kernel.config.embedding_tables, kernel.split_embedding_weights(), strict=True)
        ):
            place = config.local_metadata
            first = (0, 0) if place is None else tuple(place.shard_offsets)
            own = states[index] if states else ()
            own = own.values() if isinstance(own, dict) else own
            found.append((config.name, first, rows.detach(), [each.view(len(rows), -1) for each in own]))
    return found


def whole_tables(records: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Tensor, dict[int, list[Tensor]]]]:
    """Return rows ``[R, D]`` of each table, and by first column the states ``[R, C]`` or ``[R, 1]``, from all ranks."""
    blocks = [block for record in records for block in record["blocks"]]
    sizes: dict[str, int] = {}
    dims: dict[str, int] = {}
    dtypes = {table: rows.dtype for table, _, rows, _ in blocks}
    for table, (row, column), rows, _ in blocks:
        sizes[table] = max(sizes.get(table, 0), row + len(rows))
        dims[table] = max(dims.get(table, 0), column + rows.shape[1])
    found = {
        table: (torch.full((size, dims[table]), torch.nan, dtype=dtypes[table]), dict[int, list[Tensor]]())
        for table, size in sizes.items()
    }
    for table, (row, column), rows, states in blocks:
        values, by_column = found[table]
        values[row : row + len(rows), column : column + rows.shape[1]] = rows
        wholes = by_column.setdefault(
            column, [torch.full((sizes[table], each.shape[1]), torch.nan, dtype=each.dtype) for each in states]
        )
        for whole, each in zip(wholes, states, strict=True):
            whole[row : row + len(rows)] = each
    return found


def differences(expected: Any, found: Any, path: str) -> list[str]:
    """Return the paths at which two trees of tensors and scalars differ in a bit."""
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        is_equal = expected.dtype == found.dtype and expected.shape == found.shape
        is_equal = is_equal and expected.contiguous().numpy().tobytes() == found.contiguous().numpy().tobytes()
        return [] if is_equal else [path]
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        if expected.keys() != found.keys():
            return [f"{path}: {sorted(map(str, expected))} and {sorted(map(str, found))}"]
        return [line for key in expected for line in differences(expected[key], found[key], f"{path}[{key!r}]")]
    if isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        if len(expected) != len(found):
            return [f"{path}: {len(expected)} and {len(found)} items"]
        return [
            line
            for index, pair in enumerate(zip(expected, found, strict=True))
            for line in differences(*pair, f"{path}[{index}]")
        ]
    return [] if expected == found else [f"{path}: {expected} and {found}"]
