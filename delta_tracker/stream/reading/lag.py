"""Number and age of the committed versions that a reader has not applied: :class:`Lag`."""

from __future__ import annotations

from delta_tracker.errors import StreamReplacedError
from delta_tracker.stream.entry_names import entry_name
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.reading.runtime import REAL, Runtime

_LEAST_SECONDS = 1e-6  # a lag of 0 means that all versions are applied


class Lag:
    """Measurement of how far a reader lags behind the newest version.

    The age is the sum of two times, each by one clock: from the oldest version not applied to the newest one, by the
    store's modification times, and since this reader first saw the newest one, by its monotonic clock. It is too low by
    the time until the reader saw it, and by up to one second if the store truncates modification times.

    Attributes:
        rested: version after which the last look found no entry, and the monotonic time at which that began; None if it
            found one since.
    """

    def __init__(self, runtime: Runtime = REAL) -> None:
        self._monotonic = runtime.monotonic
        self.rested: tuple[int, float] | None = None
        self._newest = -1, 0.0  # newest version seen, and the monotonic time at which it was seen first

    def looked(self, version: int, *, is_there: bool, began: float) -> None:
        """Record whether the entry of the next version existed at the monotonic time ``began``."""
        self.rested = None if is_there else (version - 1, began)
        if is_there and version > self._newest[0]:
            self._newest = version, began

    def of(self, log: StreamLog, held: int | None) -> tuple[int, float]:
        """Return the number of versions above ``held``, and the age of the oldest one in seconds.

        The age is above 0 if the number is, and 0 if the number is. Reads no entries, and lists the log only before the
        first applied version, or if the next entry is missing although there are newer ones. Raises a StreamError if
        the store cannot be read, or if its log ends before ``held``.
        """
        began = self._monotonic()
        if held is None:
            return self._listed(log, began, -1)
        newest = log.newest_version(held)
        log.check_pointer()
        first = log.storage.stat(entry_name(min(held + 1, newest)))
        last = first if newest <= held + 1 else log.storage.stat(entry_name(newest))
        if first is None or last is None:
            return self._listed(log, began, held)
        return self._lag(newest - held, last.modified - first.modified, newest, began)

    def _listed(self, log: StreamLog, began: float, held: int) -> tuple[int, float]:
        """Return the lag by a listing."""
        listed = log.listed(after=held - 1)
        log.check_pointer()
        if not listed and held >= 0:
            raise StreamReplacedError(log.url, held)
        waiting = {version: modified for version, modified in listed.items() if version > held}
        seconds = max(waiting.values()) - waiting[min(waiting)] if waiting else 0.0
        return self._lag(len(waiting), seconds, max(listed, default=-1), began)

    def _lag(self, num_versions: int, seconds: float, newest: int, began: float) -> tuple[int, float]:
        """Return the lag. ``seconds`` are those up to the newest version, which existed at the time ``began``."""
        if newest != self._newest[0]:  # a lower one is of another log
            self._newest = newest, began
        age = max(0.0, seconds) + self._monotonic() - self._newest[1]
        return num_versions, max(age, _LEAST_SECONDS) if num_versions else 0.0
