"""Sets of rows on the CPU, compiled by numba (the extra ``numba``)."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from delta_tracker.errors import MissingExtraError
from delta_tracker.kernels.rows import RowSet

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

    It holds ``R / 8 + R / 1024`` bytes, of which the system provides only the pages that were written to, or less. The
    GIL is released in every loop. :meth:`mark_new` returns each id at the place of its first occurrence. The first set
    that is built compiles the loops, which takes seconds; later processes read them from numba's cache.

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
        self._loops = load_loops()
        self._num_blocks = -(-num_rows // _ROWS_PER_BLOCK)
        self._words = np.zeros(self._num_blocks * _WORDS_PER_BLOCK, dtype=np.int64)
        self._summary = np.zeros(-(-self._num_blocks // 64), dtype=np.int64)
        self._count = 0  # K
        self._is_settled = True  # summary and count are those of the words
        self._lists: list[NDArray[np.int64]] | None = []  # None from the first bit on that was ever set
        self._num_listed = 0

    @classmethod
    def serves(cls, device: torch.device) -> bool:
        """The CPU."""
        return device.type == "cpu"

    @property
    def num_bytes(self) -> int:
        """Bits and summary."""
        return self._words.nbytes + self._summary.nbytes

    def _mark(self, ids: Tensor) -> None:
        array = _array(ids)
        if self._lists is not None and len(self._lists) < _MAX_LISTS:
            num_listed = self._num_listed + array.size
            if num_listed * self._rows_per_listed_id <= self.num_rows:
                self._lists.append(array.copy())
                self._num_listed = num_listed
                return
        self._unlist()
        self._set(array)

    def _set(self, ids: NDArray[np.int64]) -> None:
        """Set the bit of each id."""
        num_words = len(self._words)
        if num_words <= self._max_cached_words and (not self._is_settled or ids.size * _WORDS_PER_ID >= num_words):
            self._loops.mark_words(self._words, self.num_rows, ids)
            self._is_settled = False
        else:
            self._count += self._loops.mark(self._words, self._summary, self.num_rows, ids)

    def _unlist(self) -> None:
        """Make bits of the ids that are listed, and list none any more."""
        lists, self._lists = self._lists, None
        for ids in lists or ():
            self._set(ids)

    def _sort(self, lists: list[NDArray[np.int64]]) -> NDArray[np.int64]:
        """The listed ids in order, once each; from now on they are listed so."""
        if not lists:
            return np.empty(0, dtype=np.int64)
        ids = np.sort(np.concatenate(lists))
        low, high = np.searchsorted(ids, (0, self.num_rows))
        if low > 0 or high < ids.size:  # what is no row counts as row 0
            ids = np.concatenate([ids[:1] * 0, ids[low:high]])
        is_first = np.ones(ids.size, dtype=np.bool_)
        np.not_equal(ids[1:], ids[:-1], out=is_first[1:])
        lists[:] = [ids[is_first]]
        self._num_listed = lists[0].size
        return lists[0]

    def _mark_all(self) -> None:
        self._lists = None
        _set_first(self._words, self.num_rows)
        _set_first(self._summary, self._num_blocks)
        self._count = self.num_rows
        self._is_settled = True

    def _clear(self) -> None:
        if self._lists is not None:
            self._lists, self._num_listed = [], 0
            return
        self._settle()
        self._loops.clear(self._words, self._summary)
        self._count = 0

    def _settle(self) -> None:
        """Bring summary and count up to date."""
        if not self._is_settled:
            self._count = self._loops.summarize(self._words, self._summary)
            self._is_settled = True

    def _mark_new(self, ids: Tensor) -> Tensor:
        fresh, count = self._mark_fresh(ids)
        fresh.resize(count, refcheck=False)  # gives the rest back without a copy
        return torch.from_numpy(fresh)

    def _mark_new_padded(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        fresh, count = self._mark_fresh(ids)
        fresh[count:] = -1
        return torch.from_numpy(fresh), torch.tensor([count])

    def _contains(self, ids: Tensor) -> Tensor:
        self._unlist()
        found = np.empty(ids.numel(), dtype=np.bool_)
        self._loops.contains(self._words, self.num_rows, _array(ids), found)
        return torch.from_numpy(found)

    def _absorb(self, other: Self) -> None:
        if other._lists is not None:
            for ids in other._lists:
                self._mark(torch.from_numpy(ids))
            return
        self._unlist()
        other._settle()  # ours is settled later, if it has to be
        self._count += self._loops.absorb(self._words, self._summary, other._words, other._summary)

    def _scan(self) -> Tensor:
        if self._lists is not None:
            return torch.from_numpy(self._sort(self._lists).copy())
        self._settle()
        rows = np.empty(self._count + 1, dtype=np.int64)
        self._loops.unpack(self._words, self._summary, rows)
        return torch.from_numpy(rows[:-1])

    def _num_marked(self) -> int:
        if self._lists is not None:
            return len(self._sort(self._lists))
        self._settle()
        return self._count

    def _rank(self, ids: Tensor) -> Tensor:
        self._unlist()
        self._settle()
        before = np.empty(-(-self.num_rows // _ROWS_PER_SPAN), dtype=np.int64)
        self._loops.count_before(self._words, self._summary, before)
        ranks = np.empty(ids.numel(), dtype=np.int64)
        self._loops.rank(self._words, before, self.num_rows, _array(ids), ranks)
        return torch.from_numpy(ranks)

    def _mark_fresh(self, ids: Tensor) -> tuple[NDArray[np.int64], int]:
        self._unlist()
        fresh = np.empty(ids.numel(), dtype=np.int64)
        count: int = self._loops.mark_new(self._words, self._summary, self.num_rows, _array(ids), fresh)
        self._count += count
        return fresh, count


@cache
def load_loops() -> ModuleType:
    """Import :mod:`delta_tracker.kernels.numba_loops`.

    Raises:
        MissingExtraError: if numba is not installed, or refuses the numpy that is.
    """
    try:
        return import_module("delta_tracker.kernels.numba_loops")
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
