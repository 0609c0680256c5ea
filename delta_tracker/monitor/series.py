"""One series of records, a :class:`Cell`: what one stat records under one combination of label values.

Training calls it, so it must cost nothing.

A record is an append to a deque, which CPython makes atomic; no lock is taken and no figure touched. Whoever finds
enough records waiting, or the collector, takes them out under a lock and adds them up. So totals are exact whatever
threads, signal handlers and finalizers record at the same time.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from dataclasses import dataclass

from delta_tracker.monitor.aggregate import Aggregate, needs_buckets
from delta_tracker.monitor.clock import Progress
from delta_tracker.monitor.names import Labels
from delta_tracker.monitor.policy import Policy

# So many records wait at most, in one cell, until the thread that adds the next one sums them up: about 0.2 ms.
_MAX_WAITING = 1024
# Windows that were closed and that nobody has collected; the oldest is dropped beyond.
_MAX_CLOSED = 1024


@dataclass(frozen=True, slots=True)
class ClosedWindow:
    """What was recorded between two moments.

    Args:
        aggregate: the figures.
        begin_ns: when it began, on the monotonic clock.
        end_ns: when it ended, on the monotonic clock.
        time_ns: when it ended, nanoseconds since the epoch.
        step: the training step at its end, None if no step was ever said.
        epoch: the same for the epoch.
        is_partial: it was cut short, by the end of the program or a change of policy.
        raw: some of the records.
    """

    aggregate: Aggregate
    begin_ns: int
    end_ns: int
    time_ns: int
    step: int | None
    epoch: int | None
    is_partial: bool
    raw: tuple[float, ...] = ()


class Cell:
    """Takes records of one stat with one set of labels.

    Args:
        labels: what tells it from the stat's other cells.
        policy: what is made of its records.
        progress: clock and step.
        is_counter: refuse negative numbers.

    Attributes:
        enabled: whether records are taken.
        is_remote: its records arrive late, from a device, so that who brings them ends its epochs.
        num_lost_windows: how many windows were dropped because nobody collected them.
    """

    __slots__ = (
        "_append",
        "_base",
        "_begin_ns",
        "_closed",
        "_is_folding",
        "_lifetime",
        "_limit",
        "_lock",
        "_open",
        "_policy",
        "_progress",
        "_raw",
        "_seen",
        "_waiting",
        "enabled",
        "is_remote",
        "labels",
        "num_lost_windows",
    )

    def __init__(self, labels: Labels, policy: Policy, progress: Progress, *, is_counter: bool = False) -> None:
        self.labels = labels
        self._progress = progress
        self._waiting: deque[object] = deque()
        self._append = self._waiting.append
        self._base: float = 0
        self.is_remote = False
        self._lifetime = Aggregate(is_counter=is_counter)
        self.reset(policy)

    def add(self, value: float = 1) -> None:
        """Record a number. Never raises, never waits for a device, and takes no lock but once in many calls.

        Args:
            value: an int, a float, or what ``float()`` takes. NaN, infinity and tensors on a device are counted as
                rejected.
        """
        if self.enabled:
            self._append(value)
            if len(self._waiting) >= self._limit:
                self.fold()

    def reset(self, policy: Policy | None = None) -> None:
        """Forget everything; for a process that was forked, in which nothing else runs and any lock may be held."""
        self._lock = threading.RLock()
        self._is_folding = False
        self._waiting.clear()
        self._closed: deque[ClosedWindow] = deque(maxlen=_MAX_CLOSED)
        self.num_lost_windows = 0
        self._base = 0
        self._lifetime = self._lifetime.fresh()
        self._use(self._policy if policy is None else policy)

    def configure(self, policy: Policy) -> None:
        """Follow another policy from now on; a window that is open ends here."""
        with self._lock:
            self.fold()
            self._close(is_partial=True)
            self._use(policy)

    def fold(self) -> None:
        """Sum up the records that wait."""
        with self._lock:
            # A signal handler or finalizer may record while this thread is in here; its record waits for the next time.
            if self._is_folding:
                return
            self._is_folding = True
            try:
                num_left = len(self._waiting)
                while num_left > 0:
                    num_left -= self._take(num_left)
            finally:
                self._is_folding = False

    def merge(self, figures: Aggregate) -> None:
        """Take in what was summed up elsewhere, as on a device; a window by count ends here if it is full then."""
        with self._lock:
            self.fold()
            self._open.merge(figures)
            self._seen += figures.count + figures.num_rejected
            if self._policy.window.count is not None and self._seen >= self._policy.window.count:
                self._close(is_partial=False)

    def collect(self, *, is_last: bool = False) -> tuple[list[ClosedWindow], Aggregate]:
        """The windows that closed since the last collection, and the figures of all records so far.

        Args:
            is_last: close the open window too.
        """
        with self._lock:
            self.fold()
            now = self._progress.clock.monotonic_ns()
            is_over = self._policy.window.is_over(now - self._begin_ns)
            if is_over or is_last:
                self._close(is_partial=not is_over)
            closed = list(self._closed)
            self._closed.clear()
            return closed, self.lifetime()

    def end_epoch(self, at: tuple[int | None, int | None] | None = None) -> None:
        """Close the window if it ends with the epoch; ``at`` are step and epoch, the present ones if not given."""
        if self._policy.window.epoch:
            with self._lock:
                self.fold()
                self._close(is_partial=False, at=at)

    def lifetime(self) -> Aggregate:
        """The figures of all records that were folded so far."""
        with self._lock:
            result = self._lifetime.copy()
            result.merge(self._open)
            result.total += self._base
            return result

    def collect_total(self) -> float:
        """The sum of all records so far; closes nothing."""
        with self._lock:
            self.fold()
            return self.lifetime().total

    def restore(self, total: float) -> None:
        """Put the total to what a checkpoint says, whatever was counted here before."""
        with self._lock:
            self.fold()
            self._base = 0
            self._base = total - self.lifetime().total

    @property
    def policy(self) -> Policy:
        """What is made of its records."""
        return self._policy

    def _use(self, policy: Policy) -> None:
        self._policy = policy
        self.enabled = policy.enabled
        self._lifetime = self._like(self._lifetime)
        self._begin()

    def _like(self, old: Aggregate) -> Aggregate:
        """``old``, keeping the figures that the policy asks for from now on."""
        result = Aggregate(
            with_spread="std" in self._policy.aggregations,
            with_buckets=needs_buckets(self._policy.aggregations),
            is_counter=old.is_counter,
        )
        result.merge(old)
        return result

    def _begin(self) -> None:
        self._open = self._lifetime.fresh()
        self._seen = 0
        self._raw: list[float] = []
        self._begin_ns = self._progress.clock.monotonic_ns()
        self._set_limit()

    def _set_limit(self) -> None:
        count = self._policy.window.count
        # A window of few records closes in the thread that adds the last of them: its time and step are then right.
        self._limit = _MAX_WAITING if count is None else min(_MAX_WAITING, count - self._seen)

    def _take(self, num_left: int) -> int:
        """Sum up at most ``num_left`` records, not past the end of a window; how many they were."""
        count = self._policy.window.count
        room = _MAX_WAITING if count is None else count - self._seen
        pop = self._waiting.popleft
        values = [pop() for _ in range(min(num_left, room, _MAX_WAITING))]
        kept = self._open.extend(values)
        if self._policy.raw:
            self._draw(kept)
        self._seen += len(values)
        if self._seen == count:
            self._close(is_partial=False)
        else:
            self._set_limit()
        return len(values)

    def _draw(self, values: list[float]) -> None:
        """Keep a uniform sample of the window's records: Vitter, "Random sampling with a reservoir" (1985)."""
        size, before = self._policy.raw, self._open.count - len(values)
        for number, value in enumerate(values, start=before):
            if number < size:
                self._raw.append(value)
            elif (place := random.randrange(number + 1)) < size:  # noqa: S311  no secret
                self._raw[place] = value

    def _close(self, *, is_partial: bool, at: tuple[int | None, int | None] | None = None) -> None:
        if self._seen or self._policy.when_empty == "zero":
            if len(self._closed) == _MAX_CLOSED:
                self.num_lost_windows += 1
            progress = self._progress
            step, epoch = (progress.step, progress.epoch) if at is None else at
            self._closed.append(
                ClosedWindow(
                    aggregate=self._open,
                    begin_ns=self._begin_ns,
                    end_ns=progress.clock.monotonic_ns(),
                    time_ns=progress.clock.time_ns(),
                    step=step,
                    epoch=epoch,
                    is_partial=is_partial,
                    raw=tuple(self._raw),
                )
            )
            self._lifetime.merge(self._open)
        self._begin()
