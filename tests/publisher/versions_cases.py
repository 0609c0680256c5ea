"""Cases of two ranks, one of which is interrupted at each line of the calls of its publisher."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import distributed as dist

import delta_tracker
from delta_tracker import Cadence, ModelDeltaTracker, Predictor, Publisher, TopK, TrackingMode, Upkeep
from delta_tracker.errors import DeltaTrackerError, RankFailedError, RankLostError
from tests.models import Spec, Table, shard
from tests.publisher.flights import finish
from tests.publisher.publishing_cases import assert_equal, empty_model

_PACKAGE = Path(delta_tracker.__file__).parent
_TRACED = tuple(str(_PACKAGE / name) for name in ("publisher/", "tracker/rank_group.py"))
_SLACK_SECONDS = 20.0  # on a busy machine


# The last lines of a call: a call that is repeated after it has ended begins a further version.
_END = Publisher._result.__code__


class Interrupt:
    """Trace function that raises KeyboardInterrupt once, before the line of a number.

    Args:
        number: number of lines that run before it.
        paths: beginnings of the paths of the files whose lines count.
    """

    def __init__(self, number: int, paths: tuple[str, ...] = _TRACED) -> None:
        self.place = ""  # file and line of the interrupt; empty before it
        self._num_left = number
        self._paths = paths

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        """Count a line, and raise the exception at the chosen one."""
        if not frame.f_code.co_filename.startswith(self._paths) or frame.f_code is _END:
            return None
        if event == "line" and not self.place:
            self._num_left -= 1
            if self._num_left < 0:
                self.place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Calls of all ranks, of which one is interrupted.

    Args:
        calls: the calls, each after a batch.
        then: what the interrupted rank does after an interrupt of another method than ``step()``: ``"again"`` repeats
            the call, ``"close"`` closes the publisher, and ``"later"`` continues with the next batch.
        victim: the rank that is interrupted.
        every: number of lines from one interrupt to the next.
        timeout_seconds: timeout of the publishers.
        snapshot_every: number of versions from one snapshot to the next.
        has_top_k: True to select the rows of a delta by a collective.
    """

    calls: Sequence[str]
    then: str
    victim: int
    every: int
    timeout_seconds: float = 30.0
    snapshot_every: int | None = None
    has_top_k: bool = False


class _Job:
    """One rank of a small trainer, with its publisher and a predictor."""

    def __init__(self, url: str, schedule: Schedule) -> None:
        self._url = url
        self._schedule = schedule
        self.tracker = ModelDeltaTracker(shard(Spec([Table("t", 12, "row")])), mode=TrackingMode.EMBEDDING)
        self._row = 0
        self._threads = set(threading.enumerate())
        self.publisher = self._built()
        self._served = empty_model(self.tracker)
        self._predictor = Predictor(self._served, url)

    def _built(self) -> Publisher:
        schedule = self._schedule
        return Publisher(
            self.tracker,
            self._url,
            top_k=TopK(rows=1000) if schedule.has_top_k else None,  # all rows, by a read that is a collective
            cadence=Cadence(batches=1, snapshot_every=schedule.snapshot_every),
            timeout=timedelta(seconds=schedule.timeout_seconds),
            upkeep=Upkeep(pointer_seconds=None),
        )

    def train(self) -> None:
        """Change a row of this rank. All ranks wait for each other, as in a lookup of sharded tables."""
        dist.barrier()
        for fqn, spec in self.tracker.shards.items():
            self._row = (self._row + 1) % spec.num_rows
            for view in self.tracker.live.column_views(fqn):
                view.data[self._row] += 1
            self.tracker.mark_changed(fqn, torch.tensor([self._row]))
        self.tracker.step()
        finish(self.publisher)  # so that the same lines run each time

    def call(self, name: str, interrupt: Interrupt | None = None) -> DeltaTrackerError | KeyboardInterrupt | None:
        """Call a method of the publisher in bounded time, and return what it raised."""
        begin = time.monotonic()
        sys.settrace(interrupt)
        try:
            getattr(self.publisher, name)()
        except (DeltaTrackerError, KeyboardInterrupt) as error:
            raised: DeltaTrackerError | KeyboardInterrupt | None = error.with_traceback(None)
        else:
            raised = None
        finally:
            sys.settrace(None)
        seconds, bound = time.monotonic() - begin, 2 * self._schedule.timeout_seconds + _SLACK_SECONDS
        assert seconds < bound, f"{name} took {seconds:.1f} s"
        assert name != "step" or not isinstance(raised, DeltaTrackerError), f"step() raised {raised!r}"
        return raised

    def run(self, interrupt: Interrupt | None) -> DeltaTrackerError | KeyboardInterrupt | None:
        """Make the calls of the schedule, and return what the last one raised."""
        then, error = self._schedule.then, None
        for name in self._schedule.calls:
            self.train()
            error = self.call(name, None if interrupt is not None and interrupt.place else interrupt)
            if isinstance(error, KeyboardInterrupt) and name != "step" and then != "later":
                error = self.call(name if then == "again" else then)
        return error

    def goes_on(self, error: DeltaTrackerError | KeyboardInterrupt | None, place: str) -> bool:
        """Check that no row is lost after an interrupt of a rank at a line. Return True if the rank was lost."""
        last, then = self._schedule.calls[-1], self._schedule.then
        if isinstance(error, RankLostError):
            self.close()  # so that the other rank notices it at once
        is_lost = any(_every(isinstance(error, RankLostError)))
        if then == "again" and last not in ("step", "close") and not is_lost:
            if error is None:
                self.assert_served()
                return False
            is_open = place.endswith(" start_all_gather")  # whether a vote of a copy was sent
            assert self._schedule.has_top_k or is_open, "only a read that was a collective is not repeated"
            assert isinstance(error, RankFailedError)
        if is_lost and not isinstance(error, RankLostError) and "close" not in (last, then):
            assert isinstance(self.call("publish"), RankLostError)
        if is_lost or "close" in (last, then):
            self.rebuild()
        if then == "later":
            self.train()
        self.recover()
        return is_lost

    def recover(self) -> None:
        """Publish until all ranks have published all rows. At most two calls may fail."""
        for _ in range(3):
            error = self.call("publish")
            errors = _every(None if error is None else type(error).__name__)
            if errors == [None] * len(errors):
                break
            if "RankLostError" in errors:
                assert isinstance(error, RankLostError) or isinstance(self.call("publish"), RankLostError)
                dist.barrier()
                self.rebuild()
        else:
            raise AssertionError(f"each version fails: {errors}")
        assert sum(self.tracker.num_pending().values()) == 0
        self.assert_served()

    def assert_served(self) -> None:
        assert self.publisher.error is None
        assert self._predictor.sync() == self.publisher.version
        assert_equal(self.tracker, self._served)

    def rebuild(self) -> None:
        self.close()
        self.publisher = self._built()

    def close(self) -> None:
        """Close the publisher, which leaves nothing behind."""
        assert self.call("close") is None
        assert self.tracker.consumers == ("default",)
        assert set(threading.enumerate()) <= self._threads
        assert torch.is_grad_enabled()


def _every(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def at_each_line(rank: int, world_size: int, url: str, choices: dict[str, Any]) -> dict[str, Any]:
    """Interrupt a rank at each line of some calls in turn.

    Returns:
        The number of lines, and those at which an interrupt lost the rank.
    """
    schedule = Schedule(**choices)
    job = _Job(url, schedule)
    job.recover()
    num_lines, lost = 0, []
    while True:
        interrupt = Interrupt((num_lines + 1) * schedule.every - 1)
        error = job.run(interrupt if rank == schedule.victim else None)
        place = _every(interrupt.place)[schedule.victim]
        if not place:
            break
        num_lines += 1
        try:
            if job.goes_on(error, place):
                lost.append(place)
        except Exception as raised:
            raise AssertionError(f"interrupted at {place}; the last call raised {error!r}") from raised
    job.close()
    job.tracker.detach()
    return {"num_lines": num_lines, "lost": lost}
