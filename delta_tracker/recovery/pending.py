"""Find the rows of versions after a given one, which a consumer of a restored tracker has not read."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from delta_tracker.recovery.fit import wanted
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.format.part_reader import PartReader, Ranged
from delta_tracker.stream.log import StreamLog
from delta_tracker.types import ShardSpec


def rows_after(
    log: StreamLog, last: Manifest, version: int, shards: Mapping[str, ShardSpec]
) -> dict[str, Tensor] | None:
    """Return the rows of this rank that are in the versions after ``version`` up to ``last``.

    Args:
        log: log of the stream.
        last: entry of format 2, of the log or merged.
        version: a version up to that of ``last``.
        shards: FQN to shard of this rank. Tables that are not in it are omitted.

    Returns:
        FQN to ``[N]`` int64 local ids, ascending and unique; tables without such rows are omitted. None if one of the
        versions is a snapshot or is not in the log any more, so that the rows are unknown.

    Raises:
        MalformedError: if an entry does not follow the format.
        CorruptPartError: if a part does not match its entry.
        StorageError: if the store cannot be read.
    """
    found: dict[str, list[Tensor]] = {}
    link = last.link
    while link.version > version:
        entry = log.read(link.version)
        if entry is None or entry.link != link or entry.kind == "snapshot" or entry.parent is None:
            return None
        if entry.kind == "delta":
            for fqn, ids in _listed(log, entry, shards):
                found.setdefault(fqn, []).append(ids)
        link = entry.parent
    return {fqn: torch.unique(torch.cat(ids)) for fqn, ids in found.items()}


def local_rows(ids: Tensor, shard: ShardSpec) -> Tensor:
    """Return the local ids of those rows that are in a shard.

    Args:
        ids: ``[N]`` int64 global ids.
        shard: the shard.
    """
    local = ids - shard.row_offset
    return local[(local >= 0) & (local < shard.num_rows)]


def _listed(log: StreamLog, entry: Manifest, shards: Mapping[str, ShardSpec]) -> list[tuple[str, Tensor]]:
    """Return a pair (table FQN, local ids) for each block of ``entry`` with rows of this rank."""
    found = []
    for part in entry.parts:
        blocks = wanted(part, shards)
        if blocks:
            reader = PartReader(log.storage, part, entry, source=Ranged(log.storage, part), blocks=blocks)
            for rows in reader.rows:
                ids = torch.arange(*rows.block.rows) if rows.ids is None else rows.ids
                ids = local_rows(ids, shards[rows.block.table])
                if len(ids):
                    found.append((rows.block.table, ids))
    return found
