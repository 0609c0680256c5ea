"""View of a store at an http URL that reads doubted objects past the caches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from delta_tracker.stream.storage.storage import Storage, Transfer

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAX_KEPT_BYTES = 64 << 20


class DoubtedStorage(Storage):
    """Read-only view of a store at an http URL: objects whose copy in a cache may be wrong are read past the caches.

    Bytes that were read past the caches are kept, up to 64 MiB, so that a later read sends no further request.
    """

    def __init__(self, storage: Storage) -> None:
        # The methods that are not overridden are those of the store.
        vars(self).update(vars(storage), _uncached=storage.uncached)
        self._cached = storage
        self._names: set[str] = set()
        self._num_requests = 0  # past the caches
        self._num_kept_bytes = 0
        self._kept: dict[str, tuple[NDArray[np.uint8], float | None] | None] = {}

    def take_count(self) -> int:
        """Return the number of reads past the caches since the last call."""
        num_requests, self._num_requests = self._num_requests, 0
        return num_requests

    def doubt(self, names: set[str]) -> bool:
        """Read objects past the caches. Return False if all of them are already."""
        is_new = not names <= self._names
        self._names |= names
        return is_new

    def read(
        self,
        name: str,
        *,
        max_bytes: int,
        out: NDArray[np.uint8] | None = None,
        transfer: Transfer | None = None,
    ) -> NDArray[np.uint8] | None:
        """Return the bytes of an object, see :meth:`Storage.read`."""
        if name not in self._names:
            return self._cached.read(name, max_bytes=max_bytes, out=out, transfer=transfer)
        if name not in self._kept:
            response = Transfer() if transfer is None else transfer
            self._num_requests += 1
            data = self.uncached.read(name, max_bytes=max_bytes, out=out, transfer=response)
            if data is None:
                self._kept[name] = None
            elif self._num_kept_bytes + len(data) <= _MAX_KEPT_BYTES:
                self._num_kept_bytes += len(data)
                self._kept[name] = data.copy(), response.modified
            return data
        kept = self._kept[name]
        if kept is None:
            return None
        data, modified = kept
        if transfer is not None:
            transfer.modified = modified
        if out is None:
            return data.copy()
        out[: len(data)] = data
        return out[: len(data)]

    def read_range(self, name: str, begin: int, end: int) -> NDArray[np.uint8] | None:
        """Return some bytes of an object, see :meth:`Storage.read_range`."""
        kept = self._kept.get(name)
        if kept is not None and end <= len(kept[0]):
            return kept[0][begin:end].copy()
        return self._store_of(name).read_range(name, begin, end)

    def size(self, name: str) -> int | None:
        """Return the size of an object in bytes, None if it does not exist."""
        kept = self._kept.get(name)
        return self._store_of(name).size(name) if kept is None else len(kept[0])

    def _store_of(self, name: str) -> Storage:
        if name not in self._names:
            return self._cached
        self._num_requests += 1
        return self.uncached
