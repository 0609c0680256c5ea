"""Collector that periodically reads all stats and delivers windows, totals and events to sinks and handlers."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from functools import partial

from delta_tracker.monitor.collection_report import CollectionReport, TotalReport, WindowReport
from delta_tracker.monitor.event import Event
from delta_tracker.monitor.event_log import EventLog
from delta_tracker.monitor.library import LibraryMetrics
from delta_tracker.monitor.outlets import Guard, Runner, SinkQueue
from delta_tracker.monitor.registry import Registry
from delta_tracker.monitor.sinks.base_sink import Sink
from delta_tracker.monitor.stat import Kind

_logger = logging.getLogger(__name__)

# Delay before events are delivered, so that a burst is delivered together.
_BURST_SECONDS = 0.05


class _Wake(Enum):
    EVENTS = auto()
    STOP = auto()


class Collector:
    """Background threads that read a monitor's stats and events and deliver them to sinks and handlers.

    After :meth:`start`, one thread collects periodically. A second thread calls sinks, handlers and callbacks. If a
    call exceeds the deadline, a new thread replaces the second thread.

    Args:
        deadline_seconds: time limit of each call to a sink, handler or callback.
    """

    def __init__(
        self, registry: Registry, events: EventLog, metrics: LibraryMetrics, *, deadline_seconds: float
    ) -> None:
        self._registry = registry
        self._events = events
        self._metrics = metrics
        self._deadline_seconds = deadline_seconds
        self._begin_ns = registry.progress.clock.time_ns()
        self.reset()

    def reset(self) -> None:
        """Return to the stopped state. Discards sinks and undelivered events. Does not wait for the threads to end."""
        self._lock = threading.RLock()
        self._runner = Runner(self._registry.progress.clock, self._deadline_seconds, self._metrics)
        self._sinks: list[SinkQueue] = []
        self._guards: dict[str, Guard] = {}  # of the sources, by name
        self._undelivered: list[Event] = []
        self._attributes: dict[str, str] = {}
        # An event is a request of flush(): collect, then set the event.
        self._wakeups: queue.SimpleQueue[_Wake | threading.Event] = queue.SimpleQueue()
        self._is_woken = False
        self._thread: threading.Thread | None = None

    def after_fork(self) -> None:
        """Call ``after_fork()`` on each sink, then remove all sinks. Called in a forked child.

        Exceptions are counted but not logged, because the parent may have held a lock of the logging module.
        """
        for sink in (sink_queue.sink for sink_queue in self._sinks):
            try:
                sink.after_fork()
            except Exception:  # noqa: BLE001  user code; counted
                self._metrics.outlet_errors.cell(outlet=sink.name).add(1)
        self.reset()

    @property
    def is_running(self) -> bool:
        """True after :meth:`start`, until :meth:`stop`."""
        return self._thread is not None

    def start(self, sinks: Sequence[Sink], interval_seconds: float, attributes: Mapping[str, str]) -> None:
        """Start both threads. If a thread cannot be started, raise RuntimeError and remain stopped."""
        sink_queues = [SinkQueue(sink, self._events.capacity) for sink in sinks]
        thread = threading.Thread(
            target=self._loop, args=(interval_seconds, self._wakeups), name="delta_tracker-collector", daemon=True
        )
        # Start both threads now: Python 3.12 cannot start one at shutdown, when the last collection is delivered.
        self._runner.start()
        self._sinks, self._attributes = sink_queues, dict(attributes)
        try:
            thread.start()
        except RuntimeError:
            self.reset()
            raise
        self._thread = thread

    def stop(self, timeout_seconds: float) -> bool:
        """Collect one last time, close the sinks and end both threads. No-op if the collector is not running.

        Returns False if this takes longer than ``timeout_seconds``. In this case, the threads may still be running.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        self._wakeups.put(_Wake.STOP)
        thread.join(timeout_seconds)
        is_done = not thread.is_alive()
        if not is_done:
            _logger.error("monitor: last collection not delivered in time: timeout_seconds=%s", timeout_seconds)
        self.reset()
        return is_done

    def flush(self, timeout_seconds: float) -> bool:
        """Collect now and wait until the sinks have been called. Return False on timeout."""
        if self._thread is None:
            self.collect()
            return True
        is_done = threading.Event()
        self._wakeups.put(is_done)
        return is_done.wait(timeout_seconds)

    def wake(self) -> None:
        """Request delivery of queued events to the event handlers. Safe in any thread and in signal handlers."""
        if not self._is_woken:
            self._is_woken = True
            self._wakeups.put(_Wake.EVENTS)

    def collect(self, *, is_last: bool = False, handler_seconds: float | None = None) -> CollectionReport:
        """Read all sources and stats, call the event handlers, deliver a report to the sinks and return the report.

        Args:
            is_last: True to close all windows, and to call all sinks, including muted ones.
            handler_seconds: time limit in seconds for all event handlers together; None for half the deadline. Events
                that are not handled in time remain queued.
        """
        with self._lock, self._metrics.collect_seconds.time():
            sources = self._registry.sources
            self._guards = {each.name: self._guards.get(each.name) or Guard(each.name) for each in sources}
            for source in sources:
                action = partial(source.read, is_last=is_last)
                self._runner.run(self._guards[source.name], action, here_if_refused=is_last)
            seconds = self._deadline_seconds / 2 if handler_seconds is None else handler_seconds
            if self._call_handlers(seconds, is_last=is_last):
                self.wake()
            events, self._undelivered = tuple(self._undelivered), []
            windows, totals = self._read(is_last=is_last)
            collection = CollectionReport(
                time_ns=self._registry.progress.clock.time_ns(),
                begin_ns=self._begin_ns,
                attributes=self._attributes,
                windows=tuple(windows),
                totals=tuple(totals),
                events=events,
                is_last=is_last,
            )
            for sink_queue in self._sinks:
                windows, num_events = sink_queue.add(collection.windows, collection.events)
                for report in windows:
                    self._metrics.lost_windows.cell(stat=report.definition.name).add(1)
                if num_events:
                    self._metrics.dropped_events.cell(reason="undelivered").add(num_events)
                action = partial(sink_queue.deliver, collection)
                self._runner.run(sink_queue.guard, action, even_if_muted=is_last, here_if_refused=is_last)
            self._registry.remove_ended()
            return collection

    def _read(self, *, is_last: bool) -> tuple[list[WindowReport], list[TotalReport]]:
        windows, totals = [], []
        for stat in self._registry.find():
            for cell in stat.cells:
                function = cell.function
                reading = None if function is None else function()
                if reading is not None:
                    cell.add(reading)
                found = cell.collect(is_last=is_last)
                windows += [WindowReport.of(stat.definition, cell.labels, stat.policy, each) for each in found.windows]
                # If the function has no reading, there is no data now; the last reading is out of date.
                has_data = found.figures.count and (function is None or reading is not None)
                # Export an unused counter as 0, so that its first increment is visible. Other stats have no data yet.
                if has_data or (stat.definition.kind is Kind.COUNTER and cell.enabled):
                    totals.append(TotalReport(stat.definition, cell.labels, found.figures, function))
                if found.num_rejected:
                    self._metrics.rejected_values.cell(stat=stat.name).add(found.num_rejected)
                    stat.warn_of_rejected(found.num_rejected)
                if found.num_lost:
                    self._metrics.lost_windows.cell(stat=stat.name).add(found.num_lost)
        return windows, totals

    def _call_handlers(self, seconds: float, *, is_last: bool = False) -> bool:
        """Call each handler with its queued events, for about ``seconds`` in total. The remaining events stay queued.

        Each handler that is not muted is called with at least one event. If ``is_last`` is True and no thread can be
        started, handlers are called in the calling thread. Returns True if events remain for a handler that succeeded.
        """
        self._is_woken = False
        events = self._events.take()
        until, is_behind = time.monotonic() + seconds, False
        for subscription in self._events.subscriptions:
            subscription.queue(events)
            action = partial(subscription.call_handler, until)
            if subscription.is_waiting and self._runner.run(subscription.guard, action, here_if_refused=is_last):
                is_behind = is_behind or subscription.is_waiting
        self._undelivered += events
        for _ in self._undelivered[: -self._events.capacity]:
            self._events.dropped("overrun")
        del self._undelivered[: -self._events.capacity]
        return is_behind

    def _loop(self, interval_seconds: float, wakeups: queue.SimpleQueue[_Wake | threading.Event]) -> None:
        runner, due = self._runner, time.monotonic() + interval_seconds
        handler_seconds = min(interval_seconds, self._deadline_seconds) / 2
        while True:
            wake = None
            with contextlib.suppress(queue.Empty):
                wake = wakeups.get(timeout=max(0.0, due - time.monotonic()))
            if wake is _Wake.STOP:
                break
            left = due - time.monotonic()
            if wake is _Wake.EVENTS and left > 0:
                # Busy handlers must not delay the next collection.
                time.sleep(min(_BURST_SECONDS, left))
                with self._lock:
                    is_behind = self._call_handlers(min(handler_seconds, max(0.0, due - time.monotonic())))
                if is_behind:
                    self.wake()
                continue
            if isinstance(wake, threading.Event):
                self._collect_once()
                wake.set()
            else:
                self._collect_once(handler_seconds=handler_seconds)
            due = max(due, time.monotonic() - interval_seconds) + interval_seconds
        if wakeups is not self._wakeups:
            runner.stop()
            return  # stop() timed out and reset the collector, which may have a new thread
        self._collect_once(is_last=True)
        for sink_queue in self._sinks:
            if sink_queue.guard.is_busy:
                _logger.error("monitor: not closed, because a delivery has not returned: sink=%s", sink_queue.sink.name)
            else:
                self._runner.run(sink_queue.guard, sink_queue.sink.close, even_if_muted=True, here_if_refused=True)
        self._runner.stop()

    def _collect_once(self, *, is_last: bool = False, handler_seconds: float | None = None) -> None:
        try:
            self.collect(is_last=is_last, handler_seconds=handler_seconds)
        except Exception:
            # A bug in the monitor itself. Keep the thread alive, because the next collection may succeed.
            _logger.exception("monitor: collection failed")
