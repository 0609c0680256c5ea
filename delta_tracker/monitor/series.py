"""Cells. A cell contains the records of one stat with the same label values.

Training threads record values in cells, so recording must be cheap. A recorded value is appended to a deque, which is
atomic in CPython and takes no lock. The collector, or the thread whose record fills the deque, aggregates the queued
records under a lock. Totals are exact even if threads, signal handlers and finalizers record concurrently.
"""

import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from delta_tracker.monitor.aggregate import Aggregate, needs_buckets, plain_number
from delta_tracker.monitor.clock import Progress
from delta_tracker.monitor.names import Labels, refuse_labels
from delta_tracker.monitor.policy import Policy

# If a cell has this many queued records, the recording thread aggregates them, which takes about 0.2 ms.
_MAX_WAITING = 1024
# Maximum number of closed windows of a cell that wait for a collection. Beyond it, the oldest is dropped.
_MAX_CLOSED = 1024


@dataclass(frozen=True, slots=True)
class ClosedWindow:
    """Aggregated records of a cell in a window that was closed.

    Args:
        aggregate: aggregate of the records.
        begin_ns: time at which the window opened, in nanoseconds of the monotonic clock.
        end_ns: time at which the window closed, in nanoseconds of the monotonic clock.
        time_ns: time at which the window closed, in nanoseconds since the epoch.
        step: training step at which the window closed; None if no step was set.
        epoch: number of the last epoch that ended before the window closed; None if no epoch had ended.
        is_partial: True if the last collection or a change of policy closed the window early.
        number: number of the window in its cell, counted from 1.
        raw: uniform random sample of the records; empty unless the policy sets ``raw``.
    """

    aggregate: Aggregate
    begin_ns: int
    end_ns: int
    time_ns: int
    step: int | None
    epoch: int | None
    is_partial: bool
    number: int
    raw: tuple[float, ...] = ()

    @property
    def axis_position(self) -> int:
        """Position on the x-axis of a plot: :attr:`step`, or :attr:`number` if no step was set."""
        return self.number if self.step is None else self.step


@dataclass(frozen=True, slots=True)
class Collected:
    """Windows, totals and counts that :meth:`Cell.collect` returns.

    Args:
        windows: windows closed since the last collection.
        figures: aggregate of all records since the process started.
        num_rejected: number of values rejected since the last collection.
        num_lost: number of closed windows dropped since the last collection because the queue was full.
    """

    windows: list[ClosedWindow]
    figures: Aggregate
    num_rejected: int
    num_lost: int


@dataclass(slots=True)
class _OpenWindow:
    """Window that is still open: the aggregate and a sample of its records, and the time at which it opened."""

    aggregate: Aggregate
    begin_ns: int
    raw: list[float] = field(default_factory=list)

    def sample(self, values: list[float], size: int) -> None:
        """Add ``values`` to the sample of ``size`` records (Vitter, 1985). The aggregate must already include them."""
        for number, value in enumerate(values, start=self.aggregate.count - len(values)):
            if number < size:
                self.raw.append(value)
            elif (place := random.randrange(number + 1)) < size:  # noqa: S311  no secret
                self.raw[place] = value


@dataclass(slots=True)
class _Uncollected:
    """Closed windows and counts from which the next collection of a cell is computed.

    Args:
        num_lost: number of closed windows dropped because the queue was full.
        num_closed: number of windows closed since the cell was created.
        num_rejected: number of values that earlier collections reported as rejected.
    """

    windows: deque[ClosedWindow] = field(default_factory=lambda: deque(maxlen=_MAX_CLOSED))
    num_lost: int = 0
    num_closed: int = 0
    num_rejected: int = 0


@dataclass(frozen=True, slots=True)
class CellKey:
    """Identity of a cell: the name of the stat and the label values.

    Args:
        stat: name of the stat.
        is_counter: True to reject negative numbers.
    """

    stat: str
    labels: Labels = ()
    is_counter: bool = False


class Cell:
    """Container of the records of a stat that have the same label values. Returned by ``Stat.cell()``. Thread-safe.

    Attributes:
        enabled: False if all records are ignored.
        is_remote: True if the records arrive from a device with a delay. In this case, the source of the records calls
            :meth:`end_epoch` after the last record of the epoch. Otherwise, the stat calls :meth:`end_epoch`.
        function: function that returns the current value of a gauge, or None for no data. This attribute is None if
            no function was set.
    """

    def __init__(self, key: CellKey, policy: Policy, progress: Progress) -> None:
        self._key = key
        self.labels = key.labels
        self.is_remote = False
        self._policy = policy
        self._progress = progress
        self.reset()

    def add(self, value: float = 1) -> None:
        """Record a number. Never raises or waits for a device. Takes a lock only if the queue of records is full.

        Args:
            value: int, float, array or CPU tensor with one element, or any object that ``float()`` accepts. The number
                is copied, and the tensor is not retained. NaN, infinity and tensors on other devices are rejected.
        """
        if self.enabled:
            if type(value) is not float and type(value) is not int:  # faster than a lookup in a set
                value = plain_number(value)
            waiting = self._waiting
            waiting.append(value)
            if len(waiting) >= self._limit:
                self.fold()

    def add_unlabelled(self, value: float = 1, **labels: object) -> None:
        """Record a number like :meth:`add`. Used by stats without labels, which have only one cell.

        Raises:
            InvalidArgumentError: if labels are passed.
        """
        if labels:
            refuse_labels(self._key.stat, value, labels)
        if self.enabled:  # the lines of add(), to save a call per record
            if type(value) is not float and type(value) is not int:
                value = plain_number(value)
            waiting = self._waiting
            waiting.append(value)
            if len(waiting) >= self._limit:
                self.fold()

    def reset(self) -> None:
        """Discard all records and replace the lock. Called in a forked child, whose parent may have held the lock."""
        self._lock = threading.RLock()
        self._is_folding = False
        self._waiting: deque[float] = deque()
        self._uncollected = _Uncollected()
        self.function: Callable[[], float | None] | None = None
        self._lifetime = self._empty()
        self._begin()

    def configure(self, policy: Policy) -> None:
        """Close the open window and replace the policy."""
        with self._lock:
            self.fold()
            self._close(is_partial=True)
            self._policy = policy
            before, self._lifetime = self._lifetime, self._empty()
            self._lifetime.merge(before)
            self._begin()

    def fold(self) -> None:
        """Aggregate all queued records. Close each window that reaches its maximum number of records."""
        with self._lock:
            # A signal handler or finalizer recorded a value and reentered this method. The record stays queued.
            if self._is_folding:
                return
            self._is_folding = True
            try:
                num_left, pop = len(self._waiting), self._waiting.popleft
                while num_left > 0:
                    values = [pop() for _ in range(min(num_left, self._limit))]
                    num_left -= len(values)
                    kept = self._open.aggregate.extend(values)
                    if self._policy.raw:
                        self._open.sample(kept, self._policy.raw)
                    self._close_if_full()
            finally:
                self._is_folding = False

    def merge(self, figures: Aggregate) -> None:
        """Add the records aggregated in ``figures``. Close the window if it reaches its maximum number of records."""
        with self._lock:
            self.fold()
            self._open.aggregate.merge(figures)
            self._close_if_full()

    def collect(self, *, is_last: bool = False) -> Collected:
        """Close the open window if the policy requires it or ``is_last`` is True. Return closed windows and totals."""
        with self._lock:
            self.fold()
            now = self._progress.clock.monotonic_ns()
            is_over = self._policy.window.is_over(now - self._open.begin_ns)
            if is_over or is_last:
                self._close(is_partial=not is_over)
            figures, new = self.lifetime(), self._uncollected
            self._uncollected = _Uncollected(num_closed=new.num_closed, num_rejected=figures.num_rejected)
            return Collected(list(new.windows), figures, figures.num_rejected - new.num_rejected, new.num_lost)

    def end_epoch(self, at: tuple[int | None, int | None] | None = None) -> None:
        """Close the open window if the policy has ``Window(epoch=True)``.

        ``at`` is the step and epoch at which the window closes; None for the current step and epoch.
        """
        if self._policy.window.epoch:
            with self._lock:
                self.fold()
                self._close(is_partial=False, at=at)

    def lifetime(self) -> Aggregate:
        """Return the aggregate of all records since the process started. Queued records are not included."""
        with self._lock:
            result = self._empty()
            result.merge(self._lifetime)
            result.merge(self._open.aggregate)
            return result

    def collect_total(self) -> float:
        """Return the sum of all records, including queued ones. Does not close a window."""
        with self._lock:
            self.fold()
            return self.lifetime().total

    def restore(self, total: float) -> None:
        """Set the sum of all records to ``total``. Later records are added to it."""
        with self._lock:
            self.fold()
            self._lifetime.total += total - self.lifetime().total

    def _empty(self) -> Aggregate:
        """Return an empty aggregate that supports the aggregations of the policy."""
        return Aggregate(
            with_spread="std" in self._policy.aggregations,
            with_buckets=needs_buckets(self._policy.aggregations),
            is_counter=self._key.is_counter,
        )

    def _begin(self) -> None:
        self.enabled = self._policy.enabled
        self._open = _OpenWindow(self._empty(), self._progress.clock.monotonic_ns())
        self._limit = min(_MAX_WAITING, self._policy.window.count or _MAX_WAITING)

    def _close_if_full(self) -> None:
        count = self._policy.window.count
        if count is not None:
            # The thread that adds the last of Window.count records closes the window, so that time and step are exact.
            self._limit = min(_MAX_WAITING, count - self._open.aggregate.num_values)
            if self._limit <= 0:
                self._close(is_partial=False)

    def _close(self, *, is_partial: bool, at: tuple[int | None, int | None] | None = None) -> None:
        closing, new, progress = self._open, self._uncollected, self._progress
        if closing.aggregate.num_values or self._policy.when_empty == "zero":
            new.num_lost += len(new.windows) == _MAX_CLOSED
            new.num_closed += 1
            step, epoch = (progress.step, progress.epoch) if at is None else at
            new.windows.append(
                ClosedWindow(
                    aggregate=closing.aggregate,
                    begin_ns=closing.begin_ns,
                    end_ns=progress.clock.monotonic_ns(),
                    time_ns=progress.clock.time_ns(),
                    step=step,
                    epoch=epoch,
                    is_partial=is_partial,
                    number=new.num_closed,
                    raw=tuple(closing.raw),
                )
            )
            self._lifetime.merge(closing.aggregate)
        self._begin()
