"""Sets of rows on the CPU, compiled by numba (the extra ``numba``)."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from delta_tracker.errors import MissingExtraError
from delta_tracker.tracker.row_sets.row_set import RowSet

_ROWS_PER_BLOCK = 128
_WORDS_PER_BLOCK = _ROWS_PER_BLOCK // 64
_ROWS_PER_SPAN = 512
# As long as few rows of many are marked, their ids are listed, and sorted by a scan: that is less than to wait for the
# memory of each bit. A list costs an eighth of the bits at most, none of which is touched meanwhile.
_ROWS_PER_LISTED_ID = 512
_MAX_LISTS = 128
# Words that a core's cache holds are marked without their summary, which halves the time on each id, where so many ids
# come at once that the summary can be made of all words afterwards for less than that spares.
_MAX_CACHED_WORDS = 2**18
_WORDS_PER_ID = 4  # that an id is worth


class NumbaRows(RowSet):
    """One bit per row and one per block of 128 rows, so that a scan costs what was marked, not what exists.

    It holds ``R / 8 + R / 1024`` bytes, of which the system provides only the pages that were written to; as long as
    few ids of many rows were marked, 8 bytes for each instead. The GIL is released in every loop. :meth:`mark_new`
    returns each id at the place of its first occurrence. The first set that is built compiles the loops, which takes
    seconds; later processes read them from numba's cache.

    Raises:
        MissingExtraError: if numba is not installed.

    Example:
        >>> rows = NumbaRows(8, torch.device("cpu"))
        >>> rows.mark(torch.tensor([5, 2, 5]))
        >>> rows.mark_new(torch.tensor([7, 2, 7, 1]))
        tensor([7, 1])
        >>> rows.scan()
        tensor([1, 2, 5, 7])
        >>> rows.rank(torch.tensor([7, 1]))
        tensor([3, 0])
    """

    _max_cached_words = _MAX_CACHED_WORDS
    _rows_per_listed_id = _ROWS_PER_LISTED_ID

    def __init__(self, num_rows: int, device: torch.device) -> None:
        super().__init__(num_rows, device)
        load_loops()
        self._lists: list[NDArray[np.int64]] = []  # empty from the first bit on that was ever set
        self._num_listed = 0
        self._bits: _Bits | None = None

    @classmethod
    def serves(cls, device: torch.device) -> bool:
        """The CPU, if it is little-endian."""
        return device.type == "cpu" and sys.byteorder == "little"

    @property
    def num_bytes(self) -> int:
        """Bits and summary, or listed ids."""
        return 8 * self._num_listed if self._bits is None else self._bits.num_bytes

    def _mark(self, ids: Tensor) -> None:
        array = _array(ids)
        if self._bits is None and len(self._lists) < _MAX_LISTS:
            num_listed = self._num_listed + array.size
            if num_listed * self._rows_per_listed_id <= self.num_rows:
                self._lists.append(array.copy())
                self._num_listed = num_listed
                return
        self._unlisted().mark(array)

    def _unlisted(self) -> _Bits:
        """The bits, with those of the ids that were listed till now."""
        if self._bits is None:
            self._bits = _Bits(self.num_rows, self._max_cached_words)
            lists, self._lists = self._lists, []
            for ids in lists:
                self._bits.mark(ids)
        return self._bits

    def _sorted(self) -> NDArray[np.int64]:
        """The listed ids in order, once each; from now on they are listed so."""
        if not self._lists:
            return np.empty(0, dtype=np.int64)
        ids = self._lists[0] if len(self._lists) == 1 else np.concatenate(self._lists)
        ids.sort()  # ours: a list is a copy
        if ids[0] < 0 or ids[-1] >= self.num_rows:  # what is no row counts as row 0
            low, high = np.searchsorted(ids, (0, self.num_rows))
            ids = np.concatenate([ids[:1] * 0, ids[low:high]])
        if ids.size > 1 and (is_again := ids[1:] == ids[:-1]).any():
            ids = np.concatenate([ids[:1], ids[1:][~is_again]])
        self._lists, self._num_listed = [ids], ids.size
        return ids

    def _mark_all(self) -> None:
        self._unlisted().mark_all()

    def _clear(self) -> None:
        self._lists, self._num_listed = [], 0
        if self._bits is not None:
            self._bits.clear()

    def _mark_new(self, ids: Tensor) -> Tensor:
        fresh, count = self._unlisted().mark_new(_array(ids))
        fresh.resize(count, refcheck=False)  # gives the rest back without a copy
        return torch.from_numpy(fresh)

    def _mark_new_padded(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        fresh, count = self._unlisted().mark_new(_array(ids))
        fresh[count:] = -1
        return torch.from_numpy(fresh), torch.tensor([count])

    def _contains(self, ids: Tensor) -> Tensor:
        return torch.from_numpy(self._unlisted().contains(_array(ids)))

    def _absorb(self, other: Self) -> None:
        if other._bits is not None:
            self._unlisted().absorb(other._bits)
        for ids in other._lists:
            self._mark(torch.from_numpy(ids))

    def _scan(self) -> Tensor:
        return torch.from_numpy(self._sorted().copy() if self._bits is None else self._bits.scan())

    def _num_marked(self) -> int:
        return len(self._sorted()) if self._bits is None else self._bits.count

    def _rank(self, ids: Tensor) -> Tensor:
        return torch.from_numpy(self._unlisted().rank(_array(ids)))


class _Bits:
    """The bits of ``num_rows`` rows, and their summary, which is made anew when it is needed after many marks at once.

    ``ids`` are ``[N]`` int64, and count as row 0 where they are no row.
    """

    __slots__ = ("_count", "_is_settled", "_loops", "_max_cached_words", "_num_rows", "_octets", "_summary", "_words")

    def __init__(self, num_rows: int, max_cached_words: int) -> None:
        self._loops = load_loops()
        self._num_rows = num_rows
        self._max_cached_words = max_cached_words
        num_blocks = -(-num_rows // _ROWS_PER_BLOCK)
        self._words = np.zeros(num_blocks * _WORDS_PER_BLOCK, dtype=np.int64)
        self._octets = self._words.view(np.uint8)
        self._summary = np.zeros(-(-num_blocks // 64), dtype=np.int64)
        self._count = 0
        self._is_settled = True  # summary and count are those of the words

    @property
    def num_bytes(self) -> int:
        return self._words.nbytes + self._summary.nbytes

    @property
    def count(self) -> int:
        """How many are set."""
        self._settle()
        return self._count

    def mark(self, ids: NDArray[np.int64]) -> None:
        """Set the bit of each id."""
        num_words = len(self._words)
        if num_words <= self._max_cached_words and (not self._is_settled or ids.size * _WORDS_PER_ID >= num_words):
            self._loops.mark_octets(self._octets, self._num_rows, ids)
            self._is_settled = False
        else:
            self._count += self._loops.mark(self._octets, self._summary, self._num_rows, ids)

    def mark_new(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
        """Set the bit of each id; ``[N]`` with those whose bit was clear at its begin, and how many they are."""
        fresh = np.empty(ids.size, dtype=np.int64)
        count: int = self._loops.mark_new(self._octets, self._summary, self._num_rows, ids, fresh)
        self._count += count
        return fresh, count

    def mark_all(self) -> None:
        """Set all bits."""
        _set_first(self._words, self._num_rows)
        _set_first(self._summary, -(-self._num_rows // _ROWS_PER_BLOCK))
        self._count = self._num_rows
        self._is_settled = True

    def clear(self) -> None:
        """Clear all bits."""
        self._settle()
        self._loops.clear(self._words, self._summary)
        self._count = 0

    def contains(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """``[N]``, the bit of each id."""
        found = np.empty(ids.size, dtype=np.bool_)
        self._loops.contains(self._words, self._num_rows, ids, found)
        return found

    def absorb(self, other: _Bits) -> None:
        """Set the bits that are set in ``other``, of as many rows."""
        other._settle()  # ours is settled later, if it has to be
        self._count += self._loops.absorb(self._words, self._summary, other._words, other._summary)

    def scan(self) -> NDArray[np.int64]:
        """Which are set, ascending."""
        self._settle()
        rows = np.empty(self._count + self._loops.SPARE, dtype=np.int64)
        self._loops.unpack(self._words, self._summary, rows)
        return rows[: self._count]

    def rank(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """``[N]``, how many are set below each id."""
        self._settle()
        before = np.empty(-(-self._num_rows // _ROWS_PER_SPAN), dtype=np.int64)
        self._loops.count_before(self._words, self._summary, before)
        ranks = np.empty(ids.size, dtype=np.int64)
        self._loops.rank(self._words, before, self._num_rows, ids, ranks)
        return ranks

    def _settle(self) -> None:
        """Bring summary and count up to date."""
        if not self._is_settled:
            self._count = self._loops.summarize(self._words, self._summary)
            self._is_settled = True


@cache
def load_loops() -> ModuleType:
    """Import :mod:`delta_tracker.tracker.row_sets.numba_loops`.

    Raises:
        MissingExtraError: if numba is not installed, or refuses the numpy that is.
    """
    try:
        return import_module("delta_tracker.tracker.row_sets.numba_loops")
    except ImportError as error:
        raise MissingExtraError("numba", "numba") from error


def _array(ids: Tensor) -> NDArray[np.int64]:
    """The memory of ``ids``; a copy only where it has gaps."""
    return ids.contiguous().numpy()


def _set_first(words: NDArray[np.int64], num_bits: int) -> None:
    """Set the first ``num_bits`` bits and clear the others."""
    full, rest = divmod(num_bits, 64)
    words[:full] = -1
    words[full:] = 0
    if rest:
        words[full] = (1 << rest) - 1
