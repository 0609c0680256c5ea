"""Rows that change most often and the distances that they move, against the data that the test wrote."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_tracker.cli.movement import Movement, RowCounts
from delta_tracker.monitor.buckets import RELATIVE_ERROR
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Block
from delta_tracker.stream.format.part_reader import Contents
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import TableSpec
from tests.cli.trainer import HOSTILE, Trainer
from tests.stream.streams import FQN, Writer


def test_a_row_in_two_column_shards_moves_once_by_both() -> None:
    storage = Storage("memory://")
    writer = Writer(storage)
    spec = TableSpec(FQN, 4, 4, torch.float32)
    values = torch.zeros(4, 4)
    movement = Movement({FQN: spec})

    def write(kind: str, ids: list[int] | None) -> None:
        halves = []
        for left in (0, 2):
            held = (values if ids is None else values[ids])[:, left : left + 2].contiguous()
            block = Block(FQN, (0, 4), (left, left + 2), len(held), "all" if ids is None else "list", Encoding.F32)
            halves.append(BlockRows.of(block, None if ids is None else torch.tensor(ids), held))
        movement.add(Contents(storage, writer.write(kind, halves, {FQN: spec})))

    write("snapshot", None)
    values[1] = torch.tensor([3.0, 0.0, 0.0, 4.0])
    write("delta", [1, 2])
    (table,) = movement.tables.values()
    assert table.counts.top(9) == [(1, 1), (2, 1)]
    assert (table.moves.count, table.unmoved) == (1, 1)
    assert table.moves.quantile(0.5) == pytest.approx(5.0, rel=RELATIVE_ERROR)


def test_of_a_table_too_large_every_nth_row_is_compared(trainer: Trainer) -> None:
    movement = Movement(trainer.specs, sample_bytes=2 * 30 * 16, num_counted=10)
    for manifest in trainer.manifests:
        movement.add(Contents(trainer.writer.storage, manifest))
    table = movement.tables[FQN]
    assert table.stride == 7  # 30 rows of 200 fit
    expected = sorted(distance for row, distance in trainer.moves[FQN] if row % 7 == 0)
    assert table.moves.count == len(expected) > 5
    assert table.moves.quantile(1) == pytest.approx(expected[-1], rel=1.1 * RELATIVE_ERROR)
    assert movement.tables[HOSTILE].stride == 1
    wide = Movement({FQN: TableSpec(FQN, 2, 2**40, torch.float32)})
    assert wide.tables[FQN].stride == 0, "no memory for a width that somebody made up"


@given(
    st.lists(st.lists(st.integers(0, 30), unique=True, max_size=12), max_size=30),
    st.integers(1, 40),
)
@settings(deadline=None)
def test_counts_are_exact_or_too_low_by_no_more_than_they_say(deltas: list[list[int]], capacity: int) -> None:
    counts, truth = RowCounts(capacity), Counter[int]()
    for ids in deltas:
        counts.add(np.array(ids, np.int64))
        truth.update(ids)
    top = dict(counts.top(100))
    assert len(top) <= capacity
    if len(truth) <= capacity:
        assert counts.error == 0
        assert top == truth
    assert counts.error <= truth.total() / (capacity + 1)
    for row, count in truth.items():
        assert count - counts.error <= top.get(row, 0) <= count
