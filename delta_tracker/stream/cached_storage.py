"""Store of a stream whose parts are read through the cache of a host."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias
from weakref import finalize

import numpy as np

from delta_tracker.errors import InvalidArgumentError, MalformedError, StorageError
from delta_tracker.stream.format.manifest import Part
from delta_tracker.stream.interruption import check
from delta_tracker.stream.storage.local import CHUNK_BYTES
from delta_tracker.stream.storage.storage import Storage, Transfer

if TYPE_CHECKING:
    from numpy.typing import NDArray

Open: TypeAlias = Callable[[Storage, Part], int | None]
"""Function that returns a descriptor of a verified file with the bytes of a part; None to read past the cache."""


class CachedStorage(Storage):
    """Store that reads the parts of one version from files of a host cache, and everything else from the origin.

    Each part is opened with ``open_part`` at its first read, and stays open until this object is garbage-collected.
    """

    def __init__(self, origin: Storage, open_part: Open, parts: Iterable[Part]) -> None:
        vars(self).update(vars(origin))  # everything but reads of parts is as in the origin
        self._origin = origin
        self._open_part = open_part
        self._parts = {part.name: part for part in parts}
        self._opened: dict[str, int | None] = {}
        finalize(self, _close, self._opened)

    def read(
        self,
        name: str,
        *,
        max_bytes: int,
        out: NDArray[np.uint8] | None = None,
        transfer: Transfer | None = None,
    ) -> NDArray[np.uint8] | None:
        """Return the bytes of an object as :meth:`Storage.read` does."""
        descriptor = self._descriptor(name)
        if descriptor is None:
            return self._origin.read(name, max_bytes=max_bytes, out=out, transfer=transfer)
        num_bytes = self._parts[name].num_bytes
        if num_bytes > max_bytes:
            raise MalformedError(name, f"it has {num_bytes} bytes, more than {max_bytes}")
        if out is not None and len(out) < max_bytes:
            raise InvalidArgumentError("out", len(out), f"Pass an array of {max_bytes} bytes")
        memory = np.empty(num_bytes, dtype=np.uint8) if out is None else out[:num_bytes]
        with self._translated_file(name):
            return read_into(descriptor, memory, 0)

    def read_range(self, name: str, begin: int, end: int) -> NDArray[np.uint8] | None:
        """Return a range of an object as :meth:`Storage.read_range` does."""
        descriptor = self._descriptor(name)
        if descriptor is None or not 0 <= begin <= end <= self._parts[name].num_bytes:
            return self._origin.read_range(name, begin, end)
        with self._translated_file(name):
            return read_into(descriptor, np.empty(end - begin, dtype=np.uint8), begin)

    def size(self, name: str) -> int | None:
        """Return the size of an object as :meth:`Storage.size` does."""
        return self._origin.size(name) if self._descriptor(name) is None else self._parts[name].num_bytes

    def _descriptor(self, name: str) -> int | None:
        if name not in self._parts:
            return None
        if name not in self._opened:
            self._opened[name] = self._open_part(self._origin, self._parts[name])
        return self._opened[name]

    @contextmanager
    def _translated_file(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = f"{name} cannot be read from the host cache: {type(error).__name__}: {error}"
            raise StorageError(self.url, reason) from error


def read_into(descriptor: int, memory: NDArray[np.uint8], begin: int) -> NDArray[np.uint8]:
    """Return ``memory``, filled with the bytes of a file from ``begin`` on. Raises OSError if the file ends before."""
    view, filled = memory.data, 0
    while filled < len(memory):
        check()
        count = os.preadv(descriptor, [view[filled : filled + CHUNK_BYTES]], begin + filled)
        if count == 0:
            raise OSError(f"the file ended after {begin + filled} bytes")
        filled += count
    return memory


def _close(opened: dict[str, int | None]) -> None:
    for descriptor in opened.values():
        if descriptor is not None:
            os.close(descriptor)
