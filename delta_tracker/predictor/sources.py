"""Stores from which a predictor may read one stream: its own and mirrors of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from delta_tracker.errors import InvalidArgumentError, MalformedError, StorageError
from delta_tracker.stream.cursor import Place
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Location, Storage, open_storage

_logger = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 30.0
_MAX_PAUSE_SECONDS = 300.0


@dataclass(slots=True, eq=False)
class _Source:
    """A store, and when it may be asked again.

    Attributes:
        storage: the store.
        pause: time in seconds for which the store is not asked after its next failure.
        retry_at: monotonic time from which it may be asked.
    """

    storage: Storage
    pause: float
    retry_at: float = float("-inf")


class Sources:
    """Stores of one stream, of which one is current.

    A source that failed is not asked again for 30 s; each further failure doubles this time, up to 300 s. A source
    becomes current only if the current one fails, so a predictor does not return to the first one by itself.

    Args:
        url: url or store, or a sequence of them, in the order of preference.
        clock: monotonic clock, in seconds.

    Attributes:
        current: the store that the predictor reads.

    Raises:
        InvalidArgumentError: if there is none, or one is given twice.
    """

    def __init__(self, url: Location | Sequence[Location], *, clock: Callable[[], float] = time.monotonic) -> None:
        given = list(url) if isinstance(url, Sequence) and not isinstance(url, str) else [url]
        if not given:
            raise InvalidArgumentError("url", given, "Pass at least one url")
        stores = [open_storage(each) for each in given]
        names = [id(each) if each.url == "memory://" else each.url.rstrip("/") for each in stores]
        if len(set(names)) < len(names):
            raise InvalidArgumentError("url", [each.url for each in stores], "Pass each store once")
        self._all = [_Source(each, _FIRST_PAUSE_SECONDS) for each in stores]
        self._clock = clock
        self._current = self._all[0]
        self._since = clock()  # time at which the current source became it

    @property
    def current(self) -> Storage:
        """Store that the predictor reads."""
        return self._current.storage

    def fail_over(self, place: Place | None) -> Storage | None:
        """Make another source current after the current one has failed, and return it.

        A source qualifies if its entry at the predictor's version has the same stream and hash, so that no version is
        applied twice or skipped. A mirror that has not reached this version yet does not qualify.

        Args:
            place: stream position of the predictor; None before the first applied version. Then a source qualifies if
                it has a snapshot.

        Returns:
            The new current source; None if no other source qualifies. Errors of the sources are logged.
        """
        if len(self._all) == 1:
            return None
        failed, now = self._current, self._clock()
        if now - self._since > _MAX_PAUSE_SECONDS:
            failed.pause = _FIRST_PAUSE_SECONDS  # it worked for a while
        self._postpone(failed)
        for source in self._all:
            if source is failed or now < source.retry_at:
                continue
            try:
                qualifies = _qualifies(StreamLog(source.storage), place)
            except (MalformedError, StorageError) as error:
                self._postpone(source)
                _logger.info("another source cannot be used: url=%s error=%s", source.storage.url, error)
                continue
            if qualifies:
                self._current, self._since = source, now
                return source.storage
        return None

    def writable(self) -> Storage | None:
        """Return the first store that can be written to; None if there is none."""
        return next((source.storage for source in self._all if not source.storage.is_read_only), None)

    def _postpone(self, source: _Source) -> None:
        """Record that a source failed, once for each pause."""
        now = self._clock()
        if now >= source.retry_at:
            source.retry_at = now + source.pause
            source.pause = min(2 * source.pause, _MAX_PAUSE_SECONDS)


def _qualifies(log: StreamLog, place: Place | None) -> bool:
    if place is None:
        return log.newest_snapshot() is not None
    entry = log.read(place.link.version)
    return entry is not None and (entry.stream, entry.link) == (place.stream, place.link)
