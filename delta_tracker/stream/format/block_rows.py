"""Lazy view of the rows of a block, used to write, read, merge and apply rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from delta_tracker.stream.format.codec import decode_rows
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Block

RowReader = Callable[[int, int], Tensor]
Column = int | Literal["values", "owners"]  # what is read of a row; an integer is the index of a state
CHUNK_BYTES = 4 << 20
_VALUE_BYTES = 4  # encoding and decoding work in float32
_ID_BYTES = 8
_OWNERS_ROWS = 1 << 20  # raw ids in memory at once


@dataclass(frozen=True, slots=True, eq=False)
class BlockRows:
    """View of the rows of a block, which are read lazily.

    Notation: ``N`` is ``block.num_rows``, and ``width`` is the number of stored columns,
    ``block.encoding.width(block.num_columns)``. Readers return the rows ``begin`` to ``end`` (exclusive), possibly as a
    view of shared memory: do not write to it.
    """

    block: Block
    # `[N]` int64 global row ids, ascending and unique; None if the block holds all rows of its range
    ids: Tensor | None
    read: RowReader  # reader of the values as they are stored, `[end - begin, width]` in `block.encoding.dtype`
    # reader of each of the table's states in their declared order and dtype, `[end - begin, block.num_columns]` or
    # `[end - begin, 1]`
    states: tuple[RowReader, ...] = ()
    # reader of the raw ids, `[end - begin, 1]` int64, 2**63 - 1 for a row without one; None for a table without managed
    # collisions, or if the owners are not read
    owners: RowReader | None = None

    @classmethod
    def of(cls, block: Block, ids: Tensor | None, stored: Tensor) -> BlockRows:
        """Return a view of rows in memory, ``[N, width]`` as :func:`~.encoding.encode_rows` returns them."""
        return cls(block, ids, held_rows(stored))

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the stored rows, their states and owners, plus their ids as int64."""
        states = sum(empty.shape[1] * empty.itemsize for empty in (read(0, 0) for read in self.states))
        num_ids = (self.ids is not None) + (self.owners is not None)
        return self.block.num_rows * (self.block.row_bytes + states + num_ids * _ID_BYTES)

    def reader(self, column: Column) -> RowReader:
        """Return the reader of the values, of the owners, or of the state with an index."""
        if column == "owners":
            assert self.owners is not None, "all blocks of a table have owners, or none has"
            return self.owners
        return self.read if column == "values" else self.states[column]

    def chunks(self, num_rows: int | None = None, *, read: RowReader | None = None) -> Iterator[Tensor]:
        """Yield all rows of ``read`` (by default the values) in chunks of at most ``num_rows`` that are read lazily.

        By default, a chunk has as many rows as take 4 MiB in float32, which fits the CPU cache.
        """
        read = read or self.read
        step = num_rows or max(1, CHUNK_BYTES // (self.block.num_columns * _VALUE_BYTES))
        for begin in range(0, self.block.num_rows, step):
            yield read(begin, min(begin + step, self.block.num_rows))

    def owned(self) -> Iterator[tuple[Tensor | slice, Tensor]]:
        """Yield the ``n`` global ids of all rows, as a slice or as ascending int64, with their ``[n]`` int64 raw ids.

        Yields nothing without owners. A large block is read in pieces.
        """
        for begin in range(0, self.block.num_rows, _OWNERS_ROWS) if self.owners else ():
            end = min(begin + _OWNERS_ROWS, self.block.num_rows)
            first = self.block.rows[0]
            ids = slice(first + begin, first + end) if self.ids is None else self.ids[begin:end]
            yield ids, self.reader("owners")(begin, end)[:, 0]

    def loaded(self) -> BlockRows:
        """Read the rows with their states and owners now and return them in memory."""
        return self._read_through(self.block, self.ids, lambda read: held_rows(read(0, self.block.num_rows)))

    def decoded(self, dtype: torch.dtype) -> BlockRows:
        """Return the same rows decoded to the table's dtype: float32, float16 or bfloat16."""
        block, own = self.block, Encoding.of(dtype)
        if block.encoding is own:
            return self
        return BlockRows(
            replace(block, encoding=own),
            self.ids,
            lambda begin, end: decode_rows(self.read(begin, end), block.encoding, block.num_columns, dtype),
            self.states,
            self.owners,
        )

    def within(self, rows: tuple[int, int], columns: tuple[int, int]) -> BlockRows:
        """Return the part of the block that lies in half-open ranges of its global row ids and columns.

        For quantized rows and for rows with states or owners, ``columns`` must be the block's whole column range.
        """
        block = self.block
        if rows == block.rows and columns == block.columns:
            return self
        assert columns == block.columns or not block.encoding.is_quantized, "quantized rows cannot be split by columns"
        assert columns == block.columns or not self.states, "states cannot be split by columns"
        assert columns == block.columns or self.owners is None, "rows with owners have all columns"
        if self.ids is None:
            ids, start, stop = None, rows[0] - block.rows[0], rows[1] - block.rows[0]
        else:
            start, stop = places_within(self.ids, rows)
            ids = self.ids[start:stop]
        part = replace(block, rows=rows, columns=columns, num_rows=stop - start)
        if columns == block.columns:
            return self._read_through(part, ids, lambda read: lambda begin, end: read(start + begin, start + end))
        left, right = columns[0] - block.columns[0], columns[1] - block.columns[0]
        return BlockRows(part, ids, lambda begin, end: self.read(start + begin, start + end)[:, left:right])

    def take(self, places: Tensor) -> BlockRows:
        """Return the rows at ``[M]`` int64 indices, ascending, unique, with ids, and with their states and owners."""
        ids = places + self.block.rows[0] if self.ids is None else self.ids[places]
        part = replace(self.block, num_rows=len(places), ids="list")
        return self._read_through(part, ids, lambda read: lambda begin, end: gather(read, places[begin:end]))

    def _read_through(self, block: Block, ids: Tensor | None, change: Callable[[RowReader], RowReader]) -> BlockRows:
        """Return some of the rows: ``change`` is applied to the readers of values, states and owners."""
        states = tuple(change(read) for read in self.states)
        owners = None if self.owners is None else change(self.owners)
        return BlockRows(block, ids, change(self.read), states, owners)


def gather(read: RowReader, places: Tensor) -> Tensor:
    """Return the rows ``places``, ``[M]`` int64, ascending, as ``[M, width]``. Reads all from the first to the last."""
    if not len(places):
        return read(0, 0)
    first = int(places[0])
    return read(first, int(places[-1]) + 1).index_select(0, places - first)


def held_rows(rows: Tensor) -> RowReader:
    """Return a reader of rows in memory."""
    return lambda begin, end: rows[begin:end]


def places_within(ids: Tensor, rows: tuple[int, int]) -> tuple[int, int]:
    """Return ``(start, stop)``, the half-open index range of the ascending ``ids``, ``[N]`` int64, inside ``rows``."""
    start, stop = torch.searchsorted(ids, torch.tensor(rows)).tolist()
    return start, stop
