"""Copies of the objects of a stream, checked by their records: :class:`ObjectCopier`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from delta_tracker.errors import CorruptPartError
from delta_tracker.stream.format.digests import PieceHasher
from delta_tracker.stream.format.manifest import Part, Stored
from delta_tracker.stream.format.object_reader import check_size, read_object
from delta_tracker.stream.storage.storage import Storage

ReadRange: TypeAlias = "Callable[[int, int], NDArray[np.uint8] | None]"
_PIECE_BYTES = 8 << 20


class ObjectCopier:
    """Copier of the objects that entries name. Those above ``memory_bytes`` are copied in pieces of 8 MiB."""

    def __init__(self, source: Storage, destination: Storage, memory_bytes: int) -> None:
        self._source = source
        self._destination = destination
        self._memory_bytes = memory_bytes

    def copy(self, stored: Part | Stored) -> None:
        """Copy an object unless the destination has it.

        It becomes visible only if its bytes match its record. A corrupt object is read again past the caches of the
        source before CorruptPartError is raised.
        """
        if self._is_there(stored):
            return
        try:
            self._copy(self._source, stored)
        except CorruptPartError:
            if self._source is self._source.uncached:
                raise
            self._copy(self._source.uncached, stored)

    def _is_there(self, stored: Part | Stored) -> bool:
        """Return True if the destination has an object with these bytes, from an interrupted copy or another entry."""
        if self._destination.size(stored.name) != stored.num_bytes:
            return False
        try:
            for _ in self._checked(self._destination, stored):
                pass
        except CorruptPartError:
            return False
        return True

    def _copy(self, source: Storage, stored: Part | Stored) -> None:
        pieces = self._checked(source, stored)
        if stored.num_bytes <= self._memory_bytes:
            self._destination.put(stored.name, (piece.data for piece in pieces))
            return

        def buffers(reader: ThreadPoolExecutor) -> Iterator[memoryview]:
            pending = reader.submit(next, pieces, None)
            while (piece := pending.result()) is not None:
                pending = reader.submit(next, pieces, None)
                yield piece.data

        # obstore requests the buffers in a thread of its runtime, which must not call obstore.
        with ThreadPoolExecutor(1) as reader:
            self._destination.put(stored.name, buffers(reader))

    def _checked(self, storage: Storage, stored: Part | Stored) -> Iterator[NDArray[np.uint8]]:
        """Yield the bytes of an object, in order. The last piece is yielded only if all bytes match the record."""
        if stored.num_bytes <= self._memory_bytes:
            yield read_object(storage, stored)
            return
        check_size(stored, storage.size(stored.name))
        yield from checked_pieces(partial(storage.read_range, stored.name), stored)


def checked_pieces(read: ReadRange, stored: Part | Stored) -> Iterator[NDArray[np.uint8]]:
    """Yield an object in pieces, the last only if all match the record. ``read`` returns None if it was deleted."""
    # In format 2, the hash covers the digests of the pieces of the body; in format 1, it covers the whole object.
    whole, body = xxhash.xxh3_128(), PieceHasher()
    digests = bytearray()
    for begin in range(0, stored.num_bytes, _PIECE_BYTES):
        end = min(begin + _PIECE_BYTES, stored.num_bytes)
        piece = read(begin, end)
        if piece is None:
            raise CorruptPartError(stored.name, "it does not exist")
        num_body = max(0, min(len(piece), stored.body - begin))
        body.update(piece[:num_body].data)
        whole.update(piece[num_body:].data)
        digests += piece[num_body:].data if stored.body else b""
        if end == stored.num_bytes:
            is_body = not stored.body or body.digests() == bytes(digests)
            if whole.hexdigest() != stored.xxh3 or not is_body:
                raise CorruptPartError(stored.name, "its bytes do not match its record")
        yield piece
