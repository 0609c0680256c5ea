"""Write the rows and optimizer states of a version to the memory of a model: :class:`RowWriter`.

The same code writes rows and states: each optimizer state of a table is treated as a separate table, a *state table*.
Its columns are those of the table, or the indices of the column ranges if the state has one number for each range.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from delta_tracker.predictor.placement import placements
from delta_tracker.row_target import Region, RowTarget, TensorTarget
from delta_tracker.stream.format.block_rows import CHUNK_BYTES, BlockRows, newest
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.format.object_reader import Ranged
from delta_tracker.stream.format.part_reader import PartReader
from delta_tracker.stream.format.shard_rows import wanted
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import ShardSpec, StateSpec, TableStates

_VALUE_BYTES = 4


@dataclass(frozen=True, slots=True, eq=False)
class RowWriter:
    """Writer of the rows and optimizer states of entries to this rank's shards."""

    storage: Storage
    shards: Mapping[str, ShardSpec]
    targets: Mapping[str, RowTarget]  # memory of each table and state table, by name

    @torch.no_grad()
    def write(self, entry: Manifest) -> None:
        """Write the rows and states of ``entry``, which may be merged. An interrupted call can be repeated."""
        rows: list[BlockRows] = []
        for part in entry.parts:
            if blocks := wanted(part, self.shards):
                reader = PartReader(self.storage, part, entry, source=Ranged(self.storage, part), blocks=blocks)
                rows += reader.with_states(None if part.states is None else Ranged(self.storage, part.states))
        for group in newest(rows):
            tables = [table for each in group for table in as_tables(each, entry.states.get(each.block.table))]
            tables = [table for table in tables if table.block.table in self.targets]  # without states that differ
            for placement in placements(tables, self.targets):
                num_rows = max(1, CHUNK_BYTES // (placement.target.dim * _VALUE_BYTES))
                for chunk in placement.chunks(num_rows):
                    chunk.write()


def state_targets(
    shards: Mapping[str, ShardSpec], views: Mapping[str, Sequence[Sequence[Tensor]]], states: Mapping[str, TableStates]
) -> dict[str, RowTarget]:
    """Return targets to which a :class:`RowWriter` writes optimizer states, by name of the state table.

    All arguments are keyed by the FQN of the table. ``views`` contains a list of the model's states, ``[R, columns]``
    or ``[R, 1]`` each, for each column range of a shard, in order. ``states`` contains the specs of the states.
    """
    found: dict[str, RowTarget] = {}
    for fqn, table in states.items():
        shard = shards[fqn]
        rows = shard.row_offset, shard.row_offset + shard.num_rows
        for index, spec in enumerate(table.states):
            pairs = zip(shard.columns, views[fqn], strict=True)
            regions = [Region(rows, _columns(spec, table, columns), held[index]) for columns, held in pairs]
            dim = shard.table.dim if spec.width == "columns" else len(table.columns)
            found[state_table(fqn, spec)] = TensorTarget(shard.table.num_rows, dim, spec.dtype, regions)
    return found


def as_tables(rows: BlockRows, states: TableStates | None) -> list[BlockRows]:
    """Split a block: return its rows without the states, followed by the states as rows of state tables."""
    block = rows.block
    found = [replace(rows, states=())]
    for spec, read in zip(() if states is None else states.states, rows.states, strict=True):
        assert states is not None, "there are states"
        columns = _columns(spec, states, block.columns)
        table = replace(block, table=state_table(block.table, spec), columns=columns, encoding=Encoding.of(spec.dtype))
        found.append(BlockRows(table, rows.ids, read))
    return found


def state_table(fqn: str, spec: StateSpec) -> str:
    """Return the name of the state table for the optimizer state ``spec`` of the table ``fqn``."""
    return f"{fqn}\n{spec.name}"


def _columns(spec: StateSpec, table: TableStates, columns: tuple[int, int]) -> tuple[int, int]:
    if spec.width == "columns":
        return columns
    number = table.columns.index(columns)
    return number, number + 1
