"""Doubts of a reader over http: a fault may be that of a cache, and then ends by itself."""

from __future__ import annotations

import time
from collections.abc import Callable

from delta_tracker.errors import (
    CorruptPartError,
    MalformedError,
    MissingVersionError,
    StreamError,
    StreamReplacedError,
)
from delta_tracker.stream.cursor import Place
from delta_tracker.stream.doubted_storage import DoubtedStorage
from delta_tracker.stream.log import entry_name
from delta_tracker.stream.pointer import POINTER_NAME
from delta_tracker.stream.storage.storage import Storage

# Faults that a cache can cause: an old 404, a short or damaged object, or objects of a stream that was replaced.
CACHE_FAULTS = (CorruptPartError, MalformedError, MissingVersionError, StreamReplacedError)


class Settling:
    """Doubt of a reader over http that does not believe a fault before it has lasted.

    A doubt begins with the first fault at a stream position, and ends when a version is applied. All faults at one
    position belong to the same doubt. During a doubt, each object is read once past the caches.

    Args:
        seconds: duration of a doubt, after which the fault is believed. It must exceed the time for which a cache keeps
            a 404.
        clock: returns a monotonic time in seconds.

    Attributes:
        seconds: duration of a doubt.
    """

    def __init__(self, seconds: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._place: Place | None = None
        self._began: float | None = None  # None without a doubt
        self._storage: DoubtedStorage | None = None
        self._is_pointer_read = False

    @property
    def is_over(self) -> bool:
        """True if the doubt has lasted long enough: the fault is not that of a cache."""
        return self._began is not None and self._clock() - self._began >= self.seconds

    def clear(self) -> None:
        """End the doubt, because a version was applied."""
        self._began = self._storage = None
        self._is_pointer_read = False

    def doubt(self, fault: StreamError, place: Place | None, storage: Storage) -> DoubtedStorage | None:
        """Begin or continue a doubt. Return the store to read the version from once more.

        Returns None if all objects that can cause the fault were read past the caches in this doubt.

        Args:
            fault: one of ``CACHE_FAULTS``.
            place: stream position of the reader.
            storage: store of the stream.
        """
        if self._began is None or self._place != place:
            self.clear()
            self._place, self._began = place, self._clock()
        if self._storage is None:
            self._storage = DoubtedStorage(storage, ())
        names = _doubtful(fault, place) - self._storage.doubted
        self._storage.doubt(names)
        return self._storage if names else None

    def may_read_pointer(self) -> bool:
        """Return True once per doubt: the pointer may be read past the caches."""
        is_first, self._is_pointer_read = not self._is_pointer_read, True
        return is_first


def _doubtful(fault: StreamError, place: Place | None) -> set[str]:
    """Return the names of the objects whose copy in a cache may have caused a fault."""
    if isinstance(fault, CorruptPartError | MalformedError):
        return {fault.path}
    names = {POINTER_NAME}
    if isinstance(fault, MissingVersionError):
        names.add(entry_name(fault.version))
    if isinstance(fault, StreamReplacedError) and place is not None:
        names |= {entry_name(place.link.version), entry_name(place.link.version + 1)}
    return names
