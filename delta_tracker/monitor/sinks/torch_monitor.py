"""Export of events and windows to ``torch.monitor``."""

import datetime as dt

from delta_tracker.errors import import_optional
from delta_tracker.monitor.clock import NS
from delta_tracker.monitor.collection_report import CollectionReport
from delta_tracker.monitor.event import Value
from delta_tracker.monitor.sinks.base_sink import Sink


class TorchMonitorSink(Sink):
    """Sink that logs each event and window with ``torch.monitor.log_event()``.

    A background thread of this package calls the handlers of ``torch.monitor``, one at a time. Do not call
    ``log_event()`` in other threads at the same time: concurrent calls of a handler written in Python can deadlock.

    Raises:
        MissingExtraError: if ``torch.monitor`` is not available.
    """

    def __init__(self) -> None:
        self._torch = import_optional("torch.monitor", "torch", None)  # the monitor package does not depend on torch

    def deliver(self, collection: CollectionReport) -> None:
        """Log the windows and events of the collection to ``torch.monitor``."""
        for report in collection.windows:
            data: dict[str, Value] = {f"{report.definition.name}.{name}": each for name, each in report.values.items()}
            self._log(
                "torch.monitor.Stat", report.window.time_ns, {**data, "count": report.count, **dict(report.labels)}
            )
        for event in collection.events:
            self._log(event.name, event.time_ns, {"message": event.message, **event.data})

    def _log(self, name: str, time_ns: int, data: dict[str, Value]) -> None:
        time = dt.datetime.fromtimestamp(time_ns * NS)  # noqa: DTZ006  torch takes local times
        self._torch.log_event(self._torch.Event(name, time, data))
