"""View of a store at an http URL that reads doubted objects past the caches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_tracker.stream.storage.storage import Storage, StoredObject, Transfer
from delta_tracker.stream.storage.store import Span, Store

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MAX_KEPT_BYTES = 64 << 20


class DoubtedStore(Store):
    """Read-only view of a store at an http URL: objects whose copy in a cache may be wrong are read past the caches.

    Bytes that were read past the caches are kept, up to 64 MiB, so that a later read sends no further request.
    """

    is_read_only = True
    lists_from = False

    def __init__(self, storage: Storage) -> None:
        self.url = storage.url
        self.is_remote = storage.is_remote
        self._cached = storage
        self._names: set[str] = set()
        self._num_requests = 0  # past the caches
        self._num_kept_bytes = 0
        self._kept: dict[str, tuple[bytes, float | None] | None] = {}

    def view(self) -> Storage:
        """Return the storage that reads through this object."""
        return Storage.over(self, self._cached)

    def take_count(self) -> int:
        """Return the number of reads past the caches since the last call."""
        num_requests, self._num_requests = self._num_requests, 0
        return num_requests

    def doubt(self, names: set[str]) -> bool:
        """Read objects past the caches. Return False if all of them are already."""
        is_new = not names <= self._names
        self._names |= names
        return is_new

    def read(self, span: Span, transfer: Transfer | None) -> NDArray[np.uint8] | None:
        """See :meth:`Store.read`."""
        name = span.name
        if name in self._kept and ((kept := self._kept[name]) is None or span.end is None or span.end <= len(kept[0])):
            if kept is None:
                return None
            if transfer is not None:
                transfer.modified = kept[1]
            return span.of(kept[0])
        response = Transfer() if transfer is None else transfer
        data = self._store_of(name).read_span(span, response)
        if name in self._names and span.end is None:
            if data is None:
                self._kept[name] = None
            elif self._num_kept_bytes + len(data) <= _MAX_KEPT_BYTES:
                self._num_kept_bytes += len(data)
                self._kept[name] = data.tobytes(), response.modified
        return data

    def stat(self, name: str) -> StoredObject | None:
        """See :meth:`Store.stat`."""
        kept = self._kept.get(name)
        return self._store_of(name).stat(name) if kept is None else StoredObject(name, len(kept[0]), kept[1] or 0.0)

    def _store_of(self, name: str) -> Storage:
        if name not in self._names:
            return self._cached
        self._num_requests += 1
        return self._cached.uncached
