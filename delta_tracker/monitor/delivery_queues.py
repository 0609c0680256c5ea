"""Queues of windows and events that have not been delivered to a sink or a handler."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from delta_tracker.monitor.batch import Batch, WindowReport
from delta_tracker.monitor.event import Event
from delta_tracker.monitor.event_log import Subscription
from delta_tracker.monitor.guarded_calls import Guard
from delta_tracker.monitor.sinks.sink import Sink

MAX_WINDOWS = 8192
"""Maximum number of windows queued for one sink."""


class SinkQueue:
    """Queue of the undelivered windows and events of one sink. Thread-safe.

    Args:
        sink: the sink.
        max_events: maximum number of queued events.

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
        # Number of leading windows and events that are being delivered and must not be dropped.
        self._num_windows = self._num_events = 0

    def add(self, windows: Sequence[WindowReport], events: Sequence[Event]) -> tuple[list[WindowReport], int]:
        """Queue windows and events. If the queue exceeds a limit, drop the oldest ones that are not being delivered.

        Returns:
            The dropped windows, and the number of dropped events.
        """
        with self._lock:
            self._windows += windows
            self._events += events
            first = self._num_windows
            dropped = self._windows[first : max(first, len(self._windows) - MAX_WINDOWS)]
            del self._windows[first : first + len(dropped)]
            num_dropped = max(0, len(self._events) - self._num_events - self._max_events)
            del self._events[self._num_events : self._num_events + num_dropped]
            return dropped, num_dropped

    def deliver(self, batch: Batch) -> None:
        """Call the sink with a copy of ``batch`` that contains all queued windows and events.

        When the sink returns, even if it exceeded the deadline, the delivered windows and events are removed from the
        queue. If the sink raises, all windows and events stay queued.
        """
        with self._lock:
            windows, events = tuple(self._windows), tuple(self._events)
            self._num_windows, self._num_events = len(windows), len(events)
        num_windows = num_events = 0
        try:
            self.sink.deliver(replace(batch, windows=windows, events=events))
            num_windows, num_events = len(windows), len(events)
        finally:
            with self._lock:
                del self._windows[:num_windows], self._events[:num_events]
                self._num_windows = self._num_events = 0


class HandlerQueue:
    """Queue of the undelivered events of one handler.

    Args:
        subscription: the subscription of the handler.
        max_events: maximum number of queued events.

    Attributes:
        guard: record of the handler's failures. A handler that failed is muted: it is not called for a while.
    """

    def __init__(self, subscription: Subscription, max_events: int) -> None:
        self._subscription = subscription
        self.guard = Guard(getattr(subscription.handler, "__qualname__", type(subscription.handler).__qualname__))
        self._max_events = max_events
        self._waiting: deque[Event] = deque()

    @property
    def is_waiting(self) -> bool:
        """True if events are queued."""
        return bool(self._waiting)

    def add(self, events: Sequence[Event]) -> int:
        """Queue those of ``events`` that match the subscription.

        If the queue exceeds its limit, drop the oldest events.

        Returns:
            The number of dropped events.
        """
        self._waiting.extend(event for event in events if self._subscription.wants(event))
        num_dropped = 0
        while len(self._waiting) > self._max_events and self._next() is not None:
            num_dropped += 1
        return num_dropped

    def hand(self, until: float) -> None:
        """Call the handler with each queued event.

        If the handler raises, that event is not delivered again, and the events after it stay queued.

        Args:
            until: value of ``time.monotonic()`` after which the remaining events stay queued. The handler is called
                with at least one event, even if this time has passed.
        """
        event = self._next()
        while event is not None:
            self._subscription.handler(event)
            event = self._next() if time.monotonic() < until else None

    def _next(self) -> Event | None:
        try:
            return self._waiting.popleft()
        except IndexError:
            return None  # the queue is empty
