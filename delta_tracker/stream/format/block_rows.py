"""Lazy views of the rows of blocks, and functions that write listed rows over whole blocks.

A whole block contains all rows of its range, and may be copied while training continues. Listed rows are stored with
their ids, and are newer than the whole block. Readers and compaction first write the listed rows over those of the
whole block, so that no outdated row is applied.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from delta_tracker.stream.format.codec import decode_rows
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Block

_T = TypeVar("_T")
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
    view of shared memory: do not write to the result.
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
    def of(cls, block: Block, ids: Tensor | None, stored: Tensor) -> "BlockRows":
        """Return a view of ``stored``, ``[N, width]`` rows that :func:`~.codec.encode_rows` has encoded."""
        return cls(block, ids, held_rows(stored))

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the stored rows, their states and owners, plus their ids as int64."""
        states = sum(empty.shape[1] * empty.itemsize for empty in (read(0, 0) for read in self.states))
        num_ids = (self.ids is not None) + (self.owners is not None)
        return self.block.num_rows * (self.block.row_bytes + states + num_ids * _ID_BYTES)

    def reader(self, column: Column) -> RowReader:
        """Return the reader of ``column``: ``"values"``, ``"owners"``, or the index of a state."""
        if column == "owners":
            assert self.owners is not None, "all blocks of a table have owners, or none has"
            return self.owners
        return self.read if column == "values" else self.states[column]

    def chunks(self, num_rows: int | None = None, *, read: RowReader | None = None) -> Iterator[Tensor]:
        """Yield all rows in chunks of at most ``num_rows`` rows, read lazily.

        ``read`` is one of the readers, by default the reader of the values. By default, a chunk takes 4 MiB in float32.
        """
        read = read or self.read
        step = num_rows or max(1, CHUNK_BYTES // (self.block.num_columns * _VALUE_BYTES))
        for begin in range(0, self.block.num_rows, step):
            yield read(begin, min(begin + step, self.block.num_rows))

    def owned(self) -> Iterator[tuple[Tensor | slice, Tensor]]:
        """Yield the global ids of ``n`` rows at a time, as a slice or ascending int64, and their ``[n]`` int64 raw ids.

        Yields nothing if the block has no owners.
        """
        for begin in range(0, self.block.num_rows, _OWNERS_ROWS) if self.owners else ():
            end = min(begin + _OWNERS_ROWS, self.block.num_rows)
            first = self.block.rows[0]
            ids = slice(first + begin, first + end) if self.ids is None else self.ids[begin:end]
            yield ids, self.reader("owners")(begin, end)[:, 0]

    def loaded(self) -> "BlockRows":
        """Load the rows, their states and their owners into memory, and return a view of the loaded rows."""
        return self._read_through(self.block, self.ids, lambda read: held_rows(read(0, self.block.num_rows)))

    def decoded(self, dtype: torch.dtype) -> "BlockRows":
        """Return the same rows decoded to the table's dtype: float32, float16 or bfloat16."""
        block = self.block
        if block.encoding.dtype is dtype:
            return self
        return replace(
            self,
            block=replace(block, encoding=Encoding.of(dtype)),
            read=lambda begin, end: decode_rows(self.read(begin, end), block.encoding, block.num_columns, dtype),
        )

    def within(self, rows: tuple[int, int], columns: tuple[int, int]) -> "BlockRows":
        """Return the part of the block in the half-open ranges ``rows`` (global row ids) and ``columns``.

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
            start, stop = range_within(self.ids, rows)
            ids = self.ids[start:stop]
        part = replace(block, rows=rows, columns=columns, num_rows=stop - start)
        if columns == block.columns:
            return self._read_through(part, ids, lambda read: lambda begin, end: read(start + begin, start + end))
        left, right = columns[0] - block.columns[0], columns[1] - block.columns[0]
        return BlockRows(part, ids, lambda begin, end: self.read(start + begin, start + end)[:, left:right])

    def take(self, indices: Tensor) -> "BlockRows":
        """Return the rows at ascending, unique ``[M]`` int64 indices, with their ids, states and owners."""
        ids = indices + self.block.rows[0] if self.ids is None else self.ids[indices]
        part = replace(self.block, num_rows=len(indices), ids="list")
        return self._read_through(part, ids, lambda read: lambda begin, end: read_rows(read, indices[begin:end]))

    def _read_through(self, block: Block, ids: Tensor | None, change: Callable[[RowReader], RowReader]) -> "BlockRows":
        states = tuple(change(read) for read in self.states)
        owners = None if self.owners is None else change(self.owners)
        return BlockRows(block, ids, change(self.read), states, owners)


def read_rows(read: RowReader, indices: Tensor) -> Tensor:
    """Return the rows at ``indices``, ``[M]`` ascending int64, as ``[M, width]``. Reads one range that contains all."""
    if not len(indices):
        return read(0, 0)
    first = int(indices[0])
    return read(first, int(indices[-1]) + 1).index_select(0, indices - first)


def held_rows(rows: Tensor) -> RowReader:
    """Return a reader that reads from the tensor ``rows``."""
    return lambda begin, end: rows[begin:end]


def range_within(ids: Tensor, rows: tuple[int, int]) -> tuple[int, int]:
    """Return the half-open range of indices of the ``ids``, ``[N]`` ascending int64, that are in the range ``rows``."""
    start, stop = torch.searchsorted(ids, torch.tensor(rows, device="cpu")).tolist()
    return start, stop


class Overlay:
    """Index of listed rows to write over whole blocks. The blocks of the listed rows must not overlap."""

    def __init__(self, listed: Iterable[BlockRows]) -> None:
        self._index = _Index((each.block, each) for each in listed)

    def over(self, whole: BlockRows) -> BlockRows:
        """Return the rows of a whole block, overwritten with the listed rows, their states and their owners.

        Ignores listed rows with another encoding, and quantized rows with another column range. If the block has
        states, overlapping listed rows must have the same column range and states. If the block has owners, the listed
        rows must have owners and the same encoding.
        """
        block = whole.block
        overlapping = self._index.overlapping(block.table, block.rows, block.columns)
        found = [each for each in overlapping if _fits(block, each.block)]
        if not found:
            return whole
        for each in found if whole.states else ():
            assert each.block.columns == block.columns, "rows with states overlap in whole column ranges only"
            assert len(each.states) == len(whole.states), "all blocks of a table have the same states"
        states = tuple(partial(self._overlaid, whole, state) for state in range(len(whole.states)))
        owners = None if whole.owners is None else partial(self._overlaid, whole, "owners")
        return BlockRows(block, None, partial(self._overlaid, whole, "values"), states, owners)

    def _overlaid(self, whole: BlockRows, column: Column, begin: int, end: int) -> Tensor:
        block = whole.block
        stored, is_copied = whole.reader(column)(begin, end), False
        rows = block.rows[0] + begin, block.rows[0] + end
        for each in self._index.overlapping(block.table, rows, block.columns):
            assert each.ids is not None, "listed"
            start, stop = range_within(each.ids, rows)
            if start == stop or not _fits(block, each.block):
                continue
            if not is_copied:  # the rows may be a view of the part
                stored, is_copied = stored.clone(), True
            newer, target = each.reader(column)(start, stop), stored
            if each.block.columns != block.columns:
                first = max(block.columns[0], each.block.columns[0])
                width = min(block.columns[1], each.block.columns[1]) - first
                newer = newer.narrow(1, first - each.block.columns[0], width)
                target = stored.narrow(1, first - block.columns[0], width)
            target.index_copy_(0, each.ids[start:stop] - rows[0], newer)
        return stored


class WholeBlocks:
    """Index of whole blocks, which must not overlap. It finds the listed rows that no block contains completely."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._index = _Index((block, block) for block in blocks)

    def outside(self, listed: BlockRows) -> Iterator[BlockRows]:
        """Yield the rows of ``listed`` that :meth:`Overlay.over` does not write completely into a single block."""
        block = listed.block
        holders = [
            whole.rows
            for whole in self._index.overlapping(block.table, block.rows, block.columns)
            if whole.columns[0] <= block.columns[0] and block.columns[1] <= whole.columns[1] and _fits(whole, block)
        ]
        first, end = block.rows
        for begin, stop in sorted(holders):
            if first < begin:
                yield listed.within((first, begin), block.columns)
            first = stop
        if first < end or not holders:
            yield listed.within((first, end), block.columns)


def newest(rows: Iterable[BlockRows]) -> tuple[list[BlockRows], list[BlockRows]]:
    """Return the whole blocks of ``rows``, updated with the listed rows, and the listed rows that no block contains."""
    whole: list[BlockRows] = []
    listed: list[BlockRows] = []
    for each in rows:
        (whole if each.ids is None else listed).append(each)
    if whole and listed:
        overlay, blocks = Overlay(listed), WholeBlocks(each.block for each in whole)
        whole = [overlay.over(each) for each in whole]
        listed = [left for each in listed for left in blocks.outside(each)]
    return whole, listed


class _Index(Generic[_T]):
    """Index of values by block, searchable by table, row range and column range. Omits empty blocks."""

    def __init__(self, entries: Iterable[tuple[Block, _T]]) -> None:
        self._tables: defaultdict[str, defaultdict[tuple[int, int], list[tuple[Block, _T]]]]
        self._tables = defaultdict(lambda: defaultdict(list))
        for block, value in sorted(entries, key=lambda entry: entry[0].rows):
            if block.num_rows:
                self._tables[block.table][block.columns].append((block, value))

    def overlapping(self, table: str, rows: tuple[int, int], columns: tuple[int, int]) -> Iterator[_T]:
        for held, entries in self._tables.get(table, {}).items():
            if held[0] < columns[1] and columns[0] < held[1]:
                first = bisect_right(entries, rows[0], key=lambda entry: entry[0].rows[1])
                stop = bisect_left(entries, rows[1], key=lambda entry: entry[0].rows[0])
                yield from [value for _, value in entries[first:stop]]


def _fits(whole: Block, listed: Block) -> bool:
    """Return True if the stored values of common columns can be copied from ``listed`` to ``whole`` unchanged."""
    is_alike = whole.encoding is listed.encoding
    return is_alike and (whole.columns == listed.columns or not whole.encoding.is_quantized)
