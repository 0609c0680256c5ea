"""Map the rows of a version to targets (the tables of the model).

Each row is written once, with all columns in the version. If a table is sharded column-wise in the trainer, the version
contains its rows as several blocks. This module joins the blocks, because quantization of a row needs all columns.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from delta_tracker.errors import PartialRowsError
from delta_tracker.row_target import RowTarget
from delta_tracker.stream.format.block_rows import BlockRows


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Rows of a version that are written to one target.

    The blocks in ``rows`` contain the same row ids, and different column ranges in ascending order.
    """

    target: RowTarget
    rows: tuple[BlockRows, ...]

    def chunks(self, num_rows: int) -> "Iterator[Chunk]":
        """Yield chunks of at most ``num_rows`` rows, prepared for writing. The caller does not need the lock."""
        first, count = self.rows[0], self.rows[0].block.num_rows
        ids = slice(*first.block.rows) if first.ids is None else first.ids
        for begin in range(0, count, num_rows):
            end = min(begin + num_rows, count)
            values = [(rows.block.columns, rows.read(begin, end)) for rows in self.rows]
            if self.target.needs_whole_rows:
                values = _joined(values, self.target)
            ready = [(columns, self.target.prepare(each, columns)) for columns, each in values]
            held = slice(ids.start + begin, ids.start + end) if isinstance(ids, slice) else ids[begin:end]
            yield Chunk(self.target, held, ready, end - begin)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Rows that are prepared for one write to a target.

    ``ids`` are the ``num_rows`` int64 global row ids, ascending and unique, or a slice with start and stop. ``values``
    are pairs of a half-open column range and the result of ``target.prepare`` for these columns.
    """

    target: RowTarget
    ids: Tensor | slice
    values: Sequence[tuple[tuple[int, int], Tensor]]
    num_rows: int

    def write(self) -> None:
        """Write the rows. The caller must hold the lock for writing."""
        for columns, values in self.values:
            self.target.write(self.ids, values, columns)


def placements(rows: Iterable[BlockRows], targets: Mapping[str, RowTarget]) -> list[Placement]:
    """Assign the disjoint blocks ``rows`` of a version to ``targets``, without reading or writing values."""
    by_table: defaultdict[str, list[BlockRows]] = defaultdict(list)
    for each in rows:
        by_table[each.block.table].append(each)
    found: list[Placement] = []
    for fqn, blocks in by_table.items():
        target = targets[fqn]
        held = [part for block in blocks for part in _held(block, target)]
        for cell in _cells(held):
            for aligned in _aligned(cell):
                if aligned[0].block.num_rows:
                    if target.needs_whole_rows:
                        _check_whole(aligned, target)
                    found.append(Placement(target, aligned))
    return found


def _held(rows: BlockRows, target: RowTarget) -> list[BlockRows]:
    """Split a block at the column ranges of a target. Leave out rows and columns that are not in the target."""
    block, found = rows.block, []
    first, end = max(block.rows[0], target.rows[0]), min(block.rows[1], target.rows[1])
    for held in target.columns if first < end else ():
        columns = max(block.columns[0], held[0]), min(block.columns[1], held[1])
        if columns[0] < columns[1]:
            found.append(rows.within((first, end), columns))
    return found


def _cells(parts: Sequence[BlockRows]) -> list[list[BlockRows]]:
    """Split blocks at all edges of their row ranges. Return the blocks of each row range in column order."""
    if len(parts) == 1:
        return [[parts[0]]]
    edges = sorted({edge for each in parts for edge in each.block.rows})
    cells: defaultdict[int, list[BlockRows]] = defaultdict(list)
    for each in parts:
        begin, end = each.block.rows
        for cell in range(bisect_left(edges, begin), bisect_left(edges, end)):
            cells[cell].append(each.within((edges[cell], edges[cell + 1]), each.block.columns))
    return [sorted(cells[number], key=lambda each: each.block.columns) for number in sorted(cells)]


def _aligned(rows: Sequence[BlockRows]) -> list[tuple[BlockRows, ...]]:
    """Group the rows of one row range by their column ranges. The blocks of a group have the same ids."""
    if len(rows) == 1 or all(each.ids is None for each in rows):
        return [tuple(rows)]
    every = [torch.arange(*each.block.rows, device="cpu") if each.ids is None else each.ids for each in rows]
    if all(torch.equal(ids, every[0]) for ids in every[1:]):
        return [tuple(rows)]
    union: Tensor = torch.cat(every).unique()  # type: ignore[no-untyped-call]
    has = torch.stack([torch.isin(union, ids, assume_unique=True) for ids in every], dim=1)
    patterns, pattern_of = has.unique(dim=0, return_inverse=True)  # type: ignore[no-untyped-call]
    groups = []
    for number, pattern in enumerate(patterns.tolist()):
        ids = union[pattern_of == number]
        there = [(each, held) for each, held, is_there in zip(rows, every, pattern, strict=True) if is_there]
        groups.append(tuple(each.take(torch.searchsorted(held, ids)) for each, held in there))
    return groups


def _check_whole(rows: Sequence[BlockRows], target: RowTarget) -> None:
    found = [each.block.columns for each in rows]
    for first, end in target.columns:
        inside = [stop - start for start, stop in found if first <= start and stop <= end]
        if inside and sum(inside) != end - first:
            raise PartialRowsError(rows[0].block.table, rows[0].block.num_rows, found, (first, end))


def _joined(values: list[tuple[tuple[int, int], Tensor]], target: RowTarget) -> list[tuple[tuple[int, int], Tensor]]:
    """Concatenate the ``(column range, values)`` pairs, in column order, of each column range of a target."""
    joined = []
    for first, end in target.columns:
        inside = [each for columns, each in values if first <= columns[0] and columns[1] <= end]
        if inside:
            joined.append(((first, end), inside[0] if len(inside) == 1 else torch.cat(inside, dim=1)))
    return joined
