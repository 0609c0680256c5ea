"""Overlay of listed rows on whole blocks.

A whole block holds all rows of its range, and may be copied while training continues. Listed rows are stored with their
ids, and are newer. Readers and compaction first replace the rows of a whole block with the listed rows, so that no
outdated row is applied.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Generic, TypeVar

from torch import Tensor

from delta_tracker.stream.format.block_rows import BlockRows, Column, places_within
from delta_tracker.stream.format.manifest import Block


class Overlay:
    """Index of listed rows by block. Blocks of a table must not overlap. Lookups bisect twice per column range."""

    def __init__(self, listed: Iterable[BlockRows]) -> None:
        self._index = _Index((each.block, each) for each in listed)

    def over(self, whole: BlockRows) -> BlockRows:
        """Return the rows of a whole block with the listed rows, their states and their owners, written over them.

        Ignores listed rows with another encoding, or another column range of quantized rows. If the block has states,
        the overlapping listed rows must have the same column range and states; with owners, also owners and the same
        encoding.
        """
        block = whole.block
        found = [
            each for each in self._index.overlapping(block.table, block.rows, block.columns) if _fits(block, each.block)
        ]
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
            start, stop = places_within(each.ids, rows)
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
    """Index of whole blocks, which must not overlap, to find the listed rows that no whole block can take."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._index = _Index((block, block) for block in blocks)

    def outside(self, listed: BlockRows) -> Iterator[BlockRows]:
        """Yield the rows of ``listed`` of which :meth:`Overlay.over` does not write all columns over one block."""
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
    """Return whole blocks with listed rows written over them, and the other listed rows. Write them in this order."""
    every = list(rows)
    whole = [each for each in every if each.ids is None]
    listed = [each for each in every if each.ids is not None]
    if whole and listed:
        overlay, blocks = Overlay(listed), WholeBlocks(each.block for each in whole)
        whole = [overlay.over(each) for each in whole]
        listed = [left for each in listed for left in blocks.outside(each)]
    return whole, listed


_T = TypeVar("_T")


class _Index(Generic[_T]):
    """Index of values by block, searchable by table, row range and column range. Leaves out empty blocks.

    The blocks must not overlap. In each column range, the start and end indices of their row ranges then both ascend.
    """

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
    """Return True if stored values of the common columns can be copied from ``listed`` to ``whole``."""
    is_alike = whole.encoding is listed.encoding
    return is_alike and (whole.columns == listed.columns or not whole.encoding.is_quantized)
