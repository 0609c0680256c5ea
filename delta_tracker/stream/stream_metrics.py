"""Export of a stream's newest version as metrics of the calling program, such as ``delta-tracker exporter``."""

from __future__ import annotations

from delta_tracker.monitor.monitor import Monitor
from delta_tracker.monitor.polled_stats import Source
from delta_tracker.stream.heartbeat import see_publisher
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Location, open_storage
from delta_tracker.stream.store_clock import StoreClock


def show_stream(url: Location, monitor: Monitor) -> None:
    """Export the newest version of a stream, its age and that of its publisher's heartbeat as gauges ``stream_*``.

    At each collection of metrics, a thread of the monitor reads the newest entry. Before the first version there are no
    values. A failed read is counted in the metric ``outlet_errors``.
    """
    monitor.registry.add_source(_Newest(StreamLog(open_storage(url)), monitor))


class _Newest(Source):
    def __init__(self, log: StreamLog, monitor: Monitor) -> None:
        self.name = f"newest version of {log.storage.url}"
        self._log, self._metrics, self._clock = log, monitor.metrics, StoreClock()

    def read(self, *, is_last: bool) -> None:
        """Set the gauges, or remove their values if the stream cannot be read."""
        del is_last
        url, metrics = self._log.storage.url, self._metrics
        gauges = (
            metrics.stream_version,
            metrics.stream_age_seconds,
            metrics.stream_pending_rows,
            metrics.publisher_heartbeat_age_seconds,
        )
        began = self._clock.reader_time()
        for gauge in gauges:
            gauge.remove(url=url)
        head = self._log.head()
        if head is None:
            return
        seen = see_publisher(self._log.storage, head)
        beat = None if seen is None else seen[1]
        self._clock.saw("log", [head.committed], began=began)
        self._clock.saw("heartbeats", [] if beat is None else [beat], began=began)
        now = self._clock.now()
        readings = (
            head.version,
            max(0.0, now - head.committed),
            head.pending_rows,
            None if beat is None else max(0.0, now - beat),
        )
        for gauge, value in zip(gauges, readings, strict=True):
            if value is not None:
                gauge.set(value, url=url)
