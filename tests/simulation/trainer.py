"""The trainer of a world, which keeps a full copy of its tables for each version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from delta_tracker import Encoding, Publisher, Recovery, Retention, Standby, Upkeep, restore
from delta_tracker.compat import ModelDeltaTracker
from delta_tracker.errors import DeltaTrackerError
from delta_tracker.integrations.dcp import SavedTracker
from delta_tracker.monitor import Monitor
from tests.simulation.threads import SCHEDULER
from tests.simulation.values import Schedule

SHAPES: tuple[Mapping[str, tuple[int, int]], ...] = (
    {"bag": (12, 4), "plain": (10, 4)},
    {"bag": (15, 4), "plain": (10, 4)},
    {"bag": (9, 4), "plain": (10, 4)},
    {"bag": (12, 6), "plain": (10, 4)},
    {"bag": (12, 4)},
    {"bag": (12, 4), "plain": (10, 4), "extra": (7, 4)},
)
"""Rows and width of each table, for each number of a model. The first one is that of a world without changes."""
SHARDED = ("tables.embedding_bags.bag.weight", "tables.embedding_bags.plain.weight")
TABLES = ("bag.weight", "plain.weight", "extra.weight", "item", *SHARDED)
_LARGE = 1e4
_CONSUMER = "program"


class Model(nn.Module):
    """A table with sparse gradients, others with dense gradients, and a dense layer.

    Args:
        number: number of its :data:`SHAPES`.
    """

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.shape = SHAPES[number]
        for name, (num_rows, width) in self.shape.items():
            is_bag = name == "bag"
            table = (
                nn.EmbeddingBag(num_rows, width, mode="sum", sparse=True) if is_bag else nn.Embedding(num_rows, width)
            )
            self.add_module(name, table)
        self.over = nn.Linear(sum(width for _, width in self.shape.values()), 1)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.over(torch.cat([self.get_submodule(name)(ids) for name, ids in batch.items()], 1))

    def draw(self, source: torch.Generator) -> dict[str, Tensor]:
        """Return random ids of two samples, by table."""
        sizes = {name: (2, 2) if name == "bag" else (2,) for name in self.shape}
        return {name: torch.randint(self.shape[name][0], size, generator=source) for name, size in sizes.items()}

    def tables(self) -> dict[str, Tensor]:
        """Return the weight of each table."""
        return {name: self.get_parameter(f"{name}.weight") for name in self.shape}

    def copy(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.named_parameters()}


class Trained(Protocol):
    """Protocol of what a trainer trains.

    Attributes:
        module: the model.
        optimizer: its optimizer, None if it runs in the backward pass.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer | None

    def predict(self, source: torch.Generator) -> Tensor:
        """Return values, ``[N, 1]``, for random ids."""
        ...

    def copy(self) -> dict[str, Tensor]:
        """Return what a predictor must serve."""
        ...

    def states(self) -> dict[str, Tensor]:
        """Return the states of the optimizer."""
        ...

    def rows(self) -> dict[str, Tensor]:
        """Return the rows of this rank, by the FQN of the table."""
        ...


class _TrainedModel:
    """The model in training."""

    def __init__(self, number: int) -> None:
        self.module = Model(number)
        self.optimizer = torch.optim.Adagrad(self.module.parameters(), lr=0.1)
        self.module.over.weight.register_hook(_finite)
        self._batch = {name: torch.zeros_like(ids) for name, ids in self.module.draw(torch.Generator()).items()}
        self._spoiled: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None  # batch, and the values before

    def predict(self, source: torch.Generator) -> Tensor:
        self._batch = self.module.draw(source)
        output: Tensor = self.module(self._batch)
        output.register_hook(_finite)
        return output

    @torch.no_grad()
    def edit(self, choice: int) -> None:
        """Write to a row of each table without a lookup."""
        for tensor in self.module.tables().values():
            tensor[choice // 5 % len(tensor)] /= 2

    @torch.no_grad()
    def spoil(self, value: float, *, is_dense: bool) -> None:
        """Write a value to the dense layer, or to the rows of the last batch."""
        self._spoiled = self._batch, self.copy()
        self.module(self._batch)
        rows = {table: self._batch[name].flatten() for name, table in self.module.tables().items()}
        for tensor, each in ({self.module.over.bias: torch.tensor(0)} if is_dense else rows).items():
            tensor[each] = value

    @torch.no_grad()
    def heal(self) -> bool:
        """Write the values before the last :meth:`spoil`. Return False if there are none."""
        if self._spoiled is None:
            return False
        batch, values = self._spoiled
        self._spoiled = None
        self.module(batch)
        rows = {f"{name}.weight": ids.flatten() for name, ids in batch.items()}
        for name, tensor in self.module.named_parameters():
            each = rows.get(name, slice(None))
            tensor[each] = values[name][each]
        return True

    def copy(self) -> dict[str, Tensor]:
        return self.module.copy()

    def rows(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.module.tables().items()}

    def states(self) -> dict[str, Tensor]:
        names = [name for name, _ in self.module.named_parameters()]
        states = self.optimizer.state_dict()["state"].items()
        return {f"{names[number]} {kind}": each.clone() for number, held in states for kind, each in held.items()}


def _finite(gradient: Tensor) -> Tensor:
    """Return a gradient by which no bad row spoils another one."""
    return gradient.nan_to_num(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Copy:
    """What a trainer has at one version.

    Args:
        tensors: what a predictor of this version serves.
        states: the states of the optimizer.
    """

    tensors: Mapping[str, Tensor]
    states: Mapping[str, Tensor]

    @property
    def is_finite(self) -> bool:
        return all(bool(tensor.isfinite().all()) for tensor in self.tensors.values())

    @property
    def is_healthy(self) -> bool:
        """True without NaN, infinite and large values."""
        return not self.large

    @property
    def large(self) -> set[str]:
        """Names of the tensors with NaN, infinite or large values. A gate measures the drift of tables only."""
        return {name for name, tensor in self.tensors.items() if not bool((tensor.abs() < _LARGE).all())}

    def lost(self, restored: Copy) -> str | None:
        """Return what differs after a restore, None if nothing does."""
        if self.shapes != restored.shapes:
            return f"{restored.shapes} instead of {self.shapes}"
        return _difference(self.tensors, restored.tensors, None) or _difference(self.states, restored.states, None)

    def kept(self, saved: Copy, restored: Copy) -> str | None:
        """Return what a restore of another model has changed that the version lacks; None if nothing is."""
        for name, tensor in restored.tensors.items():
            num_rows = num_common(name, saved.tensors, restored.tensors)
            if num_rows is not None and not tensor[num_rows:].equal(self.tensors[name][num_rows:]):
                return f"{name} has other rows from {num_rows} on"
        for key, state in restored.states.items():
            parameter = key.split()[0]
            name = parameter if parameter in restored.tensors else parameter.removesuffix(".weight")
            is_common = num_common(name, saved.tensors, restored.tensors) is None
            if not state.equal((saved if is_common else self).states[key]):
                return f"the state {key} is not that {'of the version' if is_common else 'before'}"
        return None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def difference(self, held: Mapping[str, Tensor], encoding: str | None) -> str | None:
        """Return which rows of a reader differ from these, None if none do. A row store has no dense tensors.

        A reader of another model has the rows that both have.
        """
        return _difference(self.tensors, held, encoding)

    def equal_rows(self, name: str, held: Tensor, encoding: str | None) -> Tensor:
        """Return a mask of the rows of a table or dense tensor that a reader has like this."""
        mask = torch.zeros(len(held), dtype=torch.bool)
        num_rows = num_common(name, self.tensors, {name: held})
        if num_rows != 0:
            encoding = encoding if name in TABLES else None
            is_equal = _is_equal(self.tensors[name][:num_rows], held[:num_rows], encoding)
            mask[:num_rows] = is_equal.reshape(len(is_equal), -1).all(1)
        return mask


def _difference(tensors: Mapping[str, Tensor], held: Mapping[str, Tensor], encoding: str | None) -> str | None:
    for name in held:
        num_rows = num_common(name, tensors, held)
        if num_rows == 0:
            continue
        tensor, other = tensors[name], held[name]
        if num_rows is not None:
            tensor, other = tensor[:num_rows], other[:num_rows]
        is_equal = _is_equal(tensor, other, encoding if name in TABLES else None)
        if not bool(is_equal.all()):
            rows = (~is_equal).reshape(-1, *is_equal.shape[1:]).flatten(1).any(1) if is_equal.dim() > 1 else ~is_equal
            return f"{name} rows {rows.nonzero().flatten().tolist()}"
    return None


def in_stream(name: str) -> str:
    """Return the name in the stream of a tensor in a copy."""
    return name.removesuffix(".weight") if name in TABLES else name


def num_common(name: str, trained: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> int | None:
    """Return how many rows of a tensor two models have; None for all, which have one size."""
    if name not in trained or name not in held:
        return 0
    one, other = trained[name].shape, held[name].shape
    is_resized = name in TABLES and one[1:] == other[1:]
    return None if one == other else min(one[0], other[0]) if is_resized else 0


def _unequal(rows: Tensor, others: Tensor) -> Tensor:
    """Return the numbers of the rows whose bits differ."""
    return (rows.view(torch.int32) != others.view(torch.int32)).any(1).nonzero().flatten()


def _is_equal(trained: Tensor, held: Tensor, encoding: str | None) -> Tensor:
    """Return a mask of the values that are equal bit for bit, or within the rounding of a quantised row."""
    if encoding == "INT8":
        step = (trained.amax(1) - trained.amin(1)) / 255
        return ((trained - held).abs() <= 0.51 * step[:, None] + 1e-6 * (1 + trained.abs())) | (
            trained.isnan() & held.isnan()
        )
    expected = trained.half().float() if encoding == "F16" else trained
    return (expected.view(torch.int32) == held.contiguous().view(torch.int32)) | (expected.isnan() & held.isnan())


def num_batches(choice: int) -> int:
    """Return how many batches :meth:`Trainer.train` trains."""
    return 1 + choice % 3


class Trainer:
    """A model, its optimizer and tracker, and perhaps a publisher.

    Args:
        schedule: settings of the publishers.
        seed: seed of the first weights.
        monitor: monitor of the process.
        number: number of its model, see :data:`SHAPES`.

    Attributes:
        clock: wall clock of its host, that of the thread that builds it.
    """

    def __init__(self, schedule: Schedule, seed: int, monitor: Monitor, number: int = 0) -> None:
        torch.manual_seed(seed)
        self._schedule, self._monitor, self.number = schedule, monitor, number
        self.clock = SCHEDULER.clock
        self.trained = _trained(schedule, number)
        self.standby: Any = None
        names, mode = (["default", _CONSUMER], schedule.read_mode) if schedule.read_mode else (None, "ID_ONLY")
        self._tracker = ModelDeltaTracker(self.trained.module, names, mode=mode, monitor=monitor)
        self._rows = self.trained.rows() if schedule.read_mode else {}  # when the consumer read last
        self.publisher: Publisher | None = None

    def copy(self) -> Copy:
        return Copy(self.trained.copy(), self.trained.states())

    def train(self, choice: int, *, scale: float = 1.0) -> None:
        """Train one to three batches of random ids, sometimes with another write before a step of the optimizer."""
        source, optimizer = torch.Generator().manual_seed(choice), self.trained.optimizer
        for _ in range(num_batches(choice)):
            output = self.trained.predict(source)
            loss = (scale * (output - torch.randn(output.shape, generator=source)).tanh()).sum()
            if optimizer is not None:
                optimizer.zero_grad()
            loss.backward()
            if choice % 5 == 3 and isinstance(self.trained, _TrainedModel):
                self.trained.edit(choice)
            if optimizer is not None:
                optimizer.step()
            self._tracker.step()

    def read(self) -> str | None:
        """Read the changed rows as a program of TorchRec does. Return what is wrong, None if nothing is.

        The first read after rows were written from outside of training is not compared.
        """
        if not self._schedule.read_mode:
            return None
        before, self._rows = self._rows, self.trained.rows()
        found = self._tracker.get_unique(_CONSUMER)
        for fqn, rows in before.items():
            ids, states = found[fqn].ids, found[fqn].states
            if (states is None) != (self._schedule.read_mode == "ID_ONLY"):
                return f"{fqn}: states are {states} in the mode {self._schedule.read_mode}"
            changed = _unequal(rows, self._rows[fqn])
            if not bool(torch.isin(changed, ids).all()):
                return f"{fqn}: {ids.tolist()} lacks some of {changed.tolist()}"
            wrong = torch.empty(0, dtype=torch.int64) if states is None else _unequal(states, rows[ids])
            if states is not None and isinstance(self.trained, _TrainedModel):
                wrong = wrong[~states[wrong].isnan().all(1)]  # unknown, because of a write besides the optimizer's
            if len(wrong):
                return f"{fqn}: the former rows of {ids[wrong].tolist()} are wrong"
        return None

    def spoil(self, choice: int, value: float, *, is_dense: bool) -> None:
        """Train, and get rows or a dense tensor of a bad value. They keep it until :meth:`heal`."""
        if not isinstance(self.trained, _TrainedModel):
            self.train(choice, scale=float("nan"))
            return
        self.train(choice)
        self.trained.spoil(value, is_dense=is_dense)
        self._tracker.step()

    def heal(self) -> bool:
        """Write the values before the last :meth:`spoil`. Return False if there are none."""
        is_healed = isinstance(self.trained, _TrainedModel) and self.trained.heal()
        self._tracker.step()
        return is_healed

    def average(self, *, with_states: bool) -> None:
        """Average the replicas of the tables."""
        trained: Any = self.trained
        trained.average(with_states=with_states)

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def has_publisher(self) -> bool:
        return self.publisher is not None

    @property
    def is_whole(self) -> bool:
        """True unless a rank was killed."""
        return True

    def publish(self, call: str) -> Any:
        """Call a method of the publisher. Return the version."""
        with SCHEDULER.by(self.clock):
            return getattr(self.publisher, call)()

    def open(self, url: Any) -> None:
        """Build a publisher if there is none."""
        if self.publisher is not None:
            return
        schedule = self._schedule
        with SCHEDULER.by(self.clock):
            self.publisher = Publisher(
                self._tracker,
                url,
                "default" if schedule.read_mode else None,
                dense=None if schedule.has_raw_ids or schedule.ranks > 1 else self.trained.module,
                monitor=self._monitor,
                encoding=None if schedule.encoding is None else Encoding[schedule.encoding],
                recovery=self._recovery if schedule.states else None,
                upkeep=Upkeep(
                    retention=Retention(versions=3, grace_seconds=10.0) if schedule.has_upkeep else None,
                    compact_every=3 if schedule.has_upkeep else None,
                    pointer_seconds=0.001 if schedule.has_web else None,
                ),
            )

    @property
    def _recovery(self) -> Recovery:
        optimizer = self.trained.optimizer
        states = {} if optimizer is None else {"optimizer": optimizer}
        return Recovery(training_state=states, heartbeat_seconds=None)

    def restore(self, url: Any) -> tuple[str, int]:
        """Restore the newest version; return its stream and version."""
        module = self.trained.module
        restored = restore(module, url, tracker=self._tracker, recovery=self._recovery, on_model_change=self._rule)
        self._rows.clear()
        return restored.stream, restored.version

    @property
    def _rule(self) -> Literal["stop", "continue"]:
        return "continue" if self._schedule.has_changes else "stop"

    def save(self, path: Path) -> None:
        """Write a checkpoint of torch.distributed.checkpoint."""
        dcp.save({**self._checkpointed(), "tracker": self._tracker}, checkpoint_id=path, no_dist=True)

    def load(self, path: Path) -> None:
        """Load a checkpoint, before a publisher is built."""
        states = {**self._checkpointed(), "tracker": SavedTracker(self._tracker, path)}
        dcp.load(states, checkpoint_id=path, no_dist=True)
        set_optimizer_state_dict(self.trained.module, self._optimizer, optim_state_dict=states["optimizer"])
        self._rows.clear()

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        assert self.trained.optimizer is not None, "no optimizer runs in the backward pass of the model"
        return self.trained.optimizer

    def _checkpointed(self) -> dict[str, Any]:
        module = self.trained.module
        return {"model": module, "optimizer": get_optimizer_state_dict(module, self._optimizer)}

    def stand_by(self, url: Any) -> Standby:
        """Return a standby of the trainer at the url."""
        self._rows.clear()
        self.standby = Standby(
            self.trained.module,
            url,
            tracker=self._tracker,
            recovery=self._recovery,
            on_model_change=self._rule,
            monitor=self._monitor,
        )
        return self.standby

    def close(self) -> None:
        publisher, self.publisher = self.publisher, None
        if publisher is not None:
            publisher.close()

    def kill(self) -> None:
        """Kill the processes."""

    def end(self) -> None:
        """End the processes."""

    def discard(self) -> None:
        """Close what a failed constructor or a fence has left."""
        try:
            self.close()
        except DeltaTrackerError:
            self.publisher = None


def _trained(schedule: Schedule, number: int) -> Trained:
    if schedule.has_raw_ids:
        from tests.simulation.raw_ids import TrainedItems  # noqa: PLC0415  torchrec takes seconds

        return TrainedItems()
    if schedule.ranks == 1:
        return _TrainedModel(number)
    from tests.simulation.shards import TrainedShards  # noqa: PLC0415  torchrec takes seconds

    return TrainedShards(2 if schedule.has_replicas else 1, are_adjacent=schedule.seed % 2 == 0)
