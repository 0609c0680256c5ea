"""Export to a trace file for chrome://tracing and Perfetto.

Viewers display spans as bars, events as marks, and values of windows as curves.

The file is a JSON array in the Trace Event Format. The closing bracket is optional, so the file is readable even if
the program was killed. No package is needed.

Timestamps are compatible with PyTorch's profiler, so both files can be displayed in one timeline. A timestamp is the
wall-clock time in microseconds since a base time. The profiler stores the base time in ``baseTimeNanoseconds``, and
the sink stores it in a label of the process. The base time changes every quarter of a year. If the base times of two
files differ, shift one trace by the difference.
"""

import os
import time
from pathlib import Path

from delta_tracker.monitor.collection_report import CollectionReport, WindowReport
from delta_tracker.monitor.event import Event, Phase, json_value
from delta_tracker.monitor.names import label_pairs
from delta_tracker.monitor.sinks.base_sink import FileSink

_NS_PER_US = 1000
# Kineto's ChromeTraceBaseTime: a quarter of the mean Gregorian year of 365.2425 days.
_QUARTER_NS = 7_889_238 * 10**9
_PHASES = {Phase.BEGIN: "b", Phase.END: "e", Phase.INSTANT: "i"}


class ChromeTraceSink(FileSink):
    """Sink that writes a trace file for chrome://tracing and Perfetto. An existing file is replaced.

    Args:
        path: path of the file, ending in ``.json``.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path, replace=True)
        self._pid = os.getpid()
        self._base_ns = time.time_ns() // _QUARTER_NS * _QUARTER_NS
        labels = {"labels": f"baseTimeNanoseconds={self._base_ns}"}
        self.write("[\n")
        self.append([{"name": "process_labels", "ph": "M", "pid": self._pid, "args": labels}], ",\n")

    def deliver(self, collection: CollectionReport) -> None:
        """Append the events and windows of the collection. If a write fails, the file is not changed."""
        lines = [self._event(event) for event in collection.events]
        lines += [self._curve(report) for report in collection.windows if report.values]
        self.append(lines, ",\n")

    def close(self) -> None:
        """Write the end of the JSON array and close the file."""
        try:
            self.write("{}]\n")
        finally:
            super().close()

    def _event(self, event: Event) -> dict[str, object]:
        line: dict[str, object] = {
            "name": event.name,
            "cat": "delta_tracker",
            "ph": _PHASES[event.phase],
            "ts": self._timestamp(event.time_ns),
            "pid": self._pid,
            "tid": 0,
            "args": {"message": event.message, **{key: json_value(value) for key, value in event.data.items()}},
        }
        # Spans are asynchronous events ("b", "e"), because spans of several threads and tasks need not nest.
        return line | ({"s": "p"} if event.phase is Phase.INSTANT else {"id": f"{event.span:x}"})

    def _curve(self, report: WindowReport) -> dict[str, object]:
        return {
            "name": " ".join([report.definition.name, *label_pairs(report.labels)]),
            "ph": "C",
            "ts": self._timestamp(report.window.time_ns),
            "pid": self._pid,
            "args": {name: json_value(value) for name, value in report.values.items()},
        }

    def _timestamp(self, time_ns: int) -> float:
        return (time_ns - self._base_ns) / _NS_PER_US
