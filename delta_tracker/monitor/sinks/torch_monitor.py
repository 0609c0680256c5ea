"""Forwarding of events to and from ``torch.monitor``.

The handler that this module registers is a C function. A handler in Python can deadlock if two threads log events, and
aborts the process if it raises. The library calls ``log_event`` in only one thread.
"""

from __future__ import annotations

import datetime as dt
import queue
from typing import TYPE_CHECKING, Any

from delta_tracker.errors import InvalidArgumentError, MissingExtraError
from delta_tracker.monitor.batch import Batch
from delta_tracker.monitor.event import Event, Value
from delta_tracker.monitor.event_log import EventLog
from delta_tracker.monitor.polled_stats import Source
from delta_tracker.monitor.sinks.sink import Sink

if TYPE_CHECKING:
    from torch import monitor as torch_monitor

_PREFIX = "torch.monitor."
_OURS = "delta_tracker.bridge"
_S = 1e-9
_US_PER_S = 1_000_000


class TorchMonitorSink(Sink):
    """Sink that logs each event and window as an event of ``torch.monitor``, which calls its registered handlers.

    The handlers run in a thread of the library. Events that came from ``torch.monitor`` are not logged.

    Raises:
        MissingExtraError: if ``torch.monitor`` is missing.
    """

    def __init__(self) -> None:
        self._torch = _torch_monitor()

    def deliver(self, batch: Batch) -> None:
        """Log the batch to ``torch.monitor``."""
        for report in batch.windows:
            data: dict[str, Value] = {f"{report.definition.name}.{name}": each for name, each in report.values.items()}
            data |= {"count": report.count, **dict(report.labels), _OURS: True}
            self._log("torch.monitor.Stat", report.window.time_ns, data)
        for event in batch.events:
            if not event.name.startswith(_PREFIX):
                self._log(event.name, event.time_ns, {"message": event.message, **event.data, _OURS: True})

    def _log(self, name: str, time_ns: int, data: dict[str, Value]) -> None:
        time = dt.datetime.fromtimestamp(time_ns * _S)  # noqa: DTZ006  torch takes local times
        self._torch.log_event(self._torch.Event(name, time, data))


class TorchMonitorSource(Source):
    """Source that emits each event of ``torch.monitor`` as an event named ``torch.monitor.<name>``.

    The events of ``torch.monitor.Stat`` are included. Events logged by :class:`TorchMonitorSink` are ignored.

    Add the source with ``monitor.registry.add_source(TorchMonitorSource(monitor.events))``. The constructor registers a
    handler with ``torch.monitor``, and :meth:`close` unregisters the handler.

    Args:
        events: log that receives the events.
        capacity: maximum number of events per collection. Further events are dropped.

    Attributes:
        num_dropped: number of dropped events.

    Raises:
        InvalidArgumentError: for a capacity below 1.
        MissingExtraError: if ``torch.monitor`` is missing.
    """

    name = "torch.monitor"

    def __init__(self, events: EventLog, capacity: int = 4096) -> None:
        if type(capacity) is not int or capacity < 1:
            raise InvalidArgumentError("capacity", capacity, "Pass a whole number of 1 or more")
        self._events = events
        self._capacity = capacity
        self._torch = _torch_monitor()
        self._queue: queue.SimpleQueue[torch_monitor.Event] = queue.SimpleQueue()
        self._handle: torch_monitor.EventHandlerHandle | None = self._torch.register_event_handler(self._queue.put)
        self.num_dropped = 0

    def read(self, *, is_last: bool) -> None:
        """Emit the events received since the last collection. If ``is_last`` is True, unregister the handler."""
        for place in range(self._queue.qsize()):
            event = self._queue.get()
            if _OURS in event.data:
                continue  # logged by TorchMonitorSink; emitting it would loop forever
            if place >= self._capacity:
                self.num_dropped += 1
            else:
                self._events.emit(translated(event))
        if is_last:
            self.close()

    def close(self) -> None:
        """Unregister the handler. A second call is a no-op, because unregistering a handler twice crashes torch."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._torch.unregister_event_handler(handle)


def translated(event: torch_monitor.Event) -> Event:
    """Convert an event of ``torch.monitor`` to an :class:`Event`.

    In the name, invalid characters are replaced by underscores.
    """
    name = "".join(each if (each.isalnum() and each.isascii()) or each in "._" else "_" for each in event.name)
    name = ".".join(part if part and not part[0].isdigit() else f"_{part}" for part in name.split("."))
    time_ns = round(event.timestamp.timestamp() * _US_PER_S) * 1000
    return Event(_PREFIX + name.removeprefix(_PREFIX), data=dict(event.data), time_ns=time_ns)


def _torch_monitor() -> Any:  # noqa: ANN401  a module
    try:
        from torch import monitor  # noqa: PLC0415  the monitor package does not depend on torch
    except ImportError as error:
        raise MissingExtraError("torch", None) from error
    return monitor
