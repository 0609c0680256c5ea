"""Outlets: sinks, event handlers and callbacks of stats, as the collector calls them.

Each call has a deadline, and exceptions are caught. An outlet that fails is muted: it is not called for a while.
Windows and events that a sink has not accepted wait in its :class:`SinkQueue`.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace

from delta_tracker.monitor.clock import NS, Clock
from delta_tracker.monitor.collection_report import CollectionReport, WindowReport
from delta_tracker.monitor.event import Event
from delta_tracker.monitor.library import LibraryMetrics
from delta_tracker.monitor.sinks.base_sink import Sink

_logger = logging.getLogger(__name__)

_FIRST_MUTE_SECONDS, _LONGEST_MUTE_SECONDS = 10, 600
_MAX_WINDOWS = 8192  # windows queued for one sink

Call = tuple[Callable[[], None], Future[None]]
"""Function to call, and the future of its end."""


@dataclass(slots=True)
class Guard:
    """State of one sink, handler or callback: its failures, its muting and its newest call.

    Args:
        name: name of the sink, handler or callback in log messages and metrics.
        has_failed: True if a call raised or exceeded the deadline.
        num_in_a_row: number of consecutive failures.
        muted_until_ns: end of the muting, in nanoseconds of the monotonic clock.
        call: the newest call if it exceeded the deadline. The next call is made only after it is done.
    """

    name: str
    has_failed: bool = False
    num_in_a_row: int = 0
    muted_until_ns: int = 0
    call: Future[None] | None = None

    @property
    def is_busy(self) -> bool:
        """True if the newest call is unfinished."""
        return self.call is not None and not self.call.done()

    def mute(self, reason: BaseException, now_ns: int) -> None:
        """Mute the sink, handler or callback after a failure. Log the first failure.

        The muting lasts 10 s after a first failure. The duration doubles with each consecutive failure, up to 600 s.
        """
        seconds = min(_FIRST_MUTE_SECONDS * 2**self.num_in_a_row, _LONGEST_MUTE_SECONDS)
        self.num_in_a_row = min(self.num_in_a_row + 1, 16)
        self.muted_until_ns = now_ns + round(seconds / NS)
        if not self.has_failed:
            self.has_failed = True
            _logger.error(
                "monitor: muted after a failure: outlet=%s seconds=%d error=%s",
                self.name,
                seconds,
                reason,
                exc_info=reason,
            )


class Runner:
    """Runner of calls in a worker thread. If a call exceeds the deadline, the next call is made in a new worker thread.

    Not thread-safe. The worker is a daemon thread, started by :meth:`start` or at the first call.
    """

    def __init__(self, clock: Clock, deadline_seconds: float, metrics: LibraryMetrics) -> None:
        self._clock = clock
        self._deadline_seconds = deadline_seconds
        self._metrics = metrics
        self._calls: queue.SimpleQueue[Call | None] | None = None

    def start(self) -> queue.SimpleQueue[Call | None]:
        """Start the worker thread if there is none, and return the queue of its calls.

        :meth:`run` does the same. Call this method early if the first call may be made at interpreter shutdown, when no
        thread can be started.
        """
        if self._calls is None:
            calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
            threading.Thread(target=_work, args=(calls,), name="delta_tracker-sinks", daemon=True).start()
            self._calls = calls
        return self._calls

    def run(
        self, guard: Guard, action: Callable[[], None], *, even_if_muted: bool = False, here_if_refused: bool = False
    ) -> bool:
        """Call ``action`` in the worker thread, and return whether the call succeeded.

        The call is skipped and counted if ``guard`` is muted, or if the previous call with ``guard`` has not returned.

        Args:
            guard: state of the sink, handler or callback that is called.
            action: function to call.
            even_if_muted: True to ignore the muting. The method then first waits for the previous call to return, but
                not longer than the deadline.
            here_if_refused: True to call ``action`` in the calling thread, without a deadline, if no worker thread can
                be started. Since Python 3.12, no thread can be started at interpreter shutdown.
        """
        now = self._clock.monotonic_ns()
        if even_if_muted and guard.call is not None:
            wait([guard.call], self._deadline_seconds)
        if guard.is_busy or (now < guard.muted_until_ns and not even_if_muted):
            self._metrics.muted_deliveries.cell(outlet=guard.name).add(1)
            return False
        call: Future[None] = Future()
        guard.call = call
        try:
            self.start().put((action, call))
        except RuntimeError as refused:  # no thread can be started
            if here_if_refused:
                _make(action, call)
            else:
                call.set_exception(refused)
        try:
            error = call.exception(self._deadline_seconds)
            guard.call = None  # the traceback of its exception would keep the collection alive while muted
        except TimeoutError:
            self.stop()  # the worker ends when its call returns
            error = TimeoutError(f"no answer within {self._deadline_seconds} s")
        if error is None:
            guard.num_in_a_row = 0
            return True
        self._metrics.outlet_errors.cell(outlet=guard.name).add(1)
        guard.mute(error, now)
        return False

    def stop(self) -> None:
        """End the worker thread after its current call. The next :meth:`run` starts a new worker thread."""
        if self._calls is not None:
            self._calls.put(None)
            self._calls = None


def _work(calls: queue.SimpleQueue[Call | None]) -> None:
    while (call := calls.get()) is not None:
        _make(*call)


def _make(action: Callable[[], None], call: Future[None]) -> None:
    """Call ``action``, and complete the future ``call`` with its exception, if any."""
    try:
        action()
    except BaseException as error:  # noqa: BLE001  user code must not end the worker thread
        call.set_exception(error)
    else:
        call.set_result(None)


class SinkQueue:
    """Queue of the undelivered windows and events of one sink. Thread-safe.

    Attributes:
        guard: record of the sink's failures. A sink that failed is muted: it is not called for a while.
    """

    def __init__(self, sink: Sink, max_events: int) -> None:
        self.sink = sink
        self.guard = Guard(sink.name)
        self._max_events = max_events
        self._lock = threading.Lock()
        self._windows: list[WindowReport] = []
        self._events: list[Event] = []

    def add(self, windows: Sequence[WindowReport], events: Sequence[Event]) -> tuple[list[WindowReport], int]:
        """Queue windows and events, and drop the oldest ones beyond a limit.

        Return the dropped windows, and the number of dropped events.
        """
        with self._lock:
            self._windows += windows
            self._events += events
            dropped = self._windows[:-_MAX_WINDOWS]
            num_dropped = max(0, len(self._events) - self._max_events)
            del self._windows[:-_MAX_WINDOWS], self._events[:num_dropped]
            return dropped, num_dropped

    def deliver(self, collection: CollectionReport) -> None:
        """Call the sink with a copy of ``collection`` that contains all queued windows and events.

        They leave the queue meanwhile, and return to it if the sink raises.
        """
        with self._lock:
            windows, events = self._windows, self._events
            self._windows, self._events = [], []
        try:
            self.sink.deliver(replace(collection, windows=tuple(windows), events=tuple(events)))
        except BaseException:
            with self._lock:
                self._windows[:0], self._events[:0] = windows, events
            raise
