"""Merge of the rows of several versions, which keeps the newest value of each row and column range.

If all blocks of a table that overlap have the same encoding and columns, their rows are copied as they are stored.
Otherwise the rows are decoded to the table's dtype, split at every column edge, and stored in that dtype's encoding.
Readers get the same values in both cases, bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from delta_tracker.stream.format.block_rows import BlockRows, Column, gather
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Block
from delta_tracker.stream.format.part_reader import PartReader
from delta_tracker.types import TableSpec

Shape = tuple[tuple[int, int], Encoding]  # columns and encoding of a block


def loaded_rows(part: PartReader, *, of_whole_blocks: bool = False) -> list[BlockRows]:
    """Load the listed rows of a part, or those of its whole blocks as listed ones, with states and owners."""
    if all((block.ids == "all") != of_whole_blocks for block in part.part.blocks):
        return []  # without a read of the states
    found = [each for each in part.with_states() if (each.ids is None) == of_whole_blocks and each.block.num_rows]
    if of_whole_blocks:
        found = [each.take(torch.arange(each.block.num_rows)) for each in found]
    return [each.loaded() for each in found]


def newest_rows(rows: Iterable[BlockRows], tables: Mapping[str, TableSpec]) -> Iterator[BlockRows]:
    """Yield the newest rows of each table, in column ranges that do not overlap. Values are gathered lazily.

    ``rows`` are listed rows in memory, oldest first. All blocks of a table with states have its own encoding, and
    column ranges that are equal or do not overlap. All blocks of a table with owners have one encoding and all columns.
    """
    rows_of: dict[str, list[BlockRows]] = {}
    for each in rows:
        rows_of.setdefault(each.block.table, []).append(each)
    for fqn, held in rows_of.items():
        shapes = {(each.block.columns, each.block.encoding) for each in held}
        for columns, encoding in _column_ranges(shapes, Encoding.of(tables[fqn].dtype)):
            first, end = columns
            sources = [each for each in held if each.block.columns[0] <= first and end <= each.block.columns[1]]
            yield _newest(tables[fqn], columns, encoding, sources)


def _column_ranges(shapes: Collection[Shape], own: Encoding) -> Iterator[Shape]:
    """Yield disjoint column ranges that cover ``shapes``, split where these overlap, with the encoding ``own``."""
    groups: list[list[Shape]] = []
    covered = 0  # end of the columns of the groups
    for shape in sorted(shapes):
        first, end = shape[0]
        if first >= covered:
            groups.append([])
        groups[-1].append(shape)
        covered = max(covered, end)
    for group in groups:
        edges = sorted({edge for columns, _ in group for edge in columns})
        encoding = group[0][1] if len(group) == 1 else own
        yield from ((columns, encoding) for columns in itertools.pairwise(edges))


def _newest(table: TableSpec, columns: tuple[int, int], encoding: Encoding, sources: Sequence[BlockRows]) -> BlockRows:
    listed = [each.ids for each in sources if each.ids is not None]
    ids, order = torch.cat(listed).sort(stable=True)
    is_last = torch.ones_like(ids, dtype=torch.bool)
    is_last[:-1] = ids[1:] != ids[:-1]
    ids, winners = ids[is_last], order[is_last]
    starts = torch.tensor([0, *(len(each) for each in listed)]).cumsum(0)
    source = torch.searchsorted(starts, winners, right=True) - 1
    block = Block(table.fqn, (0, table.num_rows), columns, len(ids), encoding.listed_form, encoding)
    alike = [_shaped(each, columns, encoding, table.dtype) for each in sources]
    return _chosen(block, ids, alike, source, winners - starts[source])


def _chosen(block: Block, ids: Tensor, sources: Sequence[BlockRows], source: Tensor, place: Tensor) -> BlockRows:
    """Return for each of ``N`` ids the row at the index ``place`` of a source, with its states and owner.

    ``source``, ``[N]``, has the indices of the sources, which have the same columns in the same encoding.
    """

    def read(column: Column, begin: int, end: int) -> Tensor:
        chosen, places = source[begin:end], place[begin:end]
        like = sources[0].reader(column)(0, 0)
        out = like.new_empty(end - begin, like.shape[1])
        for number in set(chosen.tolist()):
            wanted = (chosen == number).nonzero()[:, 0]
            out.index_copy_(0, wanted, gather(sources[number].reader(column), places[wanted]))
        return out

    states = tuple(partial(read, state) for state in range(len(sources[0].states)))
    owners = None if sources[0].owners is None else partial(read, "owners")
    return BlockRows(block, ids, partial(read, "values"), states, owners)


def _shaped(rows: BlockRows, columns: tuple[int, int], encoding: Encoding, dtype: torch.dtype) -> BlockRows:
    if (rows.block.columns, rows.block.encoding) == (columns, encoding):
        return rows
    assert not rows.states, "rows with states have equal column ranges and encodings"
    assert rows.owners is None, "rows with owners have equal encodings and all columns"
    return rows.decoded(dtype).within(rows.block.rows, columns)
