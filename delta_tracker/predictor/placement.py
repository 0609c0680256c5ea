"""The rows of a version, cut to what the targets hold: each row once, with all of its columns at once.

A trainer writes a column-wise table as several blocks. They are joined here, because a row that is written half by half
is torn, and because a quantised row can be made from all of its columns only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from delta_tracker.errors import InvalidArgumentError, PartialRowsError
from delta_tracker.row_target import RowTarget
from delta_tracker.stream.format.contents import BlockRows


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """Rows of a block that are read when they are needed.

    Args:
        rows: the block.
        places: which of its rows: ``[N]`` int64, ascending, or a slice.
        columns: half-open range of columns, counted within the block.
    """

    rows: BlockRows
    places: Tensor | slice
    columns: tuple[int, int]

    def __len__(self) -> int:
        return self.places.stop - self.places.start if isinstance(self.places, slice) else len(self.places)

    def between(self, begin: int, end: int) -> Values:
        """Some of them, by their order here."""
        if isinstance(self.places, slice):
            start = self.places.start
            return Values(self.rows, slice(start + begin, start + end), self.columns)
        return Values(self.rows, self.places[begin:end], self.columns)

    def take(self, places: Tensor) -> Values:
        """Those at ``places``, ``[n]`` int64, ascending."""
        if isinstance(self.places, slice):
            return Values(self.rows, places + self.places.start, self.columns)
        return Values(self.rows, self.places[places], self.columns)

    def read(self) -> Tensor:
        """``[N, columns]`` in the table's dtype."""
        if isinstance(self.places, slice):
            values = self.rows.read(self.places.start, self.places.stop)
        else:
            first = int(self.places[0])
            values = self.rows.read(first, int(self.places[-1]) + 1).index_select(0, self.places - first)
        return values if self.columns == (0, values.shape[1]) else values[:, self.columns[0] : self.columns[1]]


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Some columns of rows."""

    columns: tuple[int, int]
    values: Values


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Rows on their way to a target.

    Args:
        target: where they go.
        ids: ``[N]`` int64 global row ids, ascending and unique; or a slice of them.
        pieces: their columns as they came, ascending and disjoint.
    """

    target: RowTarget
    ids: Tensor | slice
    pieces: tuple[Piece, ...]

    @property
    def num_rows(self) -> int:
        """``N``."""
        return len(self.pieces[0].values)

    def chunks(self, num_rows: int) -> Iterator[Chunk]:
        """The same rows in chunks that are ready to be written. Lookups may go on meanwhile.

        Args:
            num_rows: rows of a chunk, at most.

        Raises:
            InvalidArgumentError: for a count under 1.
        """
        if num_rows < 1:
            raise InvalidArgumentError("num_rows", num_rows, "Pass a count of 1 or more")
        for begin in range(0, self.num_rows, num_rows):
            end = min(begin + num_rows, self.num_rows)
            pieces = [(piece.columns, piece.values.between(begin, end).read()) for piece in self.pieces]
            if self.target.needs_whole_rows:
                pieces = _joined(pieces, self.target)
            ready = [(columns, self.target.prepare(values, columns)) for columns, values in pieces]
            first = self.ids.start if isinstance(self.ids, slice) else 0
            ids = slice(first + begin, first + end) if isinstance(self.ids, slice) else self.ids[begin:end]
            yield Chunk(self.target, ids, ready)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Rows that are ready for their target, by column range."""

    target: RowTarget
    ids: Tensor | slice
    pieces: Sequence[tuple[tuple[int, int], Tensor]]

    @property
    def num_rows(self) -> int:
        """How many."""
        return self.ids.stop - self.ids.start if isinstance(self.ids, slice) else len(self.ids)

    def write(self) -> None:
        """Write them. No lookup may go on meanwhile."""
        for columns, values in self.pieces:
            self.target.write(self.ids, values, columns)


def place(rows: Iterable[BlockRows], targets: Mapping[str, RowTarget]) -> list[Placement]:
    """Cut all rows of a version to what the targets hold.

    Nothing is written, and no values are read yet.

    Args:
        rows: the blocks of one version, of one table or several; none overlap.
        targets: FQN to target, one for each table.

    Raises:
        PartialRowsError: if a target needs whole rows and the version has only some columns of a row.
    """
    by_table: defaultdict[str, list[BlockRows]] = defaultdict(list)
    for each in rows:
        by_table[each.block.table].append(each)
    return [placement for fqn, blocks in by_table.items() for placement in _place(blocks, targets[fqn])]


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """Rows of one block in a row range and a column range."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    ids: Tensor | None  # None for every row of the range
    values: Values

    def between(self, first: int, end: int) -> _Cut:
        """What of it lies in a row range."""
        if (first, end) == self.rows:
            return self
        if self.ids is None:
            begin, stop = first - self.rows[0], end - self.rows[0]
            return _Cut((first, end), self.columns, None, self.values.between(begin, stop))
        begin, stop = torch.searchsorted(self.ids, torch.tensor([first, end])).tolist()
        return _Cut((first, end), self.columns, self.ids[begin:stop], self.values.between(begin, stop))


def _place(blocks: Sequence[BlockRows], target: RowTarget) -> Iterator[Placement]:
    cuts = [cut for rows in blocks for cut in _cuts(rows, target)]
    edges = sorted({edge for cut in cuts for edge in cut.rows})
    cells: defaultdict[int, list[_Cut]] = defaultdict(list)
    for cut in cuts:
        for cell in range(bisect_left(edges, cut.rows[0]), bisect_left(edges, cut.rows[1])):
            cells[cell].append(cut.between(edges[cell], edges[cell + 1]))
    for cell in sorted(cells):
        for ids, pieces in _aligned(sorted(cells[cell], key=lambda cut: cut.columns)):
            if len(pieces[0].values):
                if target.needs_whole_rows:
                    _check_whole(blocks[0].block.table, pieces, target)
                yield Placement(target, ids, pieces)


def _cuts(rows: BlockRows, target: RowTarget) -> Iterator[_Cut]:
    """A block without what the target does not hold."""
    block = rows.block
    first, end = max(block.rows[0], target.rows[0]), min(block.rows[1], target.rows[1])
    if first >= end:
        return
    for held in target.columns:
        columns = max(block.columns[0], held[0]), min(block.columns[1], held[1])
        if columns[0] < columns[1]:
            inside = columns[0] - block.columns[0], columns[1] - block.columns[0]
            values = Values(rows, slice(0, block.num_rows), inside)
            yield _Cut(block.rows, columns, rows.ids, values).between(first, end)


def _aligned(cuts: Sequence[_Cut]) -> Iterator[tuple[Tensor | slice, tuple[Piece, ...]]]:
    """Group rows of one row range by the columns that there are of them."""
    if all(cut.ids is None for cut in cuts):
        yield slice(*cuts[0].rows), tuple(Piece(cut.columns, cut.values) for cut in cuts)
        return
    every = [torch.arange(*cut.rows) if cut.ids is None else cut.ids for cut in cuts]
    if all(torch.equal(ids, every[0]) for ids in every[1:]):
        yield every[0], tuple(Piece(cut.columns, cut.values) for cut in cuts)
        return
    union: Tensor = torch.cat(every).unique()  # type: ignore[no-untyped-call]
    has = torch.stack([torch.isin(union, ids, assume_unique=True) for ids in every], dim=1)
    patterns, pattern_of = has.unique(dim=0, return_inverse=True)  # type: ignore[no-untyped-call]
    for number, pattern in enumerate(patterns.tolist()):
        ids = union[pattern_of == number]
        yield (
            ids,
            tuple(
                Piece(cut.columns, cut.values.take(torch.searchsorted(held, ids)))
                for cut, held, is_there in zip(cuts, every, pattern, strict=True)
                if is_there
            ),
        )


def _check_whole(table: str, pieces: Sequence[Piece], target: RowTarget) -> None:
    found = [piece.columns for piece in pieces]
    for first, end in target.columns:
        inside = [stop - start for start, stop in found if first <= start and stop <= end]
        if inside and sum(inside) != end - first:
            raise PartialRowsError(table, len(pieces[0].values), found, (first, end))


def _joined(
    pieces: Sequence[tuple[tuple[int, int], Tensor]], target: RowTarget
) -> list[tuple[tuple[int, int], Tensor]]:
    """One piece for each column range of the target that there is anything of."""
    joined = []
    for first, end in target.columns:
        inside = [values for columns, values in pieces if first <= columns[0] and columns[1] <= end]
        if inside:
            joined.append(((first, end), inside[0] if len(inside) == 1 else torch.cat(inside, dim=1)))
    return joined
