"""Both trackers behind one face, so that every case is written once."""

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
    """What a read says of one table.

    Args:
        ids: local row ids.
        table_ids: row ids in the whole table, as far as the tracker tells.
        states: ``[N, ...]`` old states, or what the mode has instead.
    """

    ids: list[int]
    table_ids: list[int]
    states: Tensor | None


class Tracker(Protocol):
    """What the cases ask of a tracker."""

    def read(self, consumer: str | None = None) -> dict[str, Rows]:
        """Table FQN to rows that changed since the consumer's last read."""

    def read_top(self, fraction: float) -> dict[str, Rows]:
        """The part of them that changed most."""

    def clear(self, consumer: str) -> None:
        """Forget what is pending for a consumer."""

    def held_bytes(self) -> int:
        """What the tracker holds."""


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
    """TorchRec's tracker; as its documentation has it, the model steps it, unless ``steps`` is False."""

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
        # A bound is set where there is one to set.
        bound = {"max_bytes": max_bytes} if "max_bytes" in inspect.signature(DeltaTrackerConfig).parameters else {}
        model: Any = training.model
        if steps:
            config = DeltaTrackerConfig(TheirMode(mode), consumers=names, fqns_to_skip=list(skip), **bound)
            self._tracker = model.init_torchrec_delta_tracker(config)
        else:
            wrapped = model._dmp_wrapped_module  # noqa: SLF001  what the model itself passes
            self._tracker = ModelDeltaTrackerTrec(wrapped, names, mode=TheirMode(mode), fqns_to_skip=skip)

    def read(self, consumer: str | None = None) -> dict[str, Rows]:
        """The rows; of the whole table's ids it says nothing."""
        return self._rows(self._tracker.get_unique(consumer))

    def read_top(self, fraction: float) -> dict[str, Rows]:
        """With its own argument for it."""
        return self._rows(self._tracker.get_unique(top_percentage=fraction))

    def clear(self, consumer: str) -> None:
        """Forget what is pending."""
        self._tracker.clear(consumer)

    def held_bytes(self) -> int:
        """Bytes of the tensors in its store."""
        lookups = [each for lookups in self._tracker.store.per_fqn_lookups.values() for each in lookups]
        return sum(part.nbytes for each in lookups for part in (each.ids, each.states) if part is not None)

    @staticmethod
    def _rows(found: dict[str, Any]) -> dict[str, Rows]:
        return {fqn: Rows(rows.ids.tolist(), rows.ids.tolist(), rows.states) for fqn, rows in found.items()}


class Ours:
    """This library's tracker; nobody steps it."""

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
        """The rows."""
        return self._rows(self._tracker.get_delta(consumer))

    def read_top(self, fraction: float) -> dict[str, Rows]:
        """With its own argument for it."""
        return self._rows(self._tracker.get_delta(top_k=TopK(fraction=fraction)))

    def clear(self, consumer: str) -> None:
        """Forget what is pending."""
        self._tracker.clear(consumer)

    def held_bytes(self) -> int:
        """What it says itself; an update shows at the next look."""
        return self._tracker.memory().total_bytes

    def _rows(self, delta: Any) -> dict[str, Rows]:  # noqa: ANN401
        expect(self._tracker.num_hook_errors == 0, "faults inside hooks")
        return {fqn: Rows(rows.ids.tolist(), rows.global_ids.tolist(), rows.states) for fqn, rows in delta.items()}


TRACKERS: dict[str, Make] = {"TorchRec": Theirs, "delta_tracker": Ours}


class Copy:
    """A consumer's copy of all rows of this rank: it takes the rows that each read reports, as they are then."""

    def __init__(self, training: Training, tracker: Tracker) -> None:
        self._training = training
        self._tracker = tracker
        self._rows = {fqn: training.rows(fqn) for fqn in training.shards}

    def read(self) -> None:
        """Read and take what changed."""
        for fqn, rows in self._tracker.read().items():
            if rows.ids:
                self._rows[fqn][rows.ids] = self._training.rows(fqn)[rows.ids]

    def expect_equal(self) -> None:
        """Every row is as it is in the model."""
        stale = {fqn: differing(rows, self._training.rows(fqn)) for fqn, rows in self._rows.items()}
        count = sum(map(len, stale.values()))
        expect(not count, f"loses {count} rows")


def differing(before: Tensor, now: Tensor) -> list[int]:
    """Ids of the rows ``[R, D]`` that are not the same."""
    changed: list[int] = torch.nonzero((before != now).any(dim=1)).flatten().tolist()
    return changed


def expect_changes(training: Training, before: dict[str, Tensor], reported: dict[str, Rows]) -> None:
    """A read reports exactly the rows that differ from ``before``, for every table."""
    for fqn, rows in before.items():
        changed = set(differing(rows, training.rows(fqn)))
        found = set(reported[fqn].ids if fqn in reported else [])
        expect(changed, f"the case changes nothing in {fqn}")
        expect(changed <= found, f"{len(changed - found)} of {len(changed)} changed rows are missing")
        expect(found <= changed, f"{len(found - changed)} unchanged rows are reported")
