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
from delta_tracker.stream.codec import Rows


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Some columns of rows: ``values`` is ``[N, columns]``."""

    columns: tuple[int, int]
    values: Tensor


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
        return self.pieces[0].values.shape[0]

    def chunks(self, num_rows: int) -> Iterator[Placement]:
        """The same rows in chunks that are ready for :meth:`write`. Lookups may go on meanwhile.

        Args:
            num_rows: rows of a chunk, at most.

        Raises:
            InvalidArgumentError: for a count under 1.
        """
        if num_rows < 1:
            raise InvalidArgumentError("num_rows", num_rows, "Pass a count of 1 or more")
        for begin in range(0, self.num_rows, num_rows):
            end = min(begin + num_rows, self.num_rows)
            pieces = [Piece(piece.columns, piece.values[begin:end]) for piece in self.pieces]
            if self.target.needs_whole_rows:
                pieces = _joined(pieces, self.target)
            ready = [Piece(piece.columns, self.target.prepare(piece.values, piece.columns)) for piece in pieces]
            first = self.ids.start if isinstance(self.ids, slice) else 0
            ids = slice(first + begin, first + end) if isinstance(self.ids, slice) else self.ids[begin:end]
            yield Placement(self.target, ids, tuple(ready))

    def write(self) -> None:
        """Write a chunk. No lookup may go on meanwhile."""
        for piece in self.pieces:
            self.target.write(self.ids, piece.values, piece.columns)


def place(rows: Iterable[Rows], targets: Mapping[str, RowTarget]) -> list[Placement]:
    """Cut all rows of a version to what the targets hold.

    Nothing is written, and values are copied only where column blocks of one table have different rows.

    Args:
        rows: the blocks of one version, of one table or several; none overlap.
        targets: FQN to target, one for each table.

    Raises:
        PartialRowsError: if a target needs whole rows and the version has only some columns of a row.
    """
    by_table: defaultdict[str, list[Rows]] = defaultdict(list)
    for each in rows:
        by_table[each.block.table].append(each)
    return [placement for fqn, blocks in by_table.items() for placement in _place(blocks, targets[fqn])]


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """Rows of one block in a row range and a column range."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    ids: Tensor | None  # None for every row of the range
    values: Tensor

    def between(self, first: int, end: int) -> _Cut:
        """What of it lies in a row range."""
        if (first, end) == self.rows:
            return self
        if self.ids is None:
            begin, stop = first - self.rows[0], end - self.rows[0]
            return _Cut((first, end), self.columns, None, self.values[begin:stop])
        begin, stop = torch.searchsorted(self.ids, torch.tensor([first, end])).tolist()
        return _Cut((first, end), self.columns, self.ids[begin:stop], self.values[begin:stop])


def _place(blocks: Sequence[Rows], target: RowTarget) -> Iterator[Placement]:
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


def _cuts(rows: Rows, target: RowTarget) -> Iterator[_Cut]:
    """A block without what the target does not hold."""
    block = rows.block
    first, end = max(block.rows[0], target.rows[0]), min(block.rows[1], target.rows[1])
    if first >= end:
        return
    for held in target.columns:
        columns = max(block.columns[0], held[0]), min(block.columns[1], held[1])
        if columns[0] < columns[1]:
            values = rows.values[:, columns[0] - block.columns[0] : columns[1] - block.columns[0]]
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
                Piece(cut.columns, cut.values.index_select(0, torch.searchsorted(held, ids)))
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


def _joined(pieces: Sequence[Piece], target: RowTarget) -> list[Piece]:
    """One piece for each column range of the target that there is anything of."""
    joined = []
    for first, end in target.columns:
        inside = [piece.values for piece in pieces if first <= piece.columns[0] and piece.columns[1] <= end]
        if inside:
            joined.append(Piece((first, end), inside[0] if len(inside) == 1 else torch.cat(inside, dim=1)))
    return joined
