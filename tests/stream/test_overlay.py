"""Overlay of listed rows on whole blocks: equal to cell by cell, in time linear in the number of blocks."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from delta_tracker import Predictor
from delta_tracker.stream.format.block_rows import BlockRows, Overlay, WholeBlocks
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Block
from delta_tracker.stream.storage.storage import Storage
from tests.stream.streams import FQN, Writer, chunks_of


def _ranges(draw: Any, end: int) -> list[tuple[int, int]]:
    cuts = sorted({0, end, *draw(st.lists(st.integers(1, end), max_size=3))})
    return list(itertools.pairwise(cuts))


def _write(state: Tensor, rows: BlockRows) -> None:
    """Apply the rows of a block, one by one."""
    for ids, stored in chunks_of(rows, 3):
        for row, values in zip(ids, stored, strict=True):
            state[row, slice(*rows.block.columns)] = values


@st.composite
def _blocks(draw: Any, num_rows: int, dim: int, first_value: float, *, is_whole: bool) -> list[BlockRows]:
    """Draw blocks of any rows and columns that do not overlap."""
    found = []
    for columns in _ranges(draw, dim):
        for rows in _ranges(draw, num_rows):
            encoding = draw(st.sampled_from([Encoding.F32, Encoding.BF16]))
            listed = draw(st.sets(st.integers(*rows).filter(lambda row, end=rows[1]: row < end)))
            ids = None if is_whole else torch.tensor(sorted(listed), dtype=torch.int64)
            count = rows[1] - rows[0] if ids is None else len(ids)
            block = Block(FQN, rows, columns, count, "all" if is_whole else "list", encoding)
            first_value += 100
            values = torch.arange(count * block.num_columns).view(count, block.num_columns) % 16 + first_value
            found.append(BlockRows.of(block, ids, values.to(encoding.dtype)))
    return draw(st.permutations(found))


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_overlaid_rows_and_the_rest_are_all_rows(data: Any) -> None:
    num_rows, dim = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5))
    whole = data.draw(_blocks(num_rows, dim, 0, is_whole=True))
    listed = data.draw(_blocks(num_rows, dim, 10_000, is_whole=False))
    expected = torch.zeros(num_rows, dim)
    for rows in (*whole, *listed):
        _write(expected, rows)
    overlay, blocks = Overlay(listed), WholeBlocks(each.block for each in whole)
    overlaid = [overlay.over(each) for each in whole]
    rest = [left for each in listed for left in blocks.outside(each)]
    state = torch.zeros(num_rows, dim)
    for rows in (*overlaid, *rest):
        _write(state, rows)
    assert torch.equal(state, expected)
    # With one encoding, only rows whose columns are in several whole blocks are left.
    alike = Overlay(each.decoded(torch.float32) for each in listed)
    state = torch.zeros(num_rows, dim)
    for each in whole:
        _write(state, alike.over(each.decoded(torch.float32)))
    assert torch.equal(state, expected)


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_values_and_states_are_from_the_same_rows(data: Any) -> None:
    """Each state is a function of the value, in every block, so it must be so in what is overlaid."""
    num_rows, dim = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5))
    declared = _ranges(data.draw, dim)
    newest = torch.zeros(num_rows, dim)
    blocks: dict[bool, list[BlockRows]] = {True: [], False: []}
    for is_whole in (True, False):
        for columns in declared:
            for rows in _ranges(data.draw, num_rows):
                listed = data.draw(st.sets(st.integers(*rows).filter(lambda row, end=rows[1]: row < end)))
                ids = None if is_whole else torch.tensor(sorted(listed), dtype=torch.int64)
                count = rows[1] - rows[0] if ids is None else len(ids)
                block = Block(FQN, rows, columns, count, "all" if is_whole else "list", Encoding.F32)
                values = torch.rand(count, block.num_columns)
                states = [values.sum(1, keepdim=True), values + 1]
                readers = tuple(BlockRows.of(block, ids, each).read for each in states)
                blocks[is_whole].append(BlockRows(block, ids, BlockRows.of(block, ids, values).read, readers))
                _write(newest, blocks[is_whole][-1])
    overlay, index = Overlay(blocks[False]), WholeBlocks(each.block for each in blocks[True])
    found = [overlay.over(each) for each in blocks[True]]
    assert not [each for listed in blocks[False] for each in index.outside(listed) if each.block.num_rows]
    for rows in found:
        (first, end), columns = rows.block.rows, slice(*rows.block.columns)
        assert torch.equal(rows.read(0, end - first), newest[first:end, columns])
        for begin in range(end - first):
            values = rows.read(begin, begin + 1)
            sums, moments = (read(begin, begin + 1) for read in rows.states)
            assert torch.equal(sums, values.sum(1, keepdim=True))
            assert torch.equal(moments, values + 1)


def test_the_rows_of_a_part_are_not_written_to() -> None:
    held = torch.zeros(4, 2)
    whole = BlockRows.of(Block(FQN, (0, 4), (0, 2), 4, "all", Encoding.F32), None, held)
    newer = BlockRows.of(Block(FQN, (0, 4), (1, 2), 1, "list", Encoding.F32), torch.tensor([2]), torch.ones(1, 1))
    assert Overlay([newer]).over(whole).read(1, 4).tolist() == [[0, 0], [0, 1], [0, 0]]
    assert not held.any()


@pytest.mark.parametrize("has_whole", [True, False])
def test_thousands_of_blocks_apply_quickly(has_whole: bool) -> None:
    """Comparing all listed blocks with all whole ones took 25 seconds."""
    num_blocks, rows_per_block = 2000, 4
    writer = Writer(Storage("memory://"), num_rows=num_blocks * rows_per_block, dim=2)
    writer.table.normal_()
    rows = []
    for begin in range(0, len(writer.table), rows_per_block):
        held = begin, begin + rows_per_block
        whole = Block(FQN, held, (0, 2), rows_per_block, "all", Encoding.F32)
        values = writer.table[slice(*held)].clone()
        values[1] = -1
        rows.append(BlockRows.of(whole, None, values))
        listed, ids = Block(FQN, held, (0, 2), 1, "list", Encoding.F32), torch.tensor([begin + 1])
        rows.append(BlockRows.of(listed, ids, writer.table[ids]))
    model = {FQN: torch.zeros_like(writer.table)}
    predictor = Predictor(model, writer.storage)
    writer.snapshot()
    predictor.sync()
    if has_whole:
        writer.write("snapshot", rows)
    else:
        model[FQN][1::rows_per_block] = 0
        writer.write("delta", rows[1::2])
    begin = time.thread_time()
    predictor.sync()
    seconds = time.thread_time() - begin
    assert torch.equal(model[FQN], writer.table)
    assert seconds < 10
