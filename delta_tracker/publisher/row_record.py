"""Record of what a publisher last stored for each row of one shard."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Ids = NDArray[np.int64]
_DIGEST_WORDS = 2
_DIGEST_BYTES = 16
_ROWS_PER_TURN = 1024  # rows hashed while the thread holds the interpreter's lock, about 0.3 ms
_PAUSE_SECONDS = 1e-5


class RowRecord:
    """Bytes, or 128-bit digests, of the stored rows of one shard. Each row is known or unknown.

    A row consists of parts, such as its values in each column range, its raw id and its optimizer's states. Notation:
    ``R`` is the number of rows of the shard, ``N`` a number of rows, ``W`` the number of bytes of a part.

    A write makes rows unknown. :meth:`confirm` or :meth:`confirm_all` makes them known, once the version that has them
    is committed. So a row whose version failed at any point stays unknown.

    Memory: for each row the bytes of its parts, or 16 bytes with digests, and one byte. It is allocated by the
    operating system when a row is first written.

    Not thread-safe.

    Args:
        num_rows: number of rows of the shard.
        widths: number of bytes of each part of a row.
        has_digests: True to keep a digest of each row instead of its bytes.

    Example:
        >>> record = RowRecord(4, [2], has_digests=True)
        >>> ids, rows = np.array([1, 3]), np.array([[7, 7], [8, 8]], np.uint8)
        >>> record.replace(ids, [rows]).tolist()
        [False, False]
        >>> record.confirm(ids)
        >>> record.replace(ids, [np.array([[7, 7], [9, 9]], np.uint8)]).tolist()
        [True, False]
    """

    def __init__(self, num_rows: int, widths: Sequence[int], *, has_digests: bool) -> None:
        self._known = np.zeros(num_rows, np.bool_)
        self._digests: NDArray[np.uint64] | None = None
        self._parts: list[NDArray[Any]] = []
        if has_digests:
            self._digests = np.zeros((num_rows, _DIGEST_WORDS), np.uint64)
        else:
            self._parts = [np.zeros((num_rows, width), np.uint8) for width in widths]
        self._num_written = [0] * len(widths)  # rows of each part that write() has written

    @property
    def num_bytes(self) -> int:
        """Memory of the record in bytes."""
        arrays = [self._known, *self._parts] if self._digests is None else [self._known, self._digests]
        return sum(each.nbytes for each in arrays)

    def replace(self, ids: Ids, parts: Sequence[Bytes]) -> NDArray[np.bool_]:
        """Record rows, and find those that are known to be equal. Rows that differ become unknown.

        Args:
            ids: ``[N]`` unique indices of rows in the shard.
            parts: each part of these rows, ``[N, W]``.

        Returns:
            ``[N]``, True for the rows whose parts are all known and equal.
        """
        same = self._known[ids]
        if self._digests is None:
            for held, part in zip(self._parts, parts, strict=True):
                same &= (_words(held)[ids] == _words(part)).all(1)
            # Before the bytes are written: a MemoryError between the two must leave no wrong row known.
            self._known[ids[~same]] = False
            for held, part in zip(self._parts, parts, strict=True):
                held[ids[~same]] = part[~same]
            return same
        digests = _digests(parts[0], 0)
        for number, part in enumerate(parts[1:], start=1):
            digests ^= _digests(part, number)
        same &= (self._digests[ids] == digests).all(1)
        self._known[ids[~same]] = False
        self._digests[ids[~same]] = digests[~same]
        return same

    def write(self, number: int, begin: int, part: Bytes) -> None:
        """Record a part of consecutive rows of a new record. Each part of each row must be recorded once.

        Args:
            number: number of the part.
            begin: index of the first row in the shard.
            part: the part of the rows, ``[N, W]``.
        """
        end = begin + len(part)
        if self._digests is None:
            self._parts[number][begin:end] = part
        else:
            self._digests[begin:end] ^= _digests(part, number)
        self._num_written[number] += len(part)

    def confirm(self, ids: Ids) -> None:
        """Make rows known that :meth:`replace` recorded."""
        self._known[ids] = True

    def confirm_all(self) -> None:
        """Make all rows known, if :meth:`write` recorded each part of each row once. No-op otherwise."""
        if all(number == len(self._known) for number in self._num_written):
            self._known[:] = True


def _words(rows: Bytes) -> NDArray[Any]:
    """Return a view of rows of bytes as the widest words that fit, which compare faster."""
    width = rows.shape[1]
    if rows.flags.c_contiguous:
        for dtype in (np.uint64, np.uint32, np.uint16):
            if width and width % np.dtype(dtype).itemsize == 0:
                return rows.view(dtype)
    return rows


def _digests(rows: Bytes, seed: int) -> NDArray[np.uint64]:
    """Return the 128-bit xxh3 of each row, ``[N, 2]``.

    Parts of a row are hashed with different seeds and combined by XOR, because a snapshot reads them at different
    times.
    """
    num_rows, width = rows.shape
    found = np.empty((num_rows, _DIGEST_WORDS), np.uint64)
    for begin in range(0, num_rows, _ROWS_PER_TURN):
        if begin:
            time.sleep(_PAUSE_SECONDS)  # the training thread may need the interpreter
        data = rows[begin : begin + _ROWS_PER_TURN].tobytes()
        joined = b"".join([xxhash.xxh3_128_digest(data[at : at + width], seed) for at in range(0, len(data), width)])
        count = len(joined) // _DIGEST_BYTES
        found[begin : begin + count] = np.frombuffer(joined, np.uint64).reshape(count, _DIGEST_WORDS)
    return found
