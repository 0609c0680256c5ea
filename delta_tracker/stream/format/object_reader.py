"""Readers of a stream's objects, which check the bytes against the objects' records."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import itemgetter
from typing import TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from delta_tracker.errors import CorruptPartError, MalformedError, StorageError
from delta_tracker.stream.format.digests import DIGEST_BYTES, PieceHasher, num_digests, piece_at, piece_range
from delta_tracker.stream.format.manifest import Part, Stored
from delta_tracker.stream.format.table_choice import check_not_left_out
from delta_tracker.stream.interruption import check
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.stream.storage.store import Transfer

# Parts up to this size are held in memory while they are applied. Larger ones are read twice, piece by piece.
MEMORY_BYTES = 256 << 20
_READ_BYTES = 8 << 20  # of an object that is checked while it is copied
PartSource: TypeAlias = "InMemory | Ranged | Tensors"


def source_of(storage: Storage, part: Part | Stored, memory_bytes: int, out: NDArray[np.uint8] | None) -> PartSource:
    """Return a source that reads an object as a whole if it has at most ``memory_bytes``, otherwise in pieces."""
    if part.num_bytes <= memory_bytes:
        return InMemory(storage, part, out)
    return Ranged(storage, part, is_whole=True)


class InMemory:
    """Source that reads an object as a whole, into ``out`` or new memory, and checks it."""

    def __init__(self, storage: Storage, stored: Part | Stored, out: NDArray[np.uint8] | None) -> None:
        self._storage = storage
        self._stored = stored
        self._out = out
        self._transfer = Transfer()
        self._data: NDArray[np.uint8] | None = None

    def read(self, begin: int, end: int) -> NDArray[np.uint8]:
        """Return the bytes ``[begin, end)``. If a download fails, the next call resumes it."""
        if self._data is None:
            self._data = read_object(self._storage, self._stored, out=self._out, transfer=self._transfer)
        return self._data[begin:end]

    def finish(self) -> None:
        """Read and check the object, if this has not been done yet."""
        if self._data is None:
            self.read(0, 0)


class Ranged:
    """Source that reads an object in pieces of 8 MiB, and checks the pieces.

    An object of format 2 contains digests of its pieces, which are read first and compared with the record. An object
    of format 1 has none, so its bytes are unchecked until :meth:`finish` has compared the hash of all pieces. Read
    ranges in ascending order, because only the last piece is kept in memory. With ``is_whole``, :meth:`finish` also
    reads and checks all pieces of an object of format 2. If the store fails, the next call continues.
    """

    def __init__(self, storage: Storage, stored: Part | Stored, *, is_whole: bool = False) -> None:
        self._storage = storage
        self._stored = stored
        self._end = stored.body or stored.num_bytes
        self._is_whole = is_whole or not stored.body
        self._is_begun = False
        self._digests = bytearray()  # of all pieces; in format 1, of those that were read
        self._hash = xxhash.xxh3_128()  # in format 1, of these pieces
        self._num_checked = 0  # pieces from the beginning that were read
        self._held: tuple[int, NDArray[np.uint8]] | None = None  # number and bytes of the piece that was read last

    def read(self, begin: int, end: int) -> NDArray[np.uint8]:
        """Return the bytes ``[begin, end)``."""
        assert 0 <= begin <= end <= self._end, "inside the pieces"
        pieces = []
        while begin < end:
            number, offset = piece_at(begin)
            pieces.append(self._piece(number)[offset : offset + end - begin])
            begin += len(pieces[-1])
        if not pieces:
            return np.empty(0, dtype=np.uint8)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def finish(self) -> None:
        """Complete the check of the object against its record. Call this method again after a StorageError."""
        self._begin()
        while self._is_whole and self._num_checked < num_digests(self._end):
            self._piece(self._num_checked)
        if not self._stored.body:
            _check_hash(self._stored, self._hash.hexdigest())

    def _piece(self, number: int) -> NDArray[np.uint8]:
        if self._held is None or self._held[0] != number:
            self._held = number, self._load(number)
        return self._held[1]

    def _load(self, number: int) -> NDArray[np.uint8]:
        stored = self._stored
        self._begin()
        piece = self._fetch(*piece_range(number, self._end))
        if stored.body or number < self._num_checked:
            _check_piece(stored, piece, number, self._digests)
        else:
            assert number == self._num_checked, "before finish(), reads ascend without gaps"
            self._hash.update(piece.data)
            self._digests += xxhash.xxh3_128_digest(piece.data)
        self._num_checked += number == self._num_checked
        return piece

    def _begin(self) -> None:
        """Check the size and, in format 2, read the digests. Called before a piece is read."""
        stored = self._stored
        if self._is_begun:
            return
        check_size(stored, self._storage.size(stored.name), self._storage)
        if stored.body:
            digests = self._fetch(stored.body, stored.num_bytes)
            _check_hash(stored, xxhash.xxh3_128_hexdigest(digests.data))
            self._digests += digests.data
        self._is_begun = True

    def _fetch(self, begin: int, end: int) -> NDArray[np.uint8]:
        return _fetched(self._storage, self._stored, begin, end)


class Tensors:
    """Source that reads whole tensors of a part, checks each against its digest, and keeps them in memory.

    Adjacent tensors are read with one request. The header before the first tensor has no digest. A reader must compare
    it with the entry. ``keys`` contains the keys of the tensors to read, or the prefixes of keys up to the dot.
    """

    def __init__(self, storage: Storage, part: Part, keys: set[str]) -> None:
        self._storage = storage
        self._part = part
        self._keys = keys
        self._ranges: list[tuple[int, int]] = []  # of the tensors, ascending
        self._needed: set[int] = set()  # numbers of the tensors that are read
        self._held: dict[int, NDArray[np.uint8]] = {}  # tensors by number
        self._transfer = Transfer()  # of the tensors that are not held yet
        self._is_begun = False

    def lay_out(self, ranges: Mapping[str, tuple[int, int]]) -> None:
        """Set the byte ranges of the tensors by key, ascending. Raises ValueError if a tensor has no digest."""
        if len(ranges) != len(self._part.tensors):
            raise ValueError(f"{len(self._part.tensors)} digests of its {len(ranges)} tensors")
        self._ranges = list(ranges.values())
        self._needed = {i for i, key in enumerate(ranges) if not self._keys.isdisjoint((key, key.partition(".")[0]))}

    def read(self, begin: int, end: int) -> NDArray[np.uint8]:
        """Return the bytes ``[begin, end)`` of one tensor, or of the header. The next call resumes a failed read."""
        number = bisect_right(self._ranges, begin, key=itemgetter(0)) - 1
        if number < 0:
            return self._header(begin, end)
        if number not in self._held:
            self._load(number)
        first, _ = self._ranges[number]
        return self._held[number][begin - first : end - first]

    def _header(self, begin: int, end: int) -> NDArray[np.uint8]:
        """Return bytes of the header. The first call also checks the size of the object.

        Takes the size from the response, if it contains one. A cache may return a truncated copy of the object, but
        forward a separate request for the size to the store.
        """
        transfer = Transfer()
        size = partial(self._storage.size, self._part.name)
        try:
            data = _fetched(self._storage, self._part, begin, end, transfer)
        except StorageError:
            check_size(self._part, size(), self._storage)
            raise
        if not self._is_begun:
            found = size() if transfer.source is None else transfer.source[0]
            check_size(self._part, found, self._storage)
            self._is_begun = True
        return data

    def _load(self, number: int) -> None:
        last = number
        while last + 1 in self._needed:
            last += 1
        start, _ = self._ranges[number]
        data = _fetched(self._storage, self._part, start, self._ranges[last][1], self._transfer)
        self._transfer = Transfer()
        for each in range(number, last + 1):
            first, end = self._ranges[each]
            tensor = data[first - start : end - start]
            if xxhash.xxh3_128_hexdigest(tensor.data) != self._part.tensors[each]:
                raise CorruptPartError(self._part.name, f"the bytes of its tensor {each} do not match their digest")
            self._held[each] = tensor

    def finish(self) -> None:
        """Do nothing: each tensor is checked when it is read."""


def _fetched(
    storage: Storage, stored: Part | Stored, begin: int, end: int, transfer: Transfer | None = None
) -> NDArray[np.uint8]:
    check()
    data = storage.read_range(stored.name, begin, end, transfer=transfer)
    if data is None:
        check_not_left_out(storage, stored)
        raise CorruptPartError(stored.name, "it was deleted while it was read")
    return data


def _check_hash(part: Part | Stored, digest: str) -> None:
    if digest != part.xxh3:
        raise CorruptPartError(part.name, f"its xxh3 is not {part.xxh3}")


def _check_piece(stored: Part | Stored, piece: NDArray[np.uint8], number: int, digests: bytes | bytearray) -> None:
    if xxhash.xxh3_128_digest(piece.data) != digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]:
        found = f"the bytes of its piece {number} do not match their digest"
        raise CorruptPartError(stored.name, found if stored.body else "it changed while it was read")


def read_object(
    storage: Storage, stored: Part | Stored, *, out: NDArray[np.uint8] | None = None, transfer: Transfer | None = None
) -> NDArray[np.uint8]:
    """Read an object with :meth:`Storage.read`. Raise CorruptPartError unless its bytes match the record ``stored``."""
    try:
        data = storage.read(stored.name, max_bytes=stored.num_bytes, out=out, transfer=transfer)
    except MalformedError as error:
        raise CorruptPartError(stored.name, error.reason) from error
    check_size(stored, None if data is None else len(data), storage)
    assert data is not None, "it has a size"
    hashed = data[stored.body :]  # in format 1, the whole object
    _check_hash(stored, xxhash.xxh3_128_hexdigest(hashed.data))
    if stored.body:
        digests = hashed.tobytes()
        for number in range(num_digests(stored.body)):
            begin, end = piece_range(number, stored.body)
            _check_piece(stored, data[begin:end], number, digests)
    return data


def check_size(stored: Part | Stored, size: int | None, storage: Storage) -> None:
    """Raise CorruptPartError unless ``size`` is the size in the record ``stored``. None means a missing object.

    Raises LeftOutPartError if the object is missing because ``storage`` contains a mirror that does not copy it.
    """
    if size is None:
        check_not_left_out(storage, stored)
    if size != stored.num_bytes:
        found = "it does not exist" if size is None else f"it has {size} bytes instead of {stored.num_bytes}"
        raise CorruptPartError(stored.name, found)


def checked_pieces(
    read: Callable[[int, int], NDArray[np.uint8] | None], stored: Part | Stored
) -> Iterator[NDArray[np.uint8]]:
    """Read an object in pieces with ``read(begin, end)``, and yield the pieces.

    Before it yields the last piece, raises CorruptPartError if the bytes do not match the record ``stored``. Also
    raises CorruptPartError if ``read`` returns None because the object does not exist.
    """
    # In format 2, the hash covers the digests of the pieces of the body; in format 1, it covers the whole object.
    whole, body = xxhash.xxh3_128(), PieceHasher()
    digests = bytearray()
    for begin in range(0, stored.num_bytes, _READ_BYTES):
        end = min(begin + _READ_BYTES, stored.num_bytes)
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
