"""Common interface of both trackers, so that every case is written once."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec
from torchrec.distributed.model_tracker.types import DeltaTrackerConfig
from torchrec.distributed.model_tracker.types import TrackingMode as TheirMode

from benchmarks.faults.models import Training
from benchmarks.faults.registry import expect
from delta_tracker import ModelDeltaTracker, TopK, TrackingMode


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one table in a read.

    Args:
        ids: local row ids.
        table_ids: global row ids, if the tracker reports them, otherwise local ones.
        states: ``[N, ...]`` old states, or the values that the mode returns instead.
    """

    ids: list[int]
    table_ids: list[int]
    states: Tensor | None


class Tracker(Protocol):
    """Interface of a tracker in the cases."""

    def read(self, consumer: str | None = None) -> dict[str, Rows]:
        """Return table FQN to the rows changed since the consumer's last read."""

    def read_top(self, fraction: float) -> dict[str, Rows]:
        """Return the given fraction of the changed rows, those that changed most."""

    def clear(self, consumer: str) -> None:
        """Discard the pending rows of a consumer."""

    def held_bytes(self) -> int:
        """Return the memory of the tracker in bytes."""


class Make(Protocol):
    """Builds one of the trackers."""

    def __call__(  # noqa: D102
        self,
        training: Training,
        mode: str = "id_only",
        *,
        consumers: Sequence[str] | None = None,
        skip: Sequence[str] = (),
        max_bytes: int | None = None,
        steps: bool = True,
    ) -> Tracker: ...


class Theirs:
    """TorchRec's tracker. The model steps it, as documented, unless ``steps`` is False."""

    def __init__(
        self,
        training: Training,
        mode: str = "id_only",
        *,
        consumers: Sequence[str] | None = None,
        skip: Sequence[str] = (),
        max_bytes: int | None = None,
        steps: bool = True,
    ) -> None:
        names = None if consumers is None else list(consumers)
        # Pass the bound only to versions of TorchRec that support it.
        bound = {"max_bytes": max_bytes} if "max_bytes" in inspect.signature(DeltaTrackerConfig).parameters else {}
        model: Any = training.model
        if steps:
            config = DeltaTrackerConfig(TheirMode(mode), consumers=names, fqns_to_skip=list(skip), **bound)
            self._tracker = model.init_torchrec_delta_tracker(config)
        else:
            wrapped = model._dmp_wrapped_module  # noqa: SLF001  as DMP itself does
            self._tracker = ModelDeltaTrackerTrec(wrapped, names, mode=TheirMode(mode), fqns_to_skip=skip)

    def read(self, consumer: str | None = None) -> dict[str, Rows]:
        """Return the changed rows, without global ids."""
        return self._rows(self._tracker.get_unique(consumer))

    def read_top(self, fraction: float) -> dict[str, Rows]:
        """Read with ``top_percentage``."""
        return self._rows(self._tracker.get_unique(top_percentage=fraction))

    def clear(self, consumer: str) -> None:
        """Discard the pending rows."""
        self._tracker.clear(consumer)

    def held_bytes(self) -> int:
        """Return the bytes of the tensors in the store."""
        lookups = [each for lookups in self._tracker.store.per_fqn_lookups.values() for each in lookups]
        return sum(part.nbytes for each in lookups for part in (each.ids, each.states) if part is not None)

    @staticmethod
    def _rows(found: dict[str, Any]) -> dict[str, Rows]:
        return {fqn: Rows(rows.ids.tolist(), rows.ids.tolist(), rows.states) for fqn, rows in found.items()}


class Ours:
    """This library's tracker, without calls of ``step()``."""

    def __init__(
        self,
        training: Training,
        mode: str = "id_only",
        *,
        consumers: Sequence[str] | None = None,
        skip: Sequence[str] = (),
        max_bytes: int | None = None,
        steps: bool = True,
    ) -> None:
        del steps
        self._tracker = ModelDeltaTracker(
            training.model, consumers, mode=TrackingMode(mode), fqns_to_skip=skip, max_bytes=max_bytes
        )

    def read(self, consumer: str | None = None) -> dict[str, Rows]:
        """Return the changed rows."""
        return self._rows(self._tracker.get_delta(consumer))

    def read_top(self, fraction: float) -> dict[str, Rows]:
        """Read with ``top_k``."""
        return self._rows(self._tracker.get_delta(top_k=TopK(fraction=fraction)))

    def clear(self, consumer: str) -> None:
        """Discard the pending rows."""
        self._tracker.clear(consumer)

    def held_bytes(self) -> int:
        """Return the bytes that ``memory()`` reports."""
        return self._tracker.memory().total_bytes

    def _rows(self, delta: Any) -> dict[str, Rows]:  # noqa: ANN401
        expect(self._tracker.num_hook_errors == 0, "faults inside hooks")
        return {fqn: Rows(rows.ids.tolist(), rows.global_ids.tolist(), rows.states) for fqn, rows in delta.items()}


TRACKERS: dict[str, Make] = {"TorchRec": Theirs, "delta_tracker": Ours}


class Copy:
    """A consumer's copy of all rows of this rank, updated at each read with the current values of the reported rows."""

    def __init__(self, training: Training, tracker: Tracker) -> None:
        self._training = training
        self._tracker = tracker
        self._rows = {fqn: training.rows(fqn) for fqn in training.shards}

    def read(self) -> None:
        """Read, and copy the changed rows."""
        for fqn, rows in self._tracker.read().items():
            if rows.ids:
                self._rows[fqn][rows.ids] = self._training.rows(fqn)[rows.ids]

    def expect_equal(self) -> None:
        """Raise unless every row equals the model's."""
        stale = {fqn: differing(rows, self._training.rows(fqn)) for fqn, rows in self._rows.items()}
        count = sum(map(len, stale.values()))
        expect(not count, f"loses {count} rows")


def differing(before: Tensor, now: Tensor) -> list[int]:
    """Return the ids of the rows ``[R, D]`` that differ."""
    changed: list[int] = torch.nonzero((before != now).any(dim=1)).flatten().tolist()
    return changed


def expect_changes(training: Training, before: dict[str, Tensor], reported: dict[str, Rows]) -> None:
    """Raise unless a read reports exactly the rows that differ from ``before``, for every table."""
    for fqn, rows in before.items():
        changed = set(differing(rows, training.rows(fqn)))
        found = set(reported[fqn].ids if fqn in reported else [])
        expect(changed, f"the case changes nothing in {fqn}")
        expect(changed <= found, f"{len(changed - found)} of {len(changed)} changed rows are missing")
        expect(found <= changed, f"{len(found - changed)} unchanged rows are reported")
