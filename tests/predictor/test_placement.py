"""Rows sent to targets are cut to the target's range, each once and with all its columns."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from delta_tracker.errors import PartialRowsError
from delta_tracker.predictor.placement import placements
from delta_tracker.row_target import RowTarget
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Block

_FQN = "t"
_TABLE = torch.arange(1.0, 49.0).view(8, 6)


def _rows(rows: tuple[int, int], columns: tuple[int, int], ids: list[int] | None, table: Tensor) -> BlockRows:
    """Return a block of ``table``; with ``ids`` None it is whole."""
    whole = ids is None
    held = torch.arange(*rows) if whole else torch.tensor(ids, dtype=torch.int64)
    values = table[held, columns[0] : columns[1]]
    block = Block(_FQN, rows, columns, len(held), "all" if whole else "list", Encoding.F32)
    return BlockRows.of(block, None if whole else held, values)


class _Recorder(RowTarget):
    """A float table that checks its arguments against the contract."""

    def __init__(
        self, table: Tensor, rows: tuple[int, int], columns: tuple[tuple[int, int], ...], *, whole: bool = False
    ) -> None:
        self.num_rows, self.dim = table.shape
        self.dtype = table.dtype
        self.rows, self.columns, self.needs_whole_rows = rows, columns, whole
        self.table = table
        self.writes: list[list[int]] = []

    def prepare(self, values: Tensor, columns: tuple[int, int]) -> Tensor:
        return values + 1

    def write(self, ids: Tensor | slice, values: Tensor, columns: tuple[int, int]) -> None:
        listed = list(range(ids.start, ids.stop)) if isinstance(ids, slice) else ids.tolist()
        assert listed == sorted(set(listed))
        assert self.rows[0] <= listed[0]
        assert listed[-1] < self.rows[1]
        assert values.shape == (len(listed), columns[1] - columns[0])
        if self.needs_whole_rows:
            assert columns in self.columns
        assert any(first <= columns[0] < columns[1] <= end for first, end in self.columns)
        self.table[listed, columns[0] : columns[1]] = values - 1
        self.writes.append(listed)


def _edges(draw: Any, end: int) -> list[tuple[int, int]]:
    """Draw ranges that cover 0 up to ``end``."""
    cuts = sorted({0, end, *draw(st.lists(st.integers(1, end), max_size=3))})
    return list(itertools.pairwise(cuts))


@st.composite
def _versions(draw: Any) -> tuple[Tensor, list[BlockRows]]:
    """Draw a trainer's table, and blocks of it as any sharding may produce them."""
    num_rows, dim = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    table = torch.arange(1.0, num_rows * dim + 1).view(num_rows, dim)
    blocks = []
    rows = None
    for columns in _edges(draw, dim):
        if rows is None or draw(st.booleans()):
            rows = _edges(draw, num_rows)
        ids = None
        for first, end in rows:
            kind = draw(st.sampled_from(["whole", "same", "other"]))
            if kind == "whole":
                ids = None
            elif kind == "other" or ids is None:
                ids = sorted(draw(st.sets(st.integers(0, num_rows - 1))))
            held = None if ids is None else [row for row in ids if first <= row < end]
            blocks.append(_rows((first, end), columns, held, table))
    return table, draw(st.permutations(blocks))


@st.composite
def _held(draw: Any, size: int) -> tuple[int, int]:
    first = draw(st.integers(0, size))
    return first, draw(st.integers(first, size))


@settings(deadline=None)
@given(st.data())
def test_every_row_is_written_once_with_all_its_columns(data: Any) -> None:
    table, blocks = data.draw(_versions())
    num_rows, dim = table.shape
    cuts = sorted(data.draw(st.sets(st.integers(0, dim), max_size=4)))
    columns = tuple(zip(cuts[::2], cuts[1::2], strict=False))
    target = _Recorder(torch.zeros(num_rows, dim), data.draw(_held(num_rows)), columns)
    expected = torch.zeros(num_rows, dim)
    for block in blocks:  # slow reference: cell by cell
        ids = range(*block.block.rows) if block.ids is None else block.ids.tolist()
        for row in ids:
            for column in range(*block.block.columns):
                held = any(first <= column < end for first, end in columns)
                if held and target.rows[0] <= row < target.rows[1]:
                    expected[row, column] = table[row, column]
    chunk_rows = data.draw(st.integers(1, 5))
    seen: list[int] = []
    for placement in placements(blocks, {_FQN: target}):
        for chunk in placement.chunks(chunk_rows):
            target.writes.clear()
            chunk.write()
            assert len(target.writes[0]) <= chunk_rows
            assert all(ids == target.writes[0] for ids in target.writes)
            seen += target.writes[0]
    assert torch.equal(target.table, expected)
    assert len(seen) == len(set(seen))
    assert set(seen) == set(expected.any(dim=1).nonzero().flatten().tolist())


def test_whole_blocks_are_neither_copied_nor_given_ids() -> None:
    table = _TABLE[:, :4]
    target = _Recorder(torch.zeros(8, 4), (2, 7), ((0, 4),))
    blocks = [_rows((0, 8), (0, 2), None, table), _rows((0, 8), (2, 4), None, table)]
    (placement,) = placements(blocks, {_FQN: target})
    chunks = list(placement.chunks(2))
    assert [chunk.ids for chunk in chunks] == [slice(2, 4), slice(4, 6), slice(6, 7)]
    assert [rows.read(0, 5).data_ptr() for rows in placement.rows] == [
        block.read(2, block.block.num_rows).data_ptr() for block in blocks
    ]
    for chunk in chunks:
        chunk.write()
    assert torch.equal(target.table[2:7], table[2:7])
    assert not target.table[:2].any()


def test_equal_ids_are_not_copied() -> None:
    table = _TABLE[:, :4]
    blocks = [_rows((0, 8), columns, [1, 4, 6], table) for columns in ((0, 2), (2, 4))]
    (placement,) = placements(blocks, {_FQN: _Recorder(torch.zeros(8, 4), (0, 8), ((0, 4),))})
    assert [rows.read(0, 3).data_ptr() for rows in placement.rows] == [
        block.read(0, block.block.num_rows).data_ptr() for block in blocks
    ]


def test_as_many_ids_are_not_the_same_ids() -> None:
    target = _Recorder(torch.zeros(8, 4), (0, 8), ((0, 4),))
    blocks = [_rows((0, 8), (0, 2), [1, 4], _TABLE), _rows((0, 8), (2, 4), [1, 5], _TABLE)]
    for placement in placements(blocks, {_FQN: target}):
        for chunk in placement.chunks(8):
            chunk.write()
    expected = torch.zeros(8, 4)
    expected[[1, 4], :2], expected[[1, 5], 2:] = _TABLE[[1, 4], :2], _TABLE[[1, 5], 2:4]
    assert torch.equal(target.table, expected)


def test_whole_rows_are_joined_or_refused() -> None:
    table = _TABLE
    target = _Recorder(torch.zeros(8, 6), (0, 8), ((0, 4), (4, 6)), whole=True)
    blocks = [_rows((0, 8), (0, 2), [1, 5], table), _rows((0, 8), (2, 6), [1, 5], table)]
    for placement in placements(reversed(blocks), {_FQN: target}):
        for chunk in placement.chunks(8):
            chunk.write()
    assert torch.equal(target.table[[1, 5]], table[[1, 5]])
    assert target.writes == [[1, 5], [1, 5]]
    blocks[0] = _rows((0, 8), (0, 2), [1, 3, 4, 5], table)
    with pytest.raises(PartialRowsError, match=r"'t'.*\(0, 2\)") as caught:
        placements(blocks, {_FQN: target})
    assert (caught.value.table, caught.value.found, caught.value.needed) == (_FQN, ((0, 2),), (0, 4))
    assert caught.value.num_rows == 2
    # only one of the target's ranges is whole
    (placement,) = placements([_rows((0, 8), (4, 6), [2], table)], {_FQN: target})
    (chunk,) = placement.chunks(8)
    chunk.write()
    assert torch.equal(target.table[2, 4:], table[2, 4:])


def test_a_target_without_rows_receives_no_rows() -> None:
    table = _TABLE[:, :4]
    blocks = [_rows((0, 8), (0, 4), [1, 5], table)]
    for rows, columns in (((0, 0), ()), ((0, 8), ()), ((2, 5), ((0, 4),)), ((5, 5), ((0, 4),))):
        assert not placements(blocks, {_FQN: _Recorder(torch.zeros(8, 4), rows, columns)})
