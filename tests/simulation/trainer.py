"""The trainer of a world, which keeps a full copy of its tables for each version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from delta_tracker import Encoding, ModelDeltaTracker, Publisher, Recovery, Retention, Standby, Upkeep, restore
from delta_tracker.errors import DeltaTrackerError
from delta_tracker.integrations.dcp import SavedTracker
from delta_tracker.monitor import Monitor
from tests.simulation.threads import SCHEDULER
from tests.simulation.values import Schedule

NUM_BAGS, NUM_PLAIN = 12, 10
SHARDED = ("tables.embedding_bags.bag.weight", "tables.embedding_bags.plain.weight")
TABLES = ("bag.weight", "plain.weight", "item", *SHARDED)
_LARGE = 1e4


class Model(nn.Module):
    """A table with sparse gradients, one with dense gradients, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(NUM_BAGS, 4, mode="sum", sparse=True)
        self.plain = nn.Embedding(NUM_PLAIN, 4)
        self.over = nn.Linear(8, 1)

    def forward(self, bags: Tensor, ids: Tensor) -> Tensor:
        return self.over(torch.cat([self.bag(bags), self.plain(ids)], 1))

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


class _TrainedModel:
    """The model in training."""

    def __init__(self) -> None:
        self.module = Model()
        self.optimizer = torch.optim.Adagrad(self.module.parameters(), lr=0.1)
        self.module.over.weight.register_hook(_finite)
        self._batch = torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        self._spoiled: tuple[tuple[Tensor, Tensor], dict[str, Tensor]] | None = None  # batch, and the values before

    def predict(self, source: torch.Generator) -> Tensor:
        bags = torch.randint(NUM_BAGS, (2, 2), generator=source)
        self._batch = bags, torch.randint(NUM_PLAIN, (2,), generator=source)
        output: Tensor = self.module(*self._batch)
        output.register_hook(_finite)
        return output

    @torch.no_grad()
    def edit(self, choice: int) -> None:
        """Write to a row of each table without a lookup."""
        for tensor in (self.module.bag.weight, self.module.plain.weight):
            tensor[choice // 5 % len(tensor)] /= 2

    @torch.no_grad()
    def spoil(self, value: float, *, is_dense: bool) -> None:
        """Write a value to the dense layer, or to the rows of the last batch."""
        self._spoiled = self._batch, self.copy()
        bags, ids = self._batch
        self.module(bags, ids)
        rows = {self.module.bag.weight: bags.flatten(), self.module.plain.weight: ids}
        for tensor, each in ({self.module.over.bias: torch.tensor(0)} if is_dense else rows).items():
            tensor[each] = value

    @torch.no_grad()
    def heal(self) -> bool:
        """Write the values before the last :meth:`spoil`. Return False if there are none."""
        if self._spoiled is None:
            return False
        (bags, ids), values = self._spoiled
        self._spoiled = None
        self.module(bags, ids)
        rows = {"bag.weight": bags.flatten(), "plain.weight": ids}
        for name, tensor in self.module.named_parameters():
            each = rows.get(name, slice(None))
            tensor[each] = values[name][each]
        return True

    def copy(self) -> dict[str, Tensor]:
        return self.module.copy()

    def states(self) -> dict[str, Tensor]:
        states = self.optimizer.state_dict()["state"]
        return {f"{number} {name}": each.clone() for number, held in states.items() for name, each in held.items()}


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
        return _difference(self.tensors, restored.tensors, None) or _difference(self.states, restored.states, None)

    def difference(self, held: Mapping[str, Tensor], encoding: str | None) -> str | None:
        """Return which rows of a reader differ from these, None if none do. A row store has no dense tensors."""
        return _difference(self.tensors, held, encoding)

    def equal_rows(self, name: str, held: Tensor, encoding: str | None) -> Tensor:
        """Return a mask of the rows of a table that a reader has like this."""
        return _is_equal(self.tensors[name], held, encoding).flatten(1).all(1)


def _difference(tensors: Mapping[str, Tensor], held: Mapping[str, Tensor], encoding: str | None) -> str | None:
    for name, other in held.items():
        tensor = tensors[name]
        is_equal = _is_equal(tensor, other, encoding if name in TABLES else None)
        if not bool(is_equal.all()):
            rows = (~is_equal).reshape(-1, *is_equal.shape[1:]).flatten(1).any(1) if is_equal.dim() > 1 else ~is_equal
            return f"{name} rows {rows.nonzero().flatten().tolist()}"
    return None


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

    Attributes:
        clock: wall clock of its host, that of the thread that builds it.
    """

    def __init__(self, schedule: Schedule, seed: int, monitor: Monitor) -> None:
        torch.manual_seed(seed)
        self._schedule, self._monitor = schedule, monitor
        self.clock = SCHEDULER.clock
        self.trained = _trained(schedule)
        self.standby: Any = None
        self._tracker = ModelDeltaTracker(self.trained.module, monitor=monitor)
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
        restored = restore(module, url, tracker=self._tracker, recovery=self._recovery)
        return restored.stream, restored.version

    def save(self, path: Path) -> None:
        """Write a checkpoint of torch.distributed.checkpoint."""
        dcp.save({**self._checkpointed(), "tracker": self._tracker}, checkpoint_id=path, no_dist=True)

    def load(self, path: Path) -> None:
        """Load a checkpoint, before a publisher is built."""
        states = {**self._checkpointed(), "tracker": SavedTracker(self._tracker, path)}
        dcp.load(states, checkpoint_id=path, no_dist=True)
        set_optimizer_state_dict(self.trained.module, self._optimizer, optim_state_dict=states["optimizer"])

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        assert self.trained.optimizer is not None, "no optimizer runs in the backward pass of the model"
        return self.trained.optimizer

    def _checkpointed(self) -> dict[str, Any]:
        module = self.trained.module
        return {"model": module, "optimizer": get_optimizer_state_dict(module, self._optimizer)}

    def stand_by(self, url: Any) -> Standby:
        """Return a standby of the trainer at the url."""
        self.standby = Standby(
            self.trained.module, url, tracker=self._tracker, recovery=self._recovery, monitor=self._monitor
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


def _trained(schedule: Schedule) -> Trained:
    if schedule.ranks > 1:
        from tests.simulation.shards import TrainedShards  # noqa: PLC0415  torchrec takes seconds

        return TrainedShards()
    if not schedule.has_raw_ids:
        return _TrainedModel()
    from tests.simulation.raw_ids import TrainedItems  # noqa: PLC0415  torchrec takes seconds

    return TrainedItems()
