"""Handling of faults that an HTTP cache may have caused, and that may disappear once the cache is updated."""

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from delta_tracker.errors import CorruptPartError, MalformedError, MissingVersionError, StreamError, StreamReplacedError
from delta_tracker.stream.format.manifest import entry_name
from delta_tracker.stream.pointer import POINTER_NAME
from delta_tracker.stream.reading.position import Position
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.stream.storage.store import ByteRange, Store, StoredObject, Transfer

_MAX_KEPT_BYTES = 64 << 20
_AGAIN_SECONDS = 300.0  # after which objects are reread if the fault lasts: a cache may have a damaged copy now


class FaultDelay:
    """Timer that delays a reader's reaction to a fault at an http url, because a stale cache may be the cause.

    The delay starts with the first fault at a stream position. Later faults at the same position do not restart it.
    During the delay, each affected object is read again every five minutes, and this read bypasses the caches. The
    delay is over after ``seconds``, which must be longer than the time for which a cache stores a 404 response.

    Attributes:
        has_read_pointer: True if a read of the pointer has bypassed the caches during the delay.
    """

    def __init__(self, seconds: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._position: Position | None = None
        self._began = self._again_at = 0.0
        self._store: RereadStore | None = None  # None outside a delay
        self.has_read_pointer = False

    @property
    def is_over(self) -> bool:
        """True if the fault has lasted for at least ``seconds``, too long for a cache to be the cause."""
        return self._store is not None and self._clock() - self._began >= self.seconds

    def clear(self) -> None:
        """Cancel the delay. Call this method after a version was applied."""
        self._store = None
        self.has_read_pointer = False

    def reread(
        self, faults: Sequence[StreamError], position: Position | None, storage: Storage, count: Callable[[int], object]
    ) -> Storage | None:
        """Start or continue the delay. Return a view of ``storage`` from which to read the affected objects again.

        Returns None if all affected objects have already been read again. ``faults`` are the fault of a decision and
        the faults that the decision ignored. ``count`` is called with 1 for each read that bypasses the caches.
        """
        now = self._clock()
        is_new = self._store is None or self._position != position
        if is_new:
            self.clear()
            self._position, self._began = position, now
        if is_new or now >= self._again_at:  # the delay does not begin again, because calls may be far apart
            self._store, self._again_at = RereadStore(storage, count), now + _AGAIN_SECONDS
        assert self._store is not None, "set above"
        names = set[str]().union(*(_affected_names(each, position) for each in faults))
        return self._store.view() if self._store.bypass_caches(names) else None

    def unread(self, faults: Iterable[StreamError], position: Position | None) -> StreamError | None:
        """Return the first of ``faults`` whose damaged object was not reread during a delay at ``position``."""
        store = self._store if self._position == position else None
        damaged = (each for each in faults if isinstance(each, CorruptPartError | MalformedError))
        return next((each for each in damaged if store is not None and not store.reads(each.path)), None)


def _affected_names(fault: StreamError, position: Position | None) -> set[str]:
    if isinstance(fault, CorruptPartError | MalformedError):
        return {fault.path}
    names = {POINTER_NAME}
    if isinstance(fault, MissingVersionError):
        names.add(entry_name(fault.version))
    if isinstance(fault, StreamReplacedError) and position is not None:
        names |= {entry_name(position.link.version), entry_name(position.link.version + 1)}
    return names


class RereadStore(Store):
    """Read-only view of a store at an http url, in which reads of some objects bypass the caches.

    :meth:`bypass_caches` selects these objects. Their bytes are kept, up to 64 MiB, to avoid further requests.
    """

    is_read_only = True
    lists_from = False

    def __init__(self, storage: Storage, counts: Callable[[int], object]) -> None:
        self.url = storage.url
        self.is_remote = storage.is_remote
        self._cached = storage
        self._names: set[str] = set()
        self._counts = counts
        self._num_kept_bytes = 0
        self._kept: dict[str, tuple[bytes, float | None] | None] = {}

    def view(self) -> Storage:
        """Return a :class:`Storage` that reads from this store."""
        return Storage.over(self, self._cached)

    def reads(self, name: str) -> bool:
        """Return True if reads of the object ``name`` bypass the caches."""
        return name in self._names

    def bypass_caches(self, names: set[str]) -> bool:
        """Make reads of the objects ``names`` bypass the caches. Return False if all of these reads already do."""
        is_new = not names <= self._names
        self._names |= names
        return is_new

    def read(self, span: ByteRange, transfer: Transfer) -> NDArray[np.uint8] | None:
        """See :meth:`Store.read`."""
        name = span.name
        if name in self._kept and ((kept := self._kept[name]) is None or span.end is None or span.end <= len(kept[0])):
            if kept is None:
                return None
            transfer.modified = kept[1]
            return span.of(kept[0])
        data = self._store_of(name).read_span(span, transfer)
        if name in self._names and span.end is None:
            if data is None:
                self._kept[name] = None
            elif self._num_kept_bytes + len(data) <= _MAX_KEPT_BYTES:
                self._num_kept_bytes += len(data)
                self._kept[name] = data.tobytes(), transfer.modified
        return data

    def stat(self, name: str) -> StoredObject | None:
        """See :meth:`Store.stat`."""
        kept = self._kept.get(name)
        return self._store_of(name).stat(name) if kept is None else StoredObject(name, len(kept[0]), kept[1] or 0.0)

    def _store_of(self, name: str) -> Storage:
        if name not in self._names:
            return self._cached
        self._counts(1)
        return self._cached.uncached
