"""Metrics of a predictor, and the age of the rows that it serves."""

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress

from delta_tracker.errors import CorruptPartError, StorageError, StreamError
from delta_tracker.monitor.recorder import Recorder
from delta_tracker.predictor.gate import GateKeeper
from delta_tracker.predictor.status import Status
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.reading.path import last_with_rows
from delta_tracker.stream.reading.position import Position
from delta_tracker.stream.reading.runtime import REAL, Runtime
from delta_tracker.stream.storage.url import redacted_url
from delta_tracker.stream.store_clock import StoreClock

# A store that takes longer to show the lag does not answer.
_PATIENCE_SECONDS = 10.0


class PredictorGauges:
    """Metrics of one predictor.

    The attributes ``num_*`` are the counts that :class:`Status` reports. ``num_rows`` includes rows of interrupted
    versions.
    """

    def __init__(self, recorder: Recorder, runtime: Runtime) -> None:
        self.recorder = recorder
        self._monotonic = runtime.monotonic
        self.apply_timer = recorder.apply_seconds.timer()
        self.age = ServedAge(runtime)
        self.served: Manifest | None = None  # of the last applied snapshot or delta, or of the loaded position if known
        self.num_rows = self.num_bytes = self.num_admitted = self.num_evicted = 0
        self._version: int | None = None  # the newest one that was applied
        self._source = "", ""  # stream and url, as shown
        self._lag: tuple[int, float] | None = None
        self._asked: float | None = None  # monotonic time since which the store is asked for the lag
        self._counted: Counter[str] = Counter()  # operations of stores and results of the host cache in the counters

    def begin(self, url: str, faults: Iterable[type[Exception]], gate: GateKeeper | None = None) -> None:
        """Initialize the counters to 0, including a resync counter for each type in ``faults``. Register the gauges."""
        self.reads("", url)

        def of_served(seconds: Callable[[Manifest], float | None]) -> Callable[[], float | None]:
            return lambda: None if (served := self.served) is None else seconds(served)

        self.recorder.applied_version.set_function(lambda: self._version)
        self.recorder.served_age_seconds.set_function(of_served(self.age.seconds))
        self.recorder.served_event_age_seconds.set_function(of_served(self.age.event_seconds))
        self.recorder.predictor_skew_seconds.set_function(of_served(lambda _: self.age.skew_seconds))
        self.recorder.held_version.set_function(
            lambda: None if gate is None or gate.held is None else gate.held.version
        )
        self.recorder.predictor_lag_versions.set_function(lambda: self._known_lag(0))
        self.recorder.predictor_lag_seconds.set_function(lambda: self._known_lag(1))
        self.recorder.refused_parts.cell(reason="corrupt")
        self.recorder.follow_errors.cell(reason=StorageError.__name__)
        for fault in (*faults, StorageError):
            self.recorder.resyncs.cell(reason=fault.__name__)
        for counter in (self.recorder.past_cache_reads, self.recorder.merged_catch_ups, self.recorder.failovers):
            counter.cell()
        self.recorder.watch(lambda predictor: self._show(predictor.status))

    def reads(self, stream: str, url: str) -> None:
        """Set the stream id and the source url that the metrics report."""
        self._source = stream, url
        self.recorder.predictor_info.remove()
        self.recorder.predictor_info.set(1, stream=stream, url=redacted_url(url))

    def applied(self, manifest: Manifest) -> None:
        """Count an applied version and its rows."""
        self.num_bytes += manifest.num_bytes
        if manifest.kind != "claim":
            self.served = manifest
        self.recorder.applied_versions.cell(kind=manifest.kind).add(1)
        for fqn, num_rows in manifest.rows_by_table.items():
            self.recorder.applied_rows.cell(table=fqn).add(num_rows)
        self._version = manifest.version
        self.age.applied(manifest)
        if manifest.stream != self._source[0]:
            self.reads(manifest.stream, self._source[1])

    def admitted(self, fqn: str, num_ids: int) -> None:
        """Count ``num_ids`` raw ids of a table that were mapped to rows."""
        self.num_admitted += num_ids
        self.recorder.admitted_ids.cell(table=fqn).add(num_ids)

    def evicted(self, fqn: str, num_ids: int) -> None:
        """Count ``num_ids`` raw ids of a table that were removed from their rows."""
        self.num_evicted += num_ids
        self.recorder.evicted_ids.cell(table=fqn).add(num_ids)

    def resynced(self, fault: Exception) -> None:
        """Count a resync that ``fault`` caused, in the counter for the type of the fault."""
        self.recorder.resyncs.cell(reason=type(fault).__name__).add(1)
        if isinstance(fault, CorruptPartError):
            self.recorder.refused_parts.cell(reason="corrupt").add(1)

    def read_loaded(self, log: StreamLog, position: Position | None) -> None:
        """Read the manifest of a loaded position, from which the age of the rows is computed. Ignores StreamError."""
        if position is None:
            return
        with suppress(StreamError):
            self.served = last_with_rows(log, log.read(position.version))
            self.reads(position.stream, self._source[1])

    def failed_over(self, url: str) -> None:
        """Count a failover to the source with the url ``url``."""
        self.recorder.failovers.cell().add(1)
        self.reads(self._source[0], url)

    def _show(self, read_status: Callable[[], Status]) -> None:
        self._asked = self._monotonic()
        status = read_status()
        lag_versions, lag_seconds = status.lag_versions, status.lag_seconds
        self._lag = None if lag_versions is None or lag_seconds is None else (lag_versions, lag_seconds)
        self._asked = None
        self.recorder.model_differences.set(len(status.differences))
        for operation, total in status.counts.requests.items():
            if added := self._added(operation, total):
                self.recorder.store_requests.cell(operation=operation).add(added)
        for result, total in status.counts.cache.items():
            getattr(self.recorder, f"cache_{result}").cell().add(self._added(result, total))
        gauges = self.recorder.poll_seconds, self.recorder.pinned_version
        for gauge, value in zip(gauges, (status.poll_seconds, status.pinned), strict=True):
            if value is None:
                gauge.remove()
            else:
                gauge.set(value)

    def _added(self, name: str, total: int) -> int:
        """Return the increase of the count ``name`` since the last call. ``total`` is the current count."""
        added = max(0, total - self._counted[name])
        self._counted[name] += added
        return added

    def _known_lag(self, index: int) -> float | None:
        """Return the last lag, in versions (0) or seconds (1); None if the store cannot be read or does not answer."""
        asked, lag = self._asked, self._lag
        if lag is None or (asked is not None and self._monotonic() - asked > _PATIENCE_SECONDS):
            return None
        return lag[index]


class ServedAge:
    """Estimate of the age of a served version, based on an estimate of the store's clock.

    :class:`~delta_tracker.stream.store_clock.StoreClock` estimates the clock from modification times and polls: an
    entry that a poll did not find is committed after the poll.

    Attributes:
        empty_poll: last applied version and monotonic start time of the last poll, if this poll found no entry; None if
            it found an entry.
    """

    def __init__(self, runtime: Runtime = REAL) -> None:
        self._clock, self._monotonic = StoreClock(runtime.clock), runtime.monotonic
        self.empty_poll: tuple[int, float] | None = None

    @property
    def skew_seconds(self) -> float:
        """Seconds by which this host's clock is ahead of the store's; 0 unless entries show a difference."""
        return 0.0 - self._clock.offset

    def applied(self, manifest: Manifest) -> None:
        """Update the estimate of the store's clock from the modification time of an applied version."""
        modified, empty_poll, looked_at = manifest.modified, self.empty_poll, None
        if modified is None or manifest.merges is not None:
            return
        if empty_poll is not None and empty_poll[0] == manifest.version - 1:
            looked_at = self._clock.reader_time() - (self._monotonic() - empty_poll[1])
        self._clock.compare(modified, looked_at=looked_at)

    def seconds(self, manifest: Manifest) -> float:
        """Return the seconds since a version was committed; for a merged version, since the trainer read its rows."""
        since = manifest.committed if manifest.merges is None else min(manifest.cut, manifest.committed)
        return max(0.0, self._clock.now() - since)

    def event_seconds(self, manifest: Manifest) -> float | None:
        """Return the seconds since the event time of a version, at least 0; None if it has no event time."""
        event_time = manifest.event_time
        return None if event_time is None else max(0.0, self._clock.now() - event_time)
