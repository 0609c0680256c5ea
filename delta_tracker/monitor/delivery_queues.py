"""Queues of windows and events that a sink or a handler has not taken yet."""

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
"""So many windows wait for one sink at most. A sink that fails is left alone for up to ten minutes."""


class SinkQueue:
    """A sink, and the windows and events that it has not taken. Any thread may call it.

    Args:
        sink: the sink.
        max_events: how many events wait at most.
    """

    def __init__(self, sink: Sink, max_events: int) -> None:
        self.sink = sink
        self.guard = Guard(sink.name)
        self._max_events = max_events
        self._lock = threading.Lock()
        self._windows: list[WindowReport] = []
        self._events: list[Event] = []
        # How many of each the sink is being called with; the first ones.
        self._num_windows = self._num_events = 0

    def add(self, windows: Sequence[WindowReport], events: Sequence[Event]) -> tuple[list[WindowReport], int]:
        """Have windows and events wait; the windows that were dropped for them, and how many events were."""
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
        """Call the sink with a batch, and with what waits in place of the batch's windows and events.

        What waits is taken when the sink has returned, also after its deadline. If it raises, all of it waits again.
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
    """A handler, and the events that it has not been called with.

    Args:
        subscription: whose handler.
        max_events: how many events wait at most.
    """

    def __init__(self, subscription: Subscription, max_events: int) -> None:
        self._subscription = subscription
        self.guard = Guard(getattr(subscription.handler, "__qualname__", type(subscription.handler).__qualname__))
        self._max_events = max_events
        self._waiting: deque[Event] = deque()

    @property
    def is_waiting(self) -> bool:
        """Whether there are events for it."""
        return bool(self._waiting)

    def add(self, events: Sequence[Event]) -> int:
        """Have the events wait that it wants; how many older ones were dropped for them."""
        self._waiting.extend(event for event in events if self._subscription.wants(event))
        num_dropped = 0
        while len(self._waiting) > self._max_events and self._next() is not None:
            num_dropped += 1
        return num_dropped

    def hand(self, until: float) -> None:
        """Call it with the events that wait, until a time of ``time.monotonic()``, but with one at least.

        An event is not handed to it again if it raises; the others wait.
        """
        event = self._next()
        while event is not None:
            self._subscription.handler(event)
            event = self._next() if time.monotonic() < until else None

    def _next(self) -> Event | None:
        try:
            return self._waiting.popleft()
        except IndexError:
            return None  # another thread took the last one
