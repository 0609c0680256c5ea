"""Write the rows of an entry, and the states of these rows, to this rank's memory: :class:`RowWriter`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from delta_tracker.predictor.placement import place
from delta_tracker.recovery.targets import as_tables
from delta_tracker.row_target import RowTarget
from delta_tracker.stream.format.block_rows import CHUNK_BYTES, BlockRows
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.format.overlay import newest
from delta_tracker.stream.format.part_reader import PartReader, Ranged
from delta_tracker.stream.format.shard_rows import wanted
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import ShardSpec

_VALUE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowWriter:
    """Writer of the rows of entries that are in this rank's shards by FQN, with the states of these rows.

    Args:
        targets: name of a table or state table to its memory.
    """

    storage: Storage
    shards: Mapping[str, ShardSpec]
    targets: Mapping[str, RowTarget]

    @torch.no_grad()
    def write(self, entry: Manifest) -> None:
        """Write the rows of an entry, which may be a merged one. If the call is interrupted, call it again."""
        rows: list[BlockRows] = []
        for part in entry.parts:
            if blocks := wanted(part, self.shards):
                reader = PartReader(self.storage, part, entry, source=Ranged(self.storage, part), blocks=blocks)
                rows += reader.with_states(None if part.states is None else Ranged(self.storage, part.states))
        for group in newest(rows):
            tables = [table for each in group for table in as_tables(each, entry.states.get(each.block.table))]
            for placement in place(tables, self.targets):
                num_rows = max(1, CHUNK_BYTES // (placement.target.dim * _VALUE_BYTES))
                for chunk in placement.chunks(num_rows):
                    chunk.write()
