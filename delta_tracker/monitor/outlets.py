"""Calls to outlets, which are the sinks, event handlers and sources of a monitor.

Each call has a deadline, and exceptions are caught. After a failure, the outlet is muted: it is not called for at least
10 seconds. A :class:`SinkQueue` keeps windows and events until the sink has accepted them.
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
"""Function to call, and the future that is completed when the function returns or raises."""


@dataclass(slots=True)
class Guard:
    """Failures of one outlet, and the time until which the outlet is muted after a failure.

    Args:
        name: name of the outlet in log messages and metrics.
        has_failed: True if any call raised an exception or exceeded the deadline.
        num_in_a_row: number of consecutive failures, at most 16.
        muted_until_ns: time until which no calls are made, in nanoseconds of the monotonic clock.
        call: last call, if it exceeded the deadline; None otherwise. The outlet is not called until this call returns.
    """

    name: str
    has_failed: bool = False
    num_in_a_row: int = 0
    muted_until_ns: int = 0
    call: Future[None] | None = None

    @property
    def is_busy(self) -> bool:
        """True if the last call has not returned."""
        return self.call is not None and not self.call.done()

    def mute(self, reason: BaseException, now_ns: int) -> None:
        """Mute the outlet after a failure, for 10 seconds at first and for longer after consecutive failures.

        The duration doubles with each consecutive failure, up to 600 seconds. Only the first failure is logged.
        """
        seconds = min(_FIRST_MUTE_SECONDS * 2**self.num_in_a_row, _LONGEST_MUTE_SECONDS)
        self.num_in_a_row = min(self.num_in_a_row + 1, 16)
        self.muted_until_ns = now_ns + round(seconds / NS)
        if not self.has_failed:
            self.has_failed = True
            text = "monitor: muted after a failure: outlet=%s seconds=%d error=%s"
            _logger.error(text, self.name, seconds, reason, exc_info=reason)


class Runner:
    """Worker thread that runs functions with a deadline. After a missed deadline, a new thread makes the next call.

    Not thread-safe. The worker is a daemon thread that :meth:`start` or the first :meth:`run` starts.
    """

    def __init__(self, clock: Clock, deadline_seconds: float, metrics: LibraryMetrics) -> None:
        self._clock = clock
        self._deadline_seconds = deadline_seconds
        self._metrics = metrics
        self._calls: queue.SimpleQueue[Call | None] | None = None

    def start(self) -> queue.SimpleQueue[Call | None]:
        """Start the worker thread if it is not running, and return its queue of calls.

        :meth:`run` also starts the thread. Call this method earlier if the first :meth:`run` may happen at interpreter
        shutdown, when no thread can be started.
        """
        if self._calls is None:
            calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
            threading.Thread(target=_work, args=(calls,), name="delta_tracker-sinks", daemon=True).start()
            self._calls = calls
        return self._calls

    def run(
        self, guard: Guard, action: Callable[[], None], *, even_if_muted: bool = False, here_if_refused: bool = False
    ) -> bool:
        """Call ``action`` in the worker thread. Return True if the call succeeded.

        The call is skipped and counted if the outlet is muted, or if the previous call of the outlet has not returned.

        Args:
            guard: guard of the outlet, which records failures of the call.
            action: function to call.
            even_if_muted: True to call ``action`` even if the outlet is muted. If the previous call of the outlet has
                not returned, first wait for it up to the deadline.
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
        """End the worker thread after its current call. The next :meth:`run` starts a new thread."""
        if self._calls is not None:
            self._calls.put(None)
            self._calls = None


def _work(calls: queue.SimpleQueue[Call | None]) -> None:
    while (call := calls.get()) is not None:
        _make(*call)


def _make(action: Callable[[], None], call: Future[None]) -> None:
    """Call ``action``. Complete the future ``call`` with None, or with the exception that ``action`` raised."""
    try:
        action()
    except BaseException as error:  # noqa: BLE001  user code must not end the worker thread
        call.set_exception(error)
    else:
        call.set_result(None)


class SinkQueue:
    """Queue of the windows and events to deliver to one sink. Thread-safe.

    Attributes:
        guard: record of the sink's failures. After a failure, the sink is not called for some time.
    """

    def __init__(self, sink: Sink, max_events: int) -> None:
        self.sink = sink
        self.guard = Guard(sink.name)
        self._max_events = max_events
        self._lock = threading.Lock()
        self._windows: list[WindowReport] = []
        self._events: list[Event] = []

    def add(self, windows: Sequence[WindowReport], events: Sequence[Event]) -> tuple[list[WindowReport], int]:
        """Queue windows and events. If the queue exceeds its limits, drop the oldest windows or events.

        Returns the dropped windows, and the number of dropped events.
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

        If the sink raises an exception, put the windows and events back at the front of the queue.
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
