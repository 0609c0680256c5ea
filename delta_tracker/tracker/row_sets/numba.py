"""Row sets on the CPU, implemented with numba (the extra ``numba``).

Notation: ``R`` is the number of rows of the shard, ``N`` the number of ids in an argument.
"""

import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from delta_tracker.errors import import_optional
from delta_tracker.tracker.row_sets.row_set import RowSet, set_first

_ROWS_PER_BLOCK = 128
_WORDS_PER_BLOCK = _ROWS_PER_BLOCK // 64
_ROWS_PER_SPAN = 512
# If the words fit into a core's cache, they are marked without their summary, which halves the time per id. This pays
# off only for calls with many ids, because the summary is then rebuilt from all words.
_MAX_CACHED_WORDS = 2**18
_WORDS_PER_ID = 4  # number of words that can be summarized in the time that is saved for one id


class NumbaRows(RowSet):
    """CPU row set with one bit per row and one bit per block of 128 rows. A scan skips blocks without marked rows.

    It reserves ``R / 8 + R / 1024`` bytes of address space. Only pages that were written take memory. All kernels
    release the GIL. :meth:`mark_new` returns ids in the order of their first occurrence. The first set in a process
    loads the kernels from numba's cache or compiles them, which takes seconds.

    The bits of the blocks are the *summary*. Some calls of :meth:`mark` do not update it. After such a
    call, or an interrupted call, the next call that needs the summary computes it from the bits of the rows.

    Raises:
        MissingExtraError: if numba is not installed or does not support the installed numpy.

    Example:
        >>> rows = NumbaRows(8, torch.device("cpu"))
        >>> rows.mark(torch.tensor([5, 2, 5]))
        >>> rows.mark_new(torch.tensor([7, 2, 7, 1]))
        tensor([7, 1])
        >>> rows.scan()
        tensor([1, 2, 5, 7])
        >>> rows.rank(torch.tensor([7, 1]), rows.scan())
        tensor([3, 0])
    """

    row_bits = 1
    _max_cached_words = _MAX_CACHED_WORDS

    def __init__(self, num_rows: int, device: torch.device) -> None:
        super().__init__(num_rows, device)
        self._loops = load_loops()
        num_blocks = -(-num_rows // _ROWS_PER_BLOCK)
        self._words = np.zeros(num_blocks * _WORDS_PER_BLOCK, dtype=np.int64)
        self._octets = self._words.view(np.uint8)
        self._summary = np.zeros(-(-num_blocks // 64), dtype=np.int64)
        self._count = 0  # number of rows whose bits are set, or an upper bound if not summarized
        self._is_summarized = True  # summary and count match the words

    @classmethod
    def warm_up(cls, device: torch.device) -> None:  # noqa: ARG003
        """Import the compiled kernels. Raise MissingExtraError if numba is missing or needs another numpy."""
        load_loops()

    @classmethod
    def serves(cls, device: torch.device) -> bool:
        """Return True for the CPU on little-endian machines."""
        return device.type == "cpu" and sys.byteorder == "little"

    @property
    def num_bytes(self) -> int:
        """Size of the bits and their summary in bytes."""
        return self._words.nbytes + self._summary.nbytes

    def mark(self, ids: Tensor) -> None:
        """Add the rows with the given ids. See :meth:`RowSet.mark`."""
        array = _array(ids)
        if not array.size:
            return
        num_words = self._words.size
        if num_words <= self._max_cached_words and (not self._is_summarized or array.size * _WORDS_PER_ID >= num_words):
            self._is_summarized = False
            self._count += array.size
            self._loops.mark_octets(self._octets, self.num_rows, array)
        else:
            self._add(array.size, self._loops.mark, self._octets, self._summary, self.num_rows, array)

    def mark_all(self) -> None:
        """Add all rows. See :meth:`RowSet.mark_all`."""
        self._count, self._is_summarized = self.num_rows, False
        set_first(self._words, self.num_rows, 64)
        set_first(self._summary, -(-self.num_rows // _ROWS_PER_BLOCK), 64)
        self._is_summarized = True

    def clear(self) -> None:
        """Remove all rows. See :meth:`RowSet.clear`."""
        self._summarize()
        self._is_summarized = False
        self._loops.clear(self._words, self._summary)
        self._count, self._is_summarized = 0, True

    def mark_new(self, ids: Tensor) -> Tensor:
        """Add rows and return the ids that were not in the set. See :meth:`RowSet.mark_new`."""
        array = _array(ids)
        fresh = np.empty(array.size, dtype=np.int64)
        count = self._add(array.size, self._loops.mark_new, self._octets, self._summary, self.num_rows, array, fresh)
        fresh.resize(count, refcheck=False)  # frees the rest without a copy
        return torch.from_numpy(fresh)

    def contains(self, ids: Tensor) -> Tensor:
        """Return ``[N]`` bool, True for each id whose row is in the set. See :meth:`RowSet.contains`."""
        array = _array(ids)
        found = np.empty(array.size, dtype=np.bool_)
        self._loops.contains(self._words, self.num_rows, array, found)
        return torch.from_numpy(found)

    def merge(self, other: Self) -> None:
        """Add all rows of another set. See :meth:`RowSet.merge`."""
        other._summarize()  # self is summarized later, when needed
        self._add(other._count, self._loops.merge, self._words, self._summary, other._words, other._summary)

    def scan(self) -> Tensor:
        """Return the ids of all marked rows, ascending. See :meth:`RowSet.scan`."""
        if not self._is_summarized:  # as _summarize(), with a call less
            self._count, self._is_summarized = self._loops.summarize(self._words, self._summary), True
        rows = np.empty(self._count + self._loops.SPARE, dtype=np.int64)
        self._loops.unpack(self._words, self._summary, rows)
        return torch.from_numpy(rows[: self._count])

    def count(self) -> int:
        """Return the number of marked rows. See :meth:`RowSet.count`."""
        self._summarize()
        return self._count

    def rank(self, ids: Tensor, scanned: Tensor) -> Tensor:  # noqa: ARG002  counting takes less time than a search
        """Return the number of marked rows below each id. See :meth:`RowSet.rank`."""
        self._summarize()
        array = _array(ids)
        before = np.empty(-(-self.num_rows // _ROWS_PER_SPAN), dtype=np.int64)
        self._loops.count_before(self._words, self._summary, before)
        ranks = np.empty(array.size, dtype=np.int64)
        self._loops.rank(self._words, before, self.num_rows, array, ranks)
        return torch.from_numpy(ranks)

    def _add(self, most: int, loop: Callable[..., int], *args: object) -> int:
        """Call a kernel that sets bits and updates the summary. Return the number of bits set, at most ``most``."""
        count, is_summarized = self._count, self._is_summarized
        self._count, self._is_summarized = count + most, False  # for an interrupt after the loop
        added = loop(*args)
        self._count, self._is_summarized = count + added, is_summarized
        return added

    def _summarize(self) -> None:
        if not self._is_summarized:
            self._count = self._loops.summarize(self._words, self._summary)
            self._is_summarized = True


@cache
def load_loops() -> ModuleType:
    """Import and return the compiled kernels. Raise MissingExtraError if numba is missing or needs another numpy."""
    return import_optional("delta_tracker.tracker.row_sets.numba_loops", "numba", "numba")


def _array(ids: Tensor) -> NDArray[np.int64]:
    """Return ``ids`` as a numpy array, which shares its memory if ``ids`` is contiguous."""
    return ids.contiguous().numpy()
