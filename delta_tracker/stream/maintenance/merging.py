"""Rows of several versions as those of one: of each row, and each range of columns, the newest wins.

Where all pieces of a table that overlap have one encoding and the same columns, rows stay as they are stored. Otherwise
they are read to the table's dtype, cut at all edges of the columns, and stored in the table's own encoding: what a
reader holds in the end is the same, bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from delta_tracker.stream.format.encoding import Encoding, decode_rows
from delta_tracker.stream.format.manifest import Block, IdForm
from delta_tracker.stream.format.part_reader import PartReader, RowChunk
from delta_tracker.stream.format.part_writer import Rows
from delta_tracker.types import TableSpec

_CHUNK_BYTES = 4 << 20

Shape = tuple[tuple[int, int], Encoding]  # of a block: its columns, and how it is stored


@dataclass(frozen=True, slots=True, eq=False)
class Newest:
    """The newest rows of one column range of a table, gathered when they are asked for.

    Args:
        table: whose rows.
        columns: half-open range.
        encoding: how they are stored.
        ids: ``[N]`` int64, ascending and unique.
        sources: the chunks that hold them, oldest first.
        source: ``[N]`` which one of ``sources``.
        place: ``[N]`` which of its rows.
    """

    table: TableSpec
    columns: tuple[int, int]
    encoding: Encoding
    ids: Tensor
    sources: Sequence[RowChunk]
    source: Tensor
    place: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows and ids, the ids uncompressed."""
        width = self.encoding.width(self.columns[1] - self.columns[0])
        return len(self) * (width * self.encoding.dtype.itemsize + self.ids.itemsize)

    def stored(self, index: Tensor) -> Tensor:
        """``[M, width]`` rows, of the places ``index`` ``[M]`` in :attr:`ids`."""
        width = self.encoding.width(self.columns[1] - self.columns[0])
        out = torch.empty(len(index), width, dtype=self.encoding.dtype)
        source, place = self.source[index], self.place[index]
        for number in set(source.tolist()):
            wanted = (source == number).nonzero()[:, 0]
            out.index_copy_(0, wanted, self._rows(self.sources[number], place[wanted]))
        return out

    def rows(self, index: Tensor | None = None) -> Rows:
        """A block of these rows, of those at ``index`` only where it is given."""
        ids = self.ids if index is None else self.ids[index]
        places = torch.arange(len(ids)) if index is None else index
        form: IdForm = "gaps" if self.encoding.is_quantized else "list"
        block = Block(self.table.fqn, (0, self.table.num_rows), self.columns, len(ids), form, self.encoding)
        step = max(1, _CHUNK_BYTES // block.row_bytes)
        return Rows(block, ids, _Chunks(self, places, step))

    def fits(self, block: Block) -> bool:
        """Whether its rows can stand among those of a block as they are stored."""
        inside = block.columns[0] <= self.columns[0] and self.columns[1] <= block.columns[1]
        is_same = block.columns == self.columns
        is_stored_alike = block.table == self.table.fqn and block.encoding == self.encoding
        return is_stored_alike and (is_same or (inside and not self.encoding.is_quantized))

    def outside(self, blocks: Iterable[Block]) -> Tensor:
        """``[M]`` places of the rows that can stand in none of the blocks."""
        is_outside = torch.ones(len(self), dtype=torch.bool)
        for block in filter(self.fits, blocks):
            begin, end = torch.searchsorted(self.ids, torch.tensor(block.rows)).tolist()
            is_outside[begin:end] = False
        return is_outside.nonzero()[:, 0]

    def _rows(self, chunk: RowChunk, places: Tensor) -> Tensor:
        stored, block = chunk.stored.index_select(0, places), chunk.block
        if block.columns == self.columns and block.encoding == self.encoding:
            return stored
        values = decode_rows(stored, block.encoding, block.num_columns, self.table.dtype)
        return values[:, self.columns[0] - block.columns[0] : self.columns[1] - block.columns[0]]


@dataclass(frozen=True, slots=True, eq=False)
class _Chunks:
    """Rows in pieces, each gathered when it is asked for."""

    newest: Newest
    places: Tensor
    step: int

    def __iter__(self) -> Iterator[Tensor]:
        return (
            self.newest.stored(self.places[begin : begin + self.step])
            for begin in range(0, len(self.places), self.step)
        )


def listed_rows(part: PartReader) -> Iterator[RowChunk]:
    """The rows of those blocks of a part that list them, a chunk for each block."""
    for index, block in enumerate(part.part.blocks):
        if block.ids != "all":
            yield from part.chunks(index, max(1, block.num_rows))


def newest_rows(chunks: Iterable[RowChunk], tables: Mapping[str, TableSpec]) -> Iterator[Newest]:
    """The newest rows of each table, in ranges of columns that do not overlap.

    Args:
        chunks: listed rows, oldest first.
        tables: FQN to table.
    """
    chunks_of: dict[str, list[RowChunk]] = {}
    for chunk in chunks:
        chunks_of.setdefault(chunk.block.table, []).append(chunk)
    for fqn, held in chunks_of.items():
        shapes = {(each.block.columns, each.block.encoding) for each in held}
        for columns, encoding in _column_ranges(shapes, Encoding.of(tables[fqn].dtype)):
            first, end = columns
            sources = [each for each in held if each.block.columns[0] <= first and end <= each.block.columns[1]]
            yield _newest(tables[fqn], columns, encoding, sources)


def laid_over(chunks: Iterable[RowChunk], newest: Collection[Newest]) -> Iterator[Tensor]:
    """A whole block's rows as stored, with newer ones in their places."""
    for chunk in chunks:
        stored, block = chunk.stored, chunk.block
        limits = torch.tensor([chunk.first, chunk.first + len(stored)])
        is_copied = False
        for each in newest:
            begin, end = torch.searchsorted(each.ids, limits).tolist()
            if begin == end:
                continue
            if not is_copied:  # chunks are views of what the reader holds
                stored, is_copied = stored.clone(), True
            rows = each.stored(torch.arange(begin, end))
            first = each.columns[0] - block.columns[0]
            stored[:, first : first + rows.shape[1]].index_copy_(0, each.ids[begin:end] - chunk.first, rows)
        yield stored


def _column_ranges(shapes: Collection[Shape], own: Encoding) -> Iterator[Shape]:
    """The columns of ``shapes`` in ranges that do not overlap."""
    group: list[Shape] = []
    for shape in sorted(shapes):
        if group and shape[0][0] >= max(end for (_, end), _ in group):
            yield from _cut(group, own)
            group = []
        group.append(shape)
    yield from _cut(group, own)


def _cut(group: Sequence[Shape], own: Encoding) -> Iterator[Shape]:
    """One shape stays as it is; several that hang together are cut at all their edges."""
    if len(group) == 1:
        yield group[0]
    else:
        edges = sorted({edge for columns, _ in group for edge in columns})
        yield from ((columns, own) for columns in itertools.pairwise(edges))


def _newest(table: TableSpec, columns: tuple[int, int], encoding: Encoding, sources: Sequence[RowChunk]) -> Newest:
    listed = [each.ids for each in sources if each.ids is not None]
    ids, order = torch.cat(listed).sort(stable=True)
    is_last = torch.ones_like(ids, dtype=torch.bool)
    is_last[:-1] = ids[1:] != ids[:-1]
    winners = order[is_last]
    starts = torch.tensor([0, *(len(each) for each in listed)]).cumsum(0)
    source = torch.searchsorted(starts, winners, right=True) - 1
    return Newest(table, columns, encoding, ids[is_last], sources, source, winners - starts[source])
