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
from delta_tracker.stream.doubted_storage import DoubtedStore
from delta_tracker.stream.log import entry_name
from delta_tracker.stream.pointer import POINTER_NAME
from delta_tracker.stream.reading.position import Position
from delta_tracker.stream.storage.storage import Storage


class Settling:
    """Doubt of a reader over http that does not believe a fault before it has lasted.

    A doubt begins with the first fault at a stream position, and ends when a version is applied. All faults at one
    position belong to the same doubt. During a doubt, each object is read once past the caches. A fault is believed
    after ``seconds``, which must exceed the time for which a cache keeps a 404.
    """

    def __init__(self, seconds: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._position: Position | None = None
        self._began = 0.0
        self._doubted: DoubtedStore | None = None  # None without a doubt
        self._is_pointer_read = False
        self._num_reads = 0  # past the caches, until take_count()

    @property
    def is_over(self) -> bool:
        """True if the doubt has lasted long enough: the fault is not that of a cache."""
        return self._doubted is not None and self._clock() - self._began >= self.seconds

    def take_count(self) -> int:
        """Return the number of reads past the caches since the last call."""
        self._count()
        num_reads, self._num_reads = self._num_reads, 0
        return num_reads

    def clear(self) -> None:
        """End the doubt, because a version was applied."""
        self._count()
        self._doubted = None
        self._is_pointer_read = False

    def _count(self) -> None:
        self._num_reads += 0 if self._doubted is None else self._doubted.take_count()

    def doubt(self, fault: StreamError, position: Position | None, storage: Storage) -> Storage | None:
        """Begin or continue a doubt. Return the store to read from again; None if all was read past the caches."""
        if self._doubted is None or self._position != position:
            self.clear()
            self._position, self._began, self._doubted = position, self._clock(), DoubtedStore(storage)
        return self._doubted.view() if self._doubted.doubt(_doubtful(fault, position)) else None

    def may_read_pointer(self) -> bool:
        """Return True once per doubt: the pointer may be read past the caches."""
        is_first, self._is_pointer_read = not self._is_pointer_read, True
        return is_first


def _doubtful(fault: StreamError, position: Position | None) -> set[str]:
    """Return the names of the objects whose cached copies may have caused a fault."""
    if isinstance(fault, CorruptPartError | MalformedError):
        return {fault.path}
    names = {POINTER_NAME}
    if isinstance(fault, MissingVersionError):
        names.add(entry_name(fault.version))
    if isinstance(fault, StreamReplacedError) and position is not None:
        names |= {entry_name(position.link.version), entry_name(position.link.version + 1)}
    return names
