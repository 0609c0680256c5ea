"""Export of events and windows through :mod:`logging`."""

import logging

from delta_tracker.monitor.collection_report import CollectionReport, WindowReport
from delta_tracker.monitor.event import Event
from delta_tracker.monitor.names import label_pairs
from delta_tracker.monitor.sinks.base_sink import Sink


class LoggingSink(Sink):
    """Sink that logs events at their severity, and windows at a fixed level.

    Args:
        logger: name of the logger.
        window_level: level at which windows are logged; None to log only events.
    """

    def __init__(self, logger: str = "delta_tracker.metrics", window_level: int | None = logging.INFO) -> None:
        self._logger = logging.getLogger(logger)
        self._window_level = window_level

    def deliver(self, collection: CollectionReport) -> None:
        """Log each event and window of the collection as one line."""
        for event in collection.events:
            self._logger.log(event.severity, "%s", event_text(event))
        if self._window_level is not None and self._logger.isEnabledFor(self._window_level):
            for report in collection.windows:
                self._logger.log(self._window_level, "%s", window_text(report))


def event_text(event: Event) -> str:
    """Format an event as one line of text."""
    data = " ".join(f"{key}={value}" for key, value in event.data.items())
    phase = "" if event.phase == "instant" else f" [{event.phase}]"
    return f"{event.name}{phase} {event.message} {data}".rstrip()


def window_text(report: WindowReport) -> str:
    """Format a window as one line of text."""
    series = " ".join([report.definition.name, *label_pairs(report.labels)])
    figures = " ".join(f"{name}={value:.6g}" for name, value in report.values.items())
    unit = f" {report.definition.unit}" if report.definition.unit else ""
    return f"{series}: {figures}{unit} of {report.count} records"
