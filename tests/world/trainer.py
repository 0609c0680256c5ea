"""The trainer of a world, which keeps a full copy of its tables for each version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from delta_tracker import Encoding, ModelDeltaTracker, Publisher, Retention, Standby, restore
from delta_tracker.errors import DeltaTrackerError
from tests.world.values import Schedule

NUM_BAGS, NUM_PLAIN = 12, 10
_TABLES = ("bag.weight", "plain.weight")
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

    @torch.no_grad()
    def assign(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in self.named_parameters():
            tensor.copy_(tensors[name])


def empty_model() -> Model:
    model = Model()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.zero_()
    return model


@dataclass(frozen=True, slots=True)
class Copy:
    """All tensors of a trainer at one version."""

    tensors: Mapping[str, Tensor]

    @property
    def is_finite(self) -> bool:
        return all(bool(tensor.isfinite().all()) for tensor in self.tensors.values())

    @property
    def is_healthy(self) -> bool:
        """True without NaN, infinite and large values."""
        return all(bool((tensor.abs() < _LARGE).all()) for tensor in self.tensors.values())

    def difference(self, held: Mapping[str, Tensor], encoding: str | None) -> str | None:
        """Return which rows of a reader differ from these, None if none do. A row store has no dense tensors."""
        for name, other in held.items():
            tensor = self.tensors[name]
            is_equal = _is_equal(tensor, other, encoding if name in _TABLES else None)
            if not bool(is_equal.all()):
                rows = (~is_equal).reshape(len(is_equal), -1).any(1).nonzero().flatten().tolist()
                return f"{name} rows {rows}"
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


class Trainer:
    """A model, its optimizer and tracker, and perhaps a publisher.

    Args:
        schedule: settings of the publishers.
        seed: seed of the first weights.
    """

    def __init__(self, schedule: Schedule, seed: int) -> None:
        torch.manual_seed(seed)
        self._schedule = schedule
        self.model = Model()
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self._tracker = ModelDeltaTracker(self.model)
        self.publisher: Publisher | None = None
        self.has_published = False  # since the publisher was built

    @property
    def is_healthy(self) -> bool:
        return Copy(self.model.copy()).is_healthy

    def train(self, choice: int, *, scale: float = 1.0) -> None:
        """Train one to three batches of random ids."""
        source = torch.Generator().manual_seed(choice)
        for _ in range(1 + choice % 3):
            bags = torch.randint(NUM_BAGS, (2, 2), generator=source)
            ids = torch.randint(NUM_PLAIN, (2,), generator=source)
            target = torch.randn(2, 1, generator=source)
            self._optimizer.zero_grad()
            loss = (scale * (self.model(bags, ids) - target).tanh()).sum()
            loss.backward()
            self._optimizer.step()
            self._tracker.step()

    def open(self, url: Any) -> Publisher:
        """Return the publisher, built if there is none."""
        if self.publisher is None:
            schedule = self._schedule
            self.publisher = Publisher(
                self._tracker,
                url,
                dense=self.model,
                encoding=None if schedule.encoding is None else Encoding[schedule.encoding],
                states="optimizer" if schedule.states else None,
                training_state={"optimizer": self._optimizer} if schedule.states else None,
                skip_unchanged="bytes" if schedule.skips_unchanged else None,
                retention=Retention(versions=3, grace_seconds=10.0) if schedule.has_upkeep else None,
                compact_every=3 if schedule.has_upkeep else None,
                heartbeat_seconds=None,
                pointer_seconds=0.001 if schedule.has_web else None,
            )
        return self.publisher

    def restore(self, url: str) -> tuple[str, int]:
        """Restore the newest version; return its stream and version."""
        restored = restore(self.model, url, tracker=self._tracker, training_state={"optimizer": self._optimizer})
        return restored.stream, restored.version

    def stand_by(self, url: str) -> Standby:
        """Return a standby of the trainer at the url."""
        return Standby(self.model, url, tracker=self._tracker, training_state={"optimizer": self._optimizer})

    def close(self) -> None:
        publisher, self.publisher, self.has_published = self.publisher, None, False
        if publisher is not None:
            publisher.close()

    def discard(self) -> None:
        """Close what a failed constructor or a fence has left."""
        try:
            self.close()
        except DeltaTrackerError:
            self.publisher = None
