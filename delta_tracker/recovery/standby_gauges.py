"""Metrics of a standby."""

from __future__ import annotations

from delta_tracker import errors
from delta_tracker.monitor.recorder import Recorder
from delta_tracker.stream.format.manifest import Manifest

_FAILURES = (
    errors.CorruptPartError,
    errors.FencedError,
    errors.InvalidArgumentError,
    errors.MalformedError,
    errors.MissingVersionError,
    errors.ModelMismatchError,
    errors.NotRecoverableError,
    errors.RankLostError,
    errors.ReservedConsumerError,
    errors.RestoreFailedError,
    errors.RestoreMismatchError,
    errors.StorageError,
    errors.StreamReplacedError,
    errors.UnsupportedModelError,
)
_OTHER = "other"  # reason of an error of another class


class StandbyGauges:
    """Metrics of one standby. Rank 0 records the version, the lag and the takeovers of all ranks."""

    def __init__(self, recorder: Recorder, *, is_first: bool) -> None:
        self._recorder = recorder
        for reason in (*(failure.__name__ for failure in _FAILURES), _OTHER):  # alerts then see the first one
            recorder.takeover_failures.cell(reason=reason)
        if is_first:
            recorder.takeovers.cell()

    def saw(self, version: int | None, head: Manifest) -> None:
        """Record the version and the lag behind the newest entry."""
        if version is not None:
            self._recorder.standby_version.set(version)
        self._recorder.standby_lag_versions.set(head.version - (-1 if version is None else version))

    def took_over(self, seconds: float) -> None:
        """Count a takeover, and remove the gauges."""
        for gauge in (self._recorder.standby_version, self._recorder.standby_lag_versions):
            gauge.remove()
        self._recorder.takeovers.cell().add(1)
        self._recorder.takeover_seconds.cell().add(seconds)

    def failed(self, error: Exception) -> None:
        """Count a takeover that failed after the claim."""
        reason = next((failure.__name__ for failure in _FAILURES if isinstance(error, failure)), _OTHER)
        self._recorder.takeover_failures.cell(reason=reason).add(1)

    def close(self) -> None:
        """Remove the gauges."""
        self._recorder.close()
