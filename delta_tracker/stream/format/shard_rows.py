"""Functions that find the rows of a version that are in the shards of one rank."""

from collections.abc import Mapping

import torch
from torch import Tensor

from delta_tracker.stream.format.manifest import Manifest, Part
from delta_tracker.stream.format.object_reader import Ranged
from delta_tracker.stream.format.part_reader import PartReader
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import ShardSpec


def wanted(part: Part, shards: Mapping[str, ShardSpec]) -> set[int]:
    """Return the indices of the blocks of ``part`` that overlap ``shards``, the shards of one rank by table FQN."""
    return {
        number
        for number, block in enumerate(part.blocks)
        if block.num_rows
        and (shard := shards.get(block.table)) is not None
        and _overlap(block.rows, (shard.row_offset, shard.row_offset + shard.num_rows))
        and any(_overlap(block.columns, columns) for columns in shard.columns)
    }


def local_rows(ids: Tensor, shard: ShardSpec) -> Tensor:
    """Return the local ids of the rows in ``ids`` that belong to ``shard``. ``ids`` are ``[N]`` int64 global ids."""
    local = ids - shard.row_offset
    return local[(local >= 0) & (local < shard.num_rows)]


def rows_of(storage: Storage, entry: Manifest, shards: Mapping[str, ShardSpec]) -> list[tuple[str, Tensor]]:
    """Return a pair (table FQN, ``[N]`` int64 local ids) for each block of ``entry`` that has rows in ``shards``.

    Reads and checks only the parts that contain these blocks. From parts in format 2, it reads only the ids.
    """
    found = []
    for part in entry.parts:
        if blocks := wanted(part, shards):
            source = Ranged(storage, part) if part.body else None  # a part of format 1 can only be checked as a whole
            for rows in PartReader(storage, part, entry, source=source, blocks=blocks).rows:
                ids = torch.arange(*rows.block.rows, device="cpu") if rows.ids is None else rows.ids
                ids = local_rows(ids, shards[rows.block.table])
                if len(ids):
                    found.append((rows.block.table, ids))
    return found


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]
