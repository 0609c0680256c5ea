"""Export of predictors' heartbeats and of a stream's newest version as metrics of the calling program.

To start the export, call ``show_heartbeats("s3://bucket/stream")``.
"""

import logging

from delta_tracker.monitor.monitor import Monitor, program_monitor
from delta_tracker.monitor.polled_stats import MetricSource
from delta_tracker.monitor.stat import Gauge
from delta_tracker.stream.heartbeat import GONE_SECONDS, see_heartbeats, see_publisher
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Location, Storage, open_storage
from delta_tracker.stream.store_clock import StoreClock, skew_problem

_logger = logging.getLogger(__name__)
_NS_PER_SECOND = 10**9
_LIMIT = 4096  # heartbeats that are read at each collection, newest first


def show_heartbeats(url: Location, monitor: Monitor | None = None, *, gone_seconds: float = GONE_SECONDS) -> None:
    """Export the heartbeats of a stream's predictors as the built-in gauges ``heartbeat_*``.

    At each collection of metrics, a thread of the monitor reads the newest heartbeats, at most 4,096. It omits
    heartbeats older than ``gone_seconds``. The metric ``outlet_errors`` counts failed reads. ``monitor`` is
    ``delta_tracker.monitor.MONITOR`` by default.
    """
    chosen = program_monitor() if monitor is None else monitor
    chosen.registry.add_source(_Heartbeats(open_storage(url), chosen, gone_seconds))


def show_stream(url: Location, monitor: Monitor) -> None:
    """Export the number, age and pending rows of a stream's newest version, and its publisher's heartbeat age.

    A thread of the monitor reads them at each collection of metrics, and sets the gauges ``stream_*`` and
    ``publisher_heartbeat_age_seconds``. The metric ``outlet_errors`` counts failed reads.
    """
    monitor.registry.add_source(_Newest(StreamLog(open_storage(url)), monitor))


class _Heartbeats(MetricSource):
    def __init__(self, storage: Storage, monitor: Monitor, gone_seconds: float) -> None:
        self.name = f"heartbeats of {storage.url}"
        self._storage = storage
        self._gone_seconds = gone_seconds
        clock = monitor.registry.progress.clock
        self._clock = StoreClock(lambda: clock.time_ns() / _NS_PER_SECOND)
        self._skewed: set[str] = set()  # predictors whose skew was logged
        self._metrics = monitor.metrics
        self._shown: set[tuple[Gauge, str]] = set()

    def read(self, *, is_last: bool) -> None:  # noqa: ARG002
        """Set the gauges of each predictor from its heartbeat. Remove the values of predictors that are gone."""
        metrics = self._metrics
        readings: dict[tuple[Gauge, str], float] = {}
        found, _ = see_heartbeats(self._storage, self._clock, max_age=self._gone_seconds, limit=_LIMIT)
        for seen in found:
            if not seen.beat.seconds:
                continue  # it was stopped
            name = seen.beat.name
            problem = skew_problem(f"predictor {name}", seen.skew)
            if problem is None:
                self._skewed.discard(name)
            elif name not in self._skewed:
                self._skewed.add(name)
                _logger.warning("%s: url=%s", problem, self._storage.url)
            readings[metrics.heartbeat_age_seconds, name] = max(0.0, self._clock.now() - seen.modified)
            differences = seen.beat.differences
            readings[metrics.heartbeat_model_differences, name] = differences.count("; ") + bool(differences)
            if seen.beat.lag_versions is not None:
                readings[metrics.heartbeat_lag_versions, name] = seen.beat.lag_versions
            if seen.beat.lag_seconds is not None:
                readings[metrics.heartbeat_lag_seconds, name] = seen.beat.lag_seconds
        for gauge, name in self._shown - readings.keys():
            gauge.remove(predictor=name)
        for (gauge, name), value in readings.items():
            gauge.set(value, predictor=name)
        self._shown = set(readings)


class _Newest(MetricSource):
    def __init__(self, log: StreamLog, monitor: Monitor) -> None:
        self.name = f"newest version of {log.storage.url}"
        self._log, self._metrics, self._clock = log, monitor.metrics, StoreClock()

    def read(self, *, is_last: bool) -> None:  # noqa: ARG002
        """Set the gauges, or remove their values if the stream cannot be read."""
        url, metrics = self._log.storage.url, self._metrics
        gauges = (
            metrics.stream_version,
            metrics.stream_age_seconds,
            metrics.stream_pending_rows,
            metrics.publisher_heartbeat_age_seconds,
        )
        readings: tuple[float | None, ...] = (None,) * len(gauges)
        try:
            readings = self._readings() or readings
        finally:
            for gauge, value in zip(gauges, readings, strict=True):
                gauge.remove(url=url)
                if value is not None:
                    gauge.set(value, url=url)

    def _readings(self) -> tuple[float | None, ...] | None:
        began, head = self._clock.reader_time(), self._log.head()
        if head is None:
            return None
        seen = see_publisher(self._log.storage, head)
        beat = None if seen is None else seen[1]
        self._clock.observe("log", [head.committed], began=began)
        self._clock.observe("heartbeats", [] if beat is None else [beat], began=began)
        now = self._clock.now()
        beat_age = None if beat is None else max(0.0, now - beat)
        return head.version, max(0.0, now - head.committed), head.pending_rows, beat_age
