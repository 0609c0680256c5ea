"""Cells. A cell is a series of records of one stat, all with the same label values.

Training threads record into cells, so recording must be cheap. A record is an append to a deque, which is atomic in
CPython and takes no lock. The collector, or the thread whose record fills the queue, aggregates the queued records
under a lock. Totals are therefore exact, even if threads, signal handlers and finalizers record concurrently.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from dataclasses import dataclass

from delta_tracker.monitor.aggregate import Aggregate, needs_buckets, plain_number
from delta_tracker.monitor.clock import Progress
from delta_tracker.monitor.names import Labels
from delta_tracker.monitor.policy import Policy

# If a cell has this many queued records, the recording thread aggregates them, which takes about 0.2 ms.
_MAX_WAITING = 1024
# Maximum number of closed windows of a cell that wait for a collection. Beyond it, the oldest is dropped.
_MAX_CLOSED = 1024


@dataclass(frozen=True, slots=True)
class ClosedWindow:
    """Closed window of a cell, with the aggregate of the window's records.

    Args:
        aggregate: aggregate of the records.
        begin_ns: time at which the window opened, in nanoseconds of the monotonic clock.
        end_ns: time at which the window closed, in nanoseconds of the monotonic clock.
        time_ns: time at which the window closed, in nanoseconds since the epoch.
        step: training step at which the window closed; None if no step was set.
        epoch: number of the last epoch that ended before the window closed; None if no epoch was set.
        is_partial: True if the window was closed early, by the last collection or a change of policy.
        raw: uniform random sample of the records; empty unless the policy sets ``raw``.
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
    """Series of records of one stat, all with the same label values. Thread-safe.

    Args:
        labels: label names and values.
        policy: windows and aggregations of the records.
        progress: clock, step and epoch.
        is_counter: True to reject negative numbers.

    Attributes:
        enabled: True if records are accepted.
        is_remote: True if the records come from a device and arrive with a delay. In this case, the source of the
            records calls :meth:`end_epoch`; otherwise, the stat does.
        num_lost_windows: number of closed windows dropped before they were collected.
    """

    __slots__ = (
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
        self._base: float = 0
        self.is_remote = False
        self._lifetime = Aggregate(is_counter=is_counter)
        self.reset(policy)

    def add(self, value: float = 1) -> None:
        """Record a number. Never raises or waits for a device. Takes a lock only if the queue of records is full.

        Args:
            value: an int, a float, an array or a tensor of one number on the host, or any object that ``float()``
                accepts. It is converted by the call, so that the record neither changes with a tensor nor keeps its
                graph. NaN, infinity and tensors on a device are counted as rejected.
        """
        if self.enabled:
            if type(value) is not float and type(value) is not int:  # faster than a lookup in a set
                value = plain_number(value)
            waiting = self._waiting
            waiting.append(value)
            if len(waiting) >= self._limit:
                self.fold()

    def reset(self, policy: Policy | None = None) -> None:
        """Discard all records and replace the lock. Called in a forked child, whose parent may have held the lock.

        Args:
            policy: new policy; None to keep the current one.
        """
        self._lock = threading.RLock()
        self._is_folding = False
        self._waiting.clear()
        self._closed: deque[ClosedWindow] = deque(maxlen=_MAX_CLOSED)
        self.num_lost_windows = 0
        self._base = 0
        self._lifetime = self._lifetime.fresh()
        self._use(self._policy if policy is None else policy)

    def configure(self, policy: Policy) -> None:
        """Close the open window and replace the policy."""
        with self._lock:
            self.fold()
            self._close(is_partial=True)
            self._use(policy)

    def fold(self) -> None:
        """Aggregate all queued records, and close each window that becomes full."""
        with self._lock:
            # A signal handler or finalizer recorded a value and reentered this method. The record stays queued.
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
        """Add records that were aggregated elsewhere, for example on a device.

        Closes the window if it then has at least ``Window.count`` records.
        """
        with self._lock:
            self.fold()
            self._open.merge(figures)
            self._seen += figures.count + figures.num_rejected
            if self._policy.window.count is not None and self._seen >= self._policy.window.count:
                self._close(is_partial=False)

    def collect(self, *, is_last: bool = False) -> tuple[list[ClosedWindow], Aggregate]:
        """Close the open window if it is over. Return the closed windows and the aggregate of all records.

        Windows that an earlier call returned are not returned again.

        Args:
            is_last: True to close the open window even if it is not over.
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
        """Close the window if the policy has ``Window(epoch=True)``.

        Args:
            at: step and epoch of the closed window, by default the current ones.
        """
        if self._policy.window.epoch:
            with self._lock:
                self.fold()
                self._close(is_partial=False, at=at)

    def lifetime(self) -> Aggregate:
        """Return the aggregate of all records except queued ones."""
        with self._lock:
            result = self._lifetime.copy()
            result.merge(self._open)
            result.total += self._base
            return result

    def collect_total(self) -> float:
        """Return the sum of all records, including queued ones, without closing a window."""
        with self._lock:
            self.fold()
            return self.lifetime().total

    def restore(self, total: float) -> None:
        """Set the sum of all records to ``total``. Later records are added to it."""
        with self._lock:
            self.fold()
            self._base = 0
            self._base = total - self.lifetime().total

    @property
    def policy(self) -> Policy:
        """Policy that configures the aggregation of the records."""
        return self._policy

    def _use(self, policy: Policy) -> None:
        self._policy = policy
        self.enabled = policy.enabled
        self._lifetime = self._like(self._lifetime)
        self._begin()

    def _like(self, old: Aggregate) -> Aggregate:
        """Return a copy of ``old`` that computes the aggregations of the current policy."""
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
        # The thread that adds the last of Window.count records closes the window, so that time and step are exact.
        self._limit = _MAX_WAITING if count is None else min(_MAX_WAITING, count - self._seen)

    def _take(self, num_left: int) -> int:
        """Move up to ``num_left`` queued records to the open window. Close the window if it is full.

        Returns:
            The number of moved records.
        """
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
        """Update the random sample of the window by reservoir sampling.

        See Vitter, "Random sampling with a reservoir" (1985).
        """
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
