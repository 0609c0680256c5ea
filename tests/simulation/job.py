"""The trainer of a world with several ranks: the same calls as those of a trainer, on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from delta_tracker.errors import DeltaTrackerError
from delta_tracker.monitor import Monitor
from tests.simulation.ranks import Job
from tests.simulation.shards import joined
from tests.simulation.threads import SCHEDULER
from tests.simulation.trainer import Copy, Trainer
from tests.simulation.values import Schedule


@dataclass(frozen=True, slots=True)
class _Taken:
    """Result of a takeover: that of rank 0, and the streams of each rank."""

    restored: Any
    recovery: Sequence[Any]


class _Standby:
    """Standbys of all ranks."""

    def __init__(self, job: Job[Trainer], url: Any) -> None:
        self._job = job
        job.call(lambda trainer: trainer.stand_by(url))

    def sync(self) -> None:
        self._job.call(lambda trainer: trainer.standby.sync())

    def take_over(self, *, force: bool) -> _Taken | None:
        return self._taken(self._job.call(lambda trainer: trainer.standby.take_over(force=force)))

    def follow(self, *, silence: float) -> _Taken | None:
        return self._taken(self._job.call(lambda trainer: trainer.standby.follow(silence=silence)))

    def _taken(self, found: Sequence[Any]) -> _Taken | None:
        return None if found[0] is None else _Taken(found[0].restored, [each.recovery for each in found])


class JobTrainer:
    """Trainer of sharded tables. See :class:`~tests.simulation.trainer.Trainer`."""

    number = 0

    def __init__(self, schedule: Schedule, seed: int) -> None:
        self.clock = SCHEDULER.clock
        self._job = Job(f"trainer {seed}", schedule.ranks, lambda rank: Trainer(schedule, seed + rank, Monitor()))
        self._copied = Copy({}, {})

    def copy(self) -> Copy:
        """Return what the ranks have; after the death of one, what they had when they were asked last."""
        if not self._job.is_whole:
            return self._copied
        found = self._job.call(lambda trainer: trainer.trained.pieces())
        self._copied = Copy(joined([tensors for tensors, _ in found]), joined([states for _, states in found]))
        return self._copied

    def train(self, choice: int) -> None:
        self._job.call(lambda trainer: trainer.train(choice))

    def read(self) -> str | None:
        return next(filter(None, self._job.call(Trainer.read)), None)

    def spoil(self, choice: int, value: float, *, is_dense: bool) -> None:
        self._job.call(lambda trainer: trainer.spoil(choice, value, is_dense=is_dense))

    def heal(self) -> bool:
        return self._job.call(Trainer.heal)[0]

    def average(self, *, with_states: bool) -> None:
        self._job.call(lambda trainer: trainer.average(with_states=with_states))

    @property
    def has_publisher(self) -> bool:
        return self._job.call(lambda trainer: trainer.has_publisher)[0]

    def open(self, url: Any) -> None:
        urls = url if isinstance(url, list) else [url] * self._job.size
        self._job.call(lambda trainer: trainer.open(urls[trainer.rank]))

    def publish(self, call: str) -> Any:
        return self._job.call(lambda trainer: trainer.publish(call))[0]

    def restore(self, url: Any) -> tuple[str, int]:
        return self._job.call(lambda trainer: trainer.restore(url))[0]

    def stand_by(self, url: Any) -> _Standby:
        return _Standby(self._job, url)

    @property
    def is_whole(self) -> bool:
        return self._job.is_whole

    def discard(self) -> None:
        with suppress(DeltaTrackerError, ChildProcessError):
            self._job.call(Trainer.discard)

    def kill(self) -> None:
        self._job.kill()

    def end(self) -> None:
        if not self._job.is_whole:
            self._job.kill()
        self._job.end()
