"""Heartbeats that report the version and the lag of a predictor: :class:`Heartbeats`."""

from delta_tracker.errors import DeltaTrackerError, InvalidArgumentError, StreamError
from delta_tracker.predictor.reader import Reader
from delta_tracker.predictor.status import error_text
from delta_tracker.stream.heartbeat import BEAT_SECONDS, HeartbeatWriter
from delta_tracker.stream.storage.storage import Location, open_storage


class Heartbeats:
    """Writer of a predictor's heartbeats to ``given``, or if it is None, to the first writable store of ``reader``."""

    def __init__(self, reader: Reader, name: str, given: Location | None) -> None:
        stores = [each.storage for each in reader.sources.all] if given is None else [open_storage(given)]
        storage = next((each for each in stores if not each.is_read_only), None)
        if storage is None:
            text = "Pass the url of a bucket or directory: heartbeats cannot be written over http"
            raise InvalidArgumentError("heartbeats", given, text)
        self._reader = reader
        self._writer = HeartbeatWriter(storage, name)
        self._source = reader.source if given is None else None  # None if heartbeats do not move

    def write(self, error: Exception | None, poll_seconds: float | None, *, seconds: float | None = None) -> None:
        """Write a heartbeat if one is due or ``seconds`` is given.

        ``seconds`` is the time until the next heartbeat; 0 means that there is none. See :func:`lag` for
        ``poll_seconds``.
        """
        reader, source = self._reader, self._reader.source
        if self._source not in (None, source):
            self._source = source
            if not source.storage.is_read_only:
                self._writer.move_to(source.storage)
        if seconds is None and not self._writer.is_due():
            return
        behind = None if seconds == 0 else lag(reader, poll_seconds if error is None else None)
        lag_versions, lag_seconds = behind or (None, None)
        position, canary = reader.position, source.canary
        self._writer.write(
            stream=None if position is None else position.stream,
            version=None if position is None else position.version,
            lag_versions=lag_versions,
            lag_seconds=lag_seconds,
            resyncs=reader.resyncs.count,
            error=error_text(error),
            canary_versions=None if canary is None else canary.versions,
            canary_seconds=None if canary is None else canary.seconds,
            pin=0 if reader.orders.followed is None else reader.orders.followed.counter,
            why=reader.why,
            next_step=error.remedy if isinstance(error, DeltaTrackerError) else "",
            differences="; ".join(reader.writer.destination.differences),
            seconds=BEAT_SECONDS if seconds is None else seconds,
        )


def lag(reader: Reader, poll_seconds: float | None = None) -> tuple[int, float] | None:
    """Return the number of committed versions that are not applied, and the age in seconds of the oldest such version.

    Returns None if the store cannot be read, or if its log ends before the last applied version. ``poll_seconds`` is
    the interval of a polling thread: if one of its last two polls found no version, this function sends no request.
    """
    version, source = reader.version, reader.source
    rested = source.lag.rested
    if poll_seconds is not None and rested is not None:
        is_recent = reader.runtime.monotonic() - rested[1] <= 2 * poll_seconds + 1.0
        if rested[0] == version and is_recent:
            return 0, 0.0
    try:
        return source.lag.of(source.log, version)
    except StreamError:
        return None
