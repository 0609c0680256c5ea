"""Export of windows and events to a JSON Lines file. No package is needed."""

from collections.abc import Mapping

from delta_tracker.monitor.clock import NS
from delta_tracker.monitor.collection_report import CollectionReport, WindowReport
from delta_tracker.monitor.event import Event, json_value
from delta_tracker.monitor.sinks.base_sink import FileSink


class JsonlSink(FileSink):
    """Sink that appends windows and events to a file. Each collection is appended completely or not at all.

    Each line is an object with ``kind`` ("window" or "event"), ``time`` in seconds since the epoch, and other fields.
    Undefined values are omitted. NaN and infinity are written as strings.

    Args:
        path: path of the file. The folder is created if it is missing.
    """

    def deliver(self, collection: CollectionReport) -> None:
        """Append the lines of the collection. If a write fails, the file is not changed."""
        lines = [window_line(report, collection.attributes) for report in collection.windows]
        lines += [event_line(event, collection.attributes) for event in collection.events]
        self.append(lines, "\n")


def window_line(report: WindowReport, attributes: Mapping[str, str]) -> dict[str, object]:
    """Convert a window to a JSON object. ``attributes`` are included in the object."""
    window = report.window
    line: dict[str, object] = {
        "kind": "window",
        "time": window.time_ns * NS,
        "name": report.definition.name,
        "unit": report.definition.unit,
        "labels": dict(report.labels),
        "seconds": (window.end_ns - window.begin_ns) * NS,
        "count": report.count,
        "values": {name: json_value(value) for name, value in report.values.items()},
    }
    optional = {
        "attributes": dict(attributes),
        "step": window.step,
        "epoch": window.epoch,
        "partial": window.is_partial or None,
        "rejected": report.num_rejected or None,
        "raw": list(window.raw) or None,
    }
    return line | {name: value for name, value in optional.items() if value not in (None, {})}


def event_line(event: Event, attributes: Mapping[str, str]) -> dict[str, object]:
    """Convert an event to a JSON object. ``attributes`` are included in the object. Ids are hexadecimal strings."""
    return {
        "kind": "event",
        "time": event.time_ns * NS,
        "monotonic": event.monotonic_ns * NS,
        "name": event.name,
        "severity": event.severity.name,
        "message": event.message,
        "data": {key: json_value(value) for key, value in event.data.items()},
        "id": f"{event.id:016x}",
        "span": f"{event.span:016x}",
        "parent": f"{event.parent:016x}",
        "trace": f"{event.trace:032x}",
        "phase": event.phase.value,
        "attributes": dict(attributes),
    }
