"""The collector: reads every stat on an interval and hands the figures and the events on."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from functools import partial

from delta_tracker.monitor.batch import Batch, TotalReport, WindowReport
from delta_tracker.monitor.containment import Guard, Runner
from delta_tracker.monitor.event import Event
from delta_tracker.monitor.events import EventLog, Subscription
from delta_tracker.monitor.library import LibraryMetrics
from delta_tracker.monitor.registry import Registry
from delta_tracker.monitor.sinks.sink import Sink
from delta_tracker.monitor.stat import Kind

_logger = logging.getLogger(__name__)

_NS = 1e-9
# A burst of events is handed on in one go.
_BURST_SECONDS = 0.05


class _Wake(Enum):
    EVENTS = auto()
    STOP = auto()


class Collector:
    """Collects, in a thread of its own once it is started; code of others runs in a second one that can be given up.

    Args:
        registry: the stats.
        events: the events.
        metrics: where it counts what goes wrong.
        deadline_seconds: how long a sink, handler or callback may take.
        max_undelivered: how many events wait for the sinks.
    """

    def __init__(
        self,
        registry: Registry,
        events: EventLog,
        metrics: LibraryMetrics,
        *,
        deadline_seconds: float,
        max_undelivered: int,
    ) -> None:
        self._registry = registry
        self._events = events
        self._metrics = metrics
        self._deadline_seconds = deadline_seconds
        self._max_undelivered = max_undelivered
        self._begin_ns = registry.progress.clock.time_ns()
        self.reset()

    def reset(self) -> None:
        """Forget thread, sinks and events; for a process that was forked, or that starts again."""
        self._lock = threading.RLock()
        self._runner = Runner(self._registry.progress.clock, self._deadline_seconds)
        self._sinks: list[tuple[Sink, Guard]] = []
        self._guards: dict[str, Guard] = {}
        self._handlers: dict[Subscription, Guard] = {}
        self._undelivered: list[Event] = []
        self._losses: dict[tuple[str, str], int] = {}
        self._attributes: dict[str, str] = {}
        # Beside these, a queue that somebody waits at: collect, then put None into it.
        self._wakeups: queue.SimpleQueue[_Wake | queue.SimpleQueue[None]] = queue.SimpleQueue()
        self._is_woken = False
        self._thread: threading.Thread | None = None

    def after_fork(self) -> None:
        """Have the sinks let go of what the parent uses, then forget them. What raises is counted.

        Nothing is logged: a thread of the parent may have held the lock of the stream that logs are written to.
        """
        for sink in self.sinks:
            try:
                sink.forget()
            except Exception:  # noqa: BLE001  it is the user's code; it is counted
                self._metrics.outlet_errors.cell(outlet=sink.name).add(1)
        self.reset()

    @property
    def is_running(self) -> bool:
        """Whether its thread runs."""
        return self._thread is not None

    @property
    def sinks(self) -> list[Sink]:
        """Where batches go."""
        return [sink for sink, _ in self._sinks]

    def start(self, sinks: Sequence[Sink], interval_seconds: float, attributes: Mapping[str, str]) -> None:
        """Collect from now on."""
        self._sinks = [(sink, Guard(sink.name)) for sink in sinks]
        self._attributes = dict(attributes)
        self._thread = threading.Thread(
            target=self._loop, args=(interval_seconds, self._wakeups), name="delta_tracker-collector", daemon=True
        )
        self._thread.start()

    def stop(self, timeout_seconds: float) -> bool:
        """Deliver what there is, as the last batch, close the sinks and end; whether that was done in time."""
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        self._wakeups.put(_Wake.STOP)
        thread.join(timeout_seconds)
        is_done = not thread.is_alive()
        if not is_done:
            _logger.error("monitor: the last batch was not delivered within %s s", timeout_seconds)
        self.reset()
        return is_done

    def flush(self, timeout_seconds: float) -> bool:
        """Collect now, and wait for it; whether that was done in time."""
        if self._thread is None:
            self.collect()
            return True
        done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._wakeups.put(done)
        try:
            done.get(timeout=timeout_seconds)
        except queue.Empty:
            return False
        return True

    def wake(self) -> None:
        """Have the events that wait handed to their handlers soon. Any thread and any signal handler may call it."""
        if not self._is_woken:
            self._is_woken = True
            self._wakeups.put(_Wake.EVENTS)

    def collect(self, *, is_last: bool = False) -> Batch:
        """Read all stats, hand them and the events on; what was handed on."""
        with self._lock:
            clock = self._registry.progress.clock
            begin_ns = clock.monotonic_ns()
            for source in self._registry.sources:
                guard = self._guards.setdefault(source.name, Guard(source.name))
                self._run(guard, partial(source.read, is_last=is_last))
            self._hand_to_handlers()
            events, self._undelivered = tuple(self._undelivered), []
            windows, totals = self._read(is_last=is_last)
            batch = Batch(
                time_ns=clock.time_ns(),
                begin_ns=self._begin_ns,
                attributes=self._attributes,
                windows=tuple(windows),
                totals=tuple(totals),
                events=events,
                is_last=is_last,
            )
            for sink, guard in self._sinks:
                self._run(guard, partial(sink.deliver, batch), even_if_muted=is_last)
            self._metrics.collect_seconds.add((clock.monotonic_ns() - begin_ns) * _NS)
            return batch

    def _read(self, *, is_last: bool) -> tuple[list[WindowReport], list[TotalReport]]:
        windows, totals = [], []
        for stat in self._registry.find():
            num_rejected = num_lost = 0
            for cell in stat.cells:
                closed, figures = cell.collect(is_last=is_last)
                windows += [WindowReport.of(stat.definition, cell.labels, stat.policy, window) for window in closed]
                # A counter that counted nothing is at 0, which whoever looks for its growth has to see; of everything
                # else there is no data.
                if figures.count or (stat.definition.kind is Kind.COUNTER and cell.enabled):
                    totals.append(TotalReport(stat.definition, cell.labels, figures))
                num_rejected += figures.num_rejected
                num_lost += cell.num_lost_windows
            self._count_losses(stat.name, num_rejected, num_lost)
        return windows, totals

    def _count_losses(self, stat: str, num_rejected: int, num_lost: int) -> None:
        """Bring the counters of what a stat lost up to date; they show at the next collection."""
        for metric, number in ((self._metrics.rejected_values, num_rejected), (self._metrics.lost_windows, num_lost)):
            growth = number - self._losses.get((metric.name, stat), 0)
            if growth > 0:
                metric.cell(stat=stat).add(growth)
                self._losses[metric.name, stat] = number

    def _hand_to_handlers(self) -> None:
        self._is_woken = False
        events = self._events.take()
        handlers = {each: self._handlers.get(each) for each in self._events.subscriptions}
        self._handlers = {
            each: guard or Guard(getattr(each.handler, "__qualname__", type(each.handler).__qualname__))
            for each, guard in handlers.items()
        }
        for subscription, guard in self._handlers.items():
            wanted = [event for event in events if subscription.wants(event)]
            if wanted:
                self._run(guard, partial(_hand_all, subscription, wanted))
        self._undelivered += events
        for _ in self._undelivered[: -self._max_undelivered]:
            self._metrics.dropped_events.cell(reason="overrun").add(1)
        del self._undelivered[: -self._max_undelivered]

    def _run(self, guard: Guard, action: partial[None], *, even_if_muted: bool = False) -> bool:
        num_errors, num_muted = guard.num_errors, guard.num_muted
        is_done = self._runner.run(guard, action, even_if_muted=even_if_muted)
        if guard.num_errors > num_errors:
            self._metrics.outlet_errors.cell(outlet=guard.name).add(1)
        if guard.num_muted > num_muted:
            self._metrics.muted_deliveries.cell(outlet=guard.name).add(1)
        return is_done

    def _loop(self, interval_seconds: float, wakeups: queue.SimpleQueue[_Wake | queue.SimpleQueue[None]]) -> None:
        runner, due = self._runner, time.monotonic() + interval_seconds
        while True:
            wake = None
            with contextlib.suppress(queue.Empty):
                wake = wakeups.get(timeout=max(0.0, due - time.monotonic()))
            if wake is _Wake.STOP:
                break
            if wake is _Wake.EVENTS:
                time.sleep(_BURST_SECONDS)
                with self._lock:
                    self._hand_to_handlers()
                continue
            self._collect_once()
            if isinstance(wake, queue.SimpleQueue):
                wake.put(None)
            due = max(due, time.monotonic() - interval_seconds) + interval_seconds
        if wakeups is not self._wakeups:
            runner.stop()
            return  # stop() did not wait so long, and what is started since belongs to another thread
        self._collect_once(is_last=True)
        for sink, guard in self._sinks:
            self._run(guard, partial(_close, sink), even_if_muted=True)
        self._runner.stop()

    def _collect_once(self, *, is_last: bool = False) -> None:
        try:
            self.collect(is_last=is_last)
        except Exception:
            # Only our own faults come here. The thread must not end: the next collection may well work.
            _logger.exception("monitor: a collection failed")


def _hand_all(subscription: Subscription, events: list[Event]) -> None:
    for event in events:
        subscription.handler(event)


def _close(sink: Sink) -> None:
    sink.close()
