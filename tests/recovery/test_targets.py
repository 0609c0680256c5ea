"""Rows and states of random blocks, written to random shards, against a brute force."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from delta_tracker.predictor.placement import placements
from delta_tracker.recovery.targets import as_tables, state_table, state_targets
from delta_tracker.row_target import Region, RowTarget, TensorTarget
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Block
from delta_tracker.types import ShardSpec, StateSpec, TableSpec, TableStates

_FQN = "ec.embeddings.t"
_DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def cuts(draw: random.Random, end: int) -> list[tuple[int, int]]:
    """Return random ranges from 0 to ``end`` without gaps."""
    edges = sorted({0, end, *(draw.randrange(1, end) for _ in range(draw.randrange(3)))}) if end > 1 else [0, end]
    return list(pairwise(edges))


def write(rows: Iterable[BlockRows], states: TableStates | None, targets: dict[str, RowTarget], size: int) -> None:
    tables = [each for block in rows for each in as_tables(block, states)]
    for placement in placements(tables, targets):
        for chunk in placement.chunks(size):
            chunk.write()


class World:
    """A table with its states, the whole of it, and its blocks as random ranks hold them."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.table = TableSpec(_FQN, draw.randrange(1, 30), draw.randrange(1, 9), draw.choice(_DTYPES))
        self.columns = tuple(cuts(draw, self.table.dim))
        specs = [
            StateSpec("moment", draw.choice(_DTYPES), "columns"),
            StateSpec("sum", draw.choice(_DTYPES), "range"),
            StateSpec("second", draw.choice(_DTYPES), "columns"),
        ]
        self.states = TableStates("EXACT_TEST", self.columns, tuple(draw.sample(specs, draw.randrange(4))))
        self.has_ranges = any(each.width == "range" for each in self.states.states)
        self.values = self.random(self.table.dim, self.table.dtype)
        self.held = [self.random(self.width(each), each.dtype) for each in self.states.states]

    def width(self, spec: StateSpec) -> int:
        return self.table.dim if spec.width == "columns" else len(self.columns)

    def random(self, width: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(self.table.num_rows, width).to(dtype)

    def change(self) -> list[BlockRows]:
        """Change random rows, and return the blocks of a delta."""
        return [self.block(rows, columns, ids) for rows, columns, ids in self.changed()]

    def changed(self) -> Iterable[tuple[tuple[int, int], tuple[int, int], Tensor]]:
        for columns in self.columns:
            for rows in cuts(self.draw, self.table.num_rows):
                ids = torch.tensor([row for row in range(*rows) if self.draw.random() < 0.3], dtype=torch.int64)
                self.values[ids, slice(*columns)] = torch.randn(len(ids), columns[1] - columns[0]).to(self.table.dtype)
                for spec, held in zip(self.states.states, self.held, strict=True):
                    first, end = self.places(spec, columns)
                    held[ids, first:end] = torch.randn(len(ids), end - first).to(spec.dtype)
                yield rows, columns, ids

    def whole(self) -> list[BlockRows]:
        return [
            self.block(rows, columns, None) for columns in self.columns for rows in cuts(self.draw, self.table.num_rows)
        ]

    def places(self, spec: StateSpec, columns: tuple[int, int]) -> tuple[int, int]:
        number = self.columns.index(columns)
        return columns if spec.width == "columns" else (number, number + 1)

    def block(self, rows: tuple[int, int], columns: tuple[int, int], ids: Tensor | None) -> BlockRows:
        every = torch.arange(*rows) if ids is None else ids
        form = "all" if ids is None else "list"
        block = Block(_FQN, rows, columns, len(every), form, Encoding.of(self.table.dtype))

        def reader(tensor: Tensor, first: int, end: int):
            stored = tensor[every, first:end].clone()
            return lambda begin, stop: stored[begin:stop]

        states = tuple(
            reader(held, *self.places(spec, columns)) for spec, held in zip(self.states.states, self.held, strict=True)
        )
        return BlockRows(block, ids, reader(self.values, *columns), states)

    def shard(self) -> tuple[ShardSpec, dict[str, RowTarget], Tensor, list[list[Tensor]]]:
        """Return a shard of a rank with another plan, and its memory."""
        rows = self.draw.choice(cuts(self.draw, self.table.num_rows))
        plan = list(self.columns) if self.has_ranges else cuts(self.draw, self.table.dim)
        columns = tuple(sorted(self.draw.sample(plan, self.draw.randrange(1, len(plan) + 1))))
        shard = ShardSpec(self.table, rows[0], rows[1] - rows[0], columns)
        values = torch.zeros(shard.num_rows, self.table.dim, dtype=self.table.dtype)
        views = [
            [
                torch.zeros(shard.num_rows, end - first if spec.width == "columns" else 1, dtype=spec.dtype)
                for spec in self.states.states
            ]
            for first, end in columns
        ]
        regions = [Region(rows, each, values[:, slice(*each)]) for each in columns]
        target = TensorTarget(self.table.num_rows, self.table.dim, self.table.dtype, regions)
        found = state_targets({_FQN: shard}, {_FQN: views}, {_FQN: self.states})
        return shard, {_FQN: target, **found}, values, views


@pytest.mark.parametrize("seed", range(30))
def test_rows_and_states_reach_their_places_under_another_plan(seed: int) -> None:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    world = World(draw)
    shard, targets, values, views = world.shard()
    write(world.whole(), world.states, targets, draw.randrange(1, 9))
    for _ in range(2):
        write(world.change(), world.states, targets, draw.randrange(1, 9))
    rows = slice(shard.row_offset, shard.row_offset + shard.num_rows)
    for columns, held in zip(shard.columns, views, strict=True):
        assert torch.equal(values[:, slice(*columns)], world.values[rows, slice(*columns)])
        for spec, whole, found in zip(world.states.states, world.held, held, strict=True):
            first, end = columns if spec.width == "columns" else world.places(spec, columns)
            assert torch.equal(found, whole[rows, first:end]), spec
    outside = torch.ones_like(values, dtype=torch.bool)
    for columns in shard.columns:
        outside[:, slice(*columns)] = False
    assert not values[outside].any()


def test_a_rank_without_rows_has_targets_that_take_nothing() -> None:
    world = World(random.Random(3))
    shard = ShardSpec(world.table)
    found = state_targets({_FQN: shard}, {_FQN: []}, {_FQN: world.states})
    assert sorted(found) == sorted(state_table(_FQN, spec) for spec in world.states.states)
    targets: dict[str, RowTarget] = {_FQN: TensorTarget(shard.table.num_rows, shard.table.dim, None, []), **found}
    assert placements([each for rows in world.whole() for each in as_tables(rows, world.states)], targets) == []


def test_a_table_without_states_stays_one_table() -> None:
    world = World(random.Random(3))
    (rows,) = as_tables(BlockRows(world.whole()[0].block, None, world.whole()[0].read), None)
    assert rows.block.table == _FQN
