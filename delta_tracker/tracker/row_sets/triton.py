"""Row sets on a CUDA device, implemented with Triton (the extra ``triton``).

The engine passes the same contract test as the other engines. The test ran only in Triton's interpreter, which runs
kernels on the CPU if ``TRITON_INTERPRET=1`` is set. The kernels compile for compute capabilities 8.0 and 9.0. They have
not been tested on a GPU yet. The engine is used only if it is selected by name.
"""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import NamedTuple, Self

import torch
from torch import Tensor

from delta_tracker.errors import import_optional
from delta_tracker.rows import to_device
from delta_tracker.tracker.row_sets.row_set import RowSet, set_first, within

_ROWS_PER_BLOCK = 512
_WORDS_PER_BLOCK = _ROWS_PER_BLOCK // 32
_IDS_PER_PROGRAM = 1024
_BLOCKS_PER_PROGRAM = 64

_COMPILED: set[torch.device] = set()
"""Devices for which the kernels are compiled."""


class BlockCounts(NamedTuple):
    """Numbers of marked rows in the ``B`` blocks of a set. Returned by :meth:`TritonRows.count_blocks`.

    Args:
        before: ``[B]`` int64, for each block the number of marked rows in all earlier blocks.
        touched: ``[B]`` int32, indices of the blocks with marked rows, in random order, followed by undefined values.
        sizes: ``[2]`` int64, the number of marked rows and the number of blocks with marked rows.
    """

    before: Tensor
    touched: Tensor
    sizes: Tensor


class TritonRows(RowSet):
    """CUDA row set with one bit for each row and one bit for each block of 512 rows.

    The bit of a block is set if any row of the block is marked. A scan reads only blocks with marked rows. The set
    takes ``R / 8 + R / 4096`` bytes for the ``R`` rows of a shard. :meth:`mark_new` returns ids in random order. The
    first set on a device compiles all Triton kernels. This takes seconds. Triton caches the result on disk.

    Raises:
        MissingExtraError: if triton is not installed.
    """

    row_bits = 1

    def __init__(self, num_rows: int, device: torch.device) -> None:
        super().__init__(num_rows, device)
        self._programs = import_optional("delta_tracker.tracker.row_sets.triton_programs", "triton", "triton")
        self._num_blocks = -(-num_rows // _ROWS_PER_BLOCK)
        # A tensor created in inference mode cannot be written in place outside it.
        with torch.inference_mode(mode=False):
            self._words = torch.zeros(self._num_blocks * _WORDS_PER_BLOCK, dtype=torch.int32, device=device)
            self._summary = torch.zeros(-(-self._num_blocks // 32), dtype=torch.int32, device=device)
        self.warm_up(device)

    @classmethod
    def warm_up(cls, device: torch.device) -> None:
        """Compile all Triton kernels for ``device`` by running each once. Later calls for the device do nothing."""
        if device in _COMPILED:
            return
        _COMPILED.add(device)  # first, because the constructor calls this method
        try:
            rows, ids = cls(1, device), torch.zeros(1, dtype=torch.int64, device=device)
            rows.mark(ids)
            rows.mark_new_padded(ids)
            rows.scan()
        except BaseException:
            _COMPILED.discard(device)
            raise

    @classmethod
    def mark_each(cls, sets: Sequence[Self], ids: Sequence[Tensor]) -> None:
        """Add rows to each set. Launches one kernel for all sets."""
        cls._launch_mark(sets, ids, torch.cat(list(ids)), fresh=None, num_fresh=None)

    @classmethod
    def mark_new_padded_each(cls, sets: Sequence[Self], ids: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return the result of :meth:`mark_new_padded` for each set. Launches one kernel for all sets."""
        joined = torch.cat(list(ids))
        fresh, num_fresh = torch.full_like(joined, -1), joined.new_zeros(len(sets))
        cls._launch_mark(sets, ids, joined, fresh, num_fresh)
        return list(zip(torch.split(fresh, [len(own) for own in ids]), torch.split(num_fresh, 1), strict=True))

    @classmethod
    def scan_each(cls, sets: Sequence[Self]) -> list[Tensor]:
        """Return the result of :meth:`scan` for each set. Waits for the device once for all sets."""
        counted = [each.count_blocks() for each in sets]
        sizes = torch.stack([each.sizes for each in counted]).tolist() if counted else []
        return [each.list_rows(blocks, *size) for each, blocks, size in zip(sets, counted, sizes, strict=True)]

    @classmethod
    def count_each(cls, sets: Sequence[Self]) -> list[int]:
        """Return the result of :meth:`count` for each set. Waits for the device once for all sets."""
        sizes = torch.stack([each.count_blocks().sizes for each in sets]).tolist() if sets else []
        return [num_rows for num_rows, _ in sizes]

    @classmethod
    def serves(cls, device: torch.device) -> bool:
        """Return True for CUDA devices, and for all devices if Triton's interpreter is enabled."""
        return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"

    @property
    def num_bytes(self) -> int:
        """Size of the bits of all rows and blocks in bytes."""
        return self._words.nbytes + self._summary.nbytes

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Two int32 tensors: the bits of the rows, and the bits of the blocks."""
        return self._words, self._summary

    @property
    def addresses(self) -> tuple[int, int]:
        """Memory addresses of the two :attr:`tensors`, to pass to a kernel."""
        return self._words.data_ptr(), self._summary.data_ptr()

    def mark(self, ids: Tensor) -> None:
        """Add the rows with the given ids. See :meth:`RowSet.mark`."""
        self.mark_each([self], [ids])

    def mark_all(self) -> None:
        """Add all rows. See :meth:`RowSet.mark_all`."""
        set_first(self._words, self.num_rows, 32)
        set_first(self._summary, self._num_blocks, 32)

    def clear(self) -> None:
        """Remove all rows. See :meth:`RowSet.clear`."""
        self._words.zero_()
        self._summary.zero_()

    def mark_new_padded(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Add rows and return the padded ids that were not in the set. See :meth:`RowSet.mark_new_padded`."""
        return self.mark_new_padded_each([self], [ids])[0]

    def contains(self, ids: Tensor) -> Tensor:
        """Return ``[N]`` bool, True for each id whose row is in the set. See :meth:`RowSet.contains`."""
        ids = within(ids, self.num_rows)
        return (self._words[ids >> 5] >> (ids & 31)) & 1 != 0

    def merge(self, other: Self) -> None:
        """Add all rows of another set. See :meth:`RowSet.merge`."""
        self._words |= other._words
        self._summary |= other._summary

    def scan(self) -> Tensor:
        """Return the ids of all marked rows, ascending. See :meth:`RowSet.scan`."""
        blocks = self.count_blocks()
        return self.list_rows(blocks, *blocks.sizes.tolist())

    def count(self) -> int:
        """Return the number of marked rows. See :meth:`RowSet.count`."""
        return int(self.count_blocks().sizes[0])

    @classmethod
    def _launch_mark(
        cls, sets: Sequence[Self], ids: Sequence[Tensor], joined: Tensor, fresh: Tensor | None, num_fresh: Tensor | None
    ) -> None:
        begins = accumulate(map(len, ids), initial=0)
        indices = [
            [*each.addresses, each.num_rows, begin, begin + len(own)]
            for each, own, begin in zip(sets, ids, begins, strict=False)
        ]
        grid = (-(-max(map(len, ids)) // _IDS_PER_PROGRAM), len(sets))
        arguments = (to_device(torch.tensor(indices, device="cpu"), joined.device), joined, fresh, num_fresh)
        sets[0]._launch(  # noqa: SLF001  needs the programs and the device, which are the same for all sets
            "mark", grid, *arguments, size=_IDS_PER_PROGRAM, wants_fresh=fresh is not None
        )

    def count_blocks(self) -> BlockCounts:
        """Count the marked rows in each block of the set. Does not wait for the device."""
        counts, touched = (torch.empty(self._num_blocks, dtype=torch.int32, device=self.device) for _ in range(2))
        num_touched = torch.zeros(1, dtype=torch.int64, device=self.device)
        num_programs = -(-self._num_blocks // _BLOCKS_PER_PROGRAM)
        arguments = (self._words, self._summary, self._num_blocks, counts, touched, num_touched)
        self._launch("count", (num_programs,), *arguments, size=_BLOCKS_PER_PROGRAM)
        until = counts.cumsum(0)
        sizes = torch.cat([counts.sum(0, keepdim=True, dtype=torch.int64), num_touched])
        return BlockCounts(until - counts, touched, sizes)

    def list_rows(self, blocks: BlockCounts, num_rows: int, num_blocks: int) -> Tensor:
        """Return the ids of all marked rows, ``[K]`` int64, ascending. Does not wait for the device.

        ``num_rows`` and ``num_blocks`` are the two values of ``blocks.sizes``.
        """
        rows = torch.empty(num_rows, dtype=torch.int64, device=self.device)
        self._launch("scan", (num_blocks,), self._words, blocks.before, blocks.touched, rows)
        return rows

    def _launch(self, name: str, grid: tuple[int, ...], *arguments: Tensor | int | None, **constants: int) -> None:
        if 0 in grid:  # there is nothing to do, and CUDA has no empty grids
            return
        # Triton launches on the current device, which may differ from the set's.
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            getattr(self._programs, name)[grid](*arguments, **constants)
