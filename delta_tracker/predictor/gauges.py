"""Metrics of a predictor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from delta_tracker.errors import CorruptPartError, StorageError
from delta_tracker.monitor.recorder import Recorder
from delta_tracker.predictor.status import Status
from delta_tracker.stream.format.manifest import Manifest


class HasStatus(Protocol):
    """Protocol of objects with a status, such as a predictor."""

    def status(self) -> Status:
        """Return the current status."""


class PredictorGauges:
    """Metrics of one predictor: versions, rows, faults and lag.

    Args:
        recorder: recorder of the predictor.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._num_requests: dict[str, int] = {}  # requests by operation that the counters have
        self._num_cached: dict[str, int] = {}  # the same for the host cache

    def begin(self, faults: Iterable[type[Exception]]) -> None:
        """Initialize the fault counters to 0, and report the lag at each collection of metrics.

        Args:
            faults: types of errors that may cause a resync.
        """
        self._recorder.refused_parts.cell(reason="corrupt")
        self._recorder.follow_errors.cell(reason=StorageError.__name__)
        for fault in (*faults, StorageError):
            self._recorder.resyncs.cell(reason=fault.__name__)
        for counter in (self._recorder.past_cache_reads, self._recorder.merged_catch_ups, self._recorder.failovers):
            counter.cell()
        self._recorder.watch(self._show)

    def applied(self, manifest: Manifest) -> None:
        """Count an applied version and its rows."""
        self._recorder.applied_versions.cell(kind=manifest.kind).add(1)
        for fqn, num_rows in manifest.rows_by_table.items():
            self._recorder.applied_rows.cell(table=fqn).add(num_rows)
        self._recorder.applied_version.set(manifest.version)

    def admitted(self, fqn: str, num_ids: int) -> None:
        """Count raw ids of a table that were mapped to rows."""
        self._recorder.admitted_ids.cell(table=fqn).add(num_ids)

    def evicted(self, fqn: str, num_ids: int) -> None:
        """Count raw ids of a table that were removed from their rows."""
        self._recorder.evicted_ids.cell(table=fqn).add(num_ids)

    def resynced(self, fault: Exception) -> None:
        """Count a resync and the fault that caused it."""
        self._recorder.resyncs.cell(reason=type(fault).__name__).add(1)
        if isinstance(fault, CorruptPartError):
            self._recorder.refused_parts.cell(reason="corrupt").add(1)

    def failed_to_follow(self, error: Exception) -> None:
        """Count an error after which ``follow()`` retries."""
        self._recorder.follow_errors.cell(reason=type(error).__name__).add(1)

    def caught_up(self) -> None:
        """Count a merged version or a snapshot that was applied to catch up."""
        self._recorder.merged_catch_ups.cell().add(1)

    def read_past_cache(self, num_objects: int) -> None:
        """Count objects that were read past an HTTP cache after a fault."""
        self._recorder.past_cache_reads.cell().add(num_objects)

    def failed_over(self) -> None:
        """Count a change to another source."""
        self._recorder.failovers.cell().add(1)

    def _show(self, predictor: HasStatus) -> None:
        """Set the gauges of the lag, the polling interval and the requests. Runs in the collector's thread."""
        status = predictor.status()
        for operation, num_requests in status.requests.items():
            before = self._num_requests.get(operation, 0)
            if num_requests > before:
                self._recorder.store_requests.cell(operation=operation).add(num_requests - before)
                self._num_requests[operation] = num_requests
        for result, count in status.cache.items():
            before = self._num_cached.get(result, 0)
            counter = {
                "hits": self._recorder.cache_hits,
                "misses": self._recorder.cache_misses,
                "bypasses": self._recorder.cache_bypasses,
            }[result]
            counter.cell().add(count - before)
            self._num_cached[result] = count
        if status.poll_seconds is None:
            self._recorder.poll_seconds.remove()
        else:
            self._recorder.poll_seconds.set(status.poll_seconds)
        self._show_lag(status)

    def _show_lag(self, status: Status) -> None:
        """Set the gauges of the lag; remove them if the store cannot be read."""
        if status.lag_versions is None or status.lag_seconds is None:  # the store cannot be read
            self._recorder.predictor_lag_versions.remove()
            self._recorder.predictor_lag_seconds.remove()
            return
        self._recorder.predictor_lag_versions.set(status.lag_versions)
        self._recorder.predictor_lag_seconds.set(status.lag_seconds)
