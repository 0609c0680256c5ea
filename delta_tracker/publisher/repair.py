"""What a publisher has to repair when its trainer went back to a checkpoint.

The checkpoint says which version the stream had reached for the consumer. The predictors may be further by now: what
later versions carried comes from a future that this trainer has never had. All their rows are changed for it, and it
sends the values that it holds itself.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from delta_tracker.errors import CorruptPartError, InvalidArgumentError, MalformedError
from delta_tracker.stream.cursor import Place
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.format.part_reader import read_parts
from delta_tracker.stream.log import StreamLog
from delta_tracker.types import ShardSpec, TableSpec

_logger = logging.getLogger(__name__)


def rows_to_repair(
    log: StreamLog,
    note: object,
    claim: Manifest,
    tables: Mapping[str, TableSpec],
    shards: Mapping[str, ShardSpec],
) -> dict[str, Tensor] | None:
    """The rows of this rank that the versions between a checkpoint and a claim carried.

    Args:
        log: the stream.
        note: what was noted with the checkpoint: a :class:`~delta_tracker.stream.cursor.Place` as plain values.
        claim: the claim of the publisher that resumes.
        tables: FQN to table, as the trainer has them.
        shards: FQN to what this rank holds.

    Returns:
        FQN to ``[N]`` int64 local ids, ascending and unique; tables without any are missing. None where it cannot be
        known: nothing was noted, the stream is another one, or a later version is gone, damaged, or a snapshot. Every
        row is then to be sent.

    Raises:
        StorageError: if the store cannot be read.
    """
    try:
        place = Place.from_dict(note) if isinstance(note, Mapping) else None
    except InvalidArgumentError:
        place = None
    if place is None or place.stream != claim.stream or not 0 <= place.link.version <= claim.version:
        return None
    found: dict[str, list[Tensor]] = {}
    link = place.link
    try:
        for version in range(place.link.version + 1, claim.version + 1):
            entry = log.read(version)
            if entry is None or entry.parent != link or entry.stream != claim.stream or entry.kind == "snapshot":
                return None
            if entry.kind == "delta" and dict(entry.tables) != dict(tables):
                return None
            link = entry.link
            for fqn, ids in _listed(log, entry, shards):
                found.setdefault(fqn, []).append(ids)
    except (CorruptPartError, MalformedError) as error:
        _logger.warning("a version after the checkpoint cannot be read, so all rows are sent: %s", error)
        return None
    if link != claim.link:
        return None
    return {fqn: torch.unique(torch.cat(ids)) for fqn, ids in found.items()}


def _listed(log: StreamLog, entry: Manifest, shards: Mapping[str, ShardSpec]) -> list[tuple[str, Tensor]]:
    """Table and local ids of the rows of this rank in a version, by block."""
    found = []
    for reader in read_parts(log.storage, entry):
        for rows in reader.rows:
            block, shard = rows.block, shards[rows.block.table]
            ids = torch.arange(*block.rows) if rows.ids is None else rows.ids
            first, end = shard.row_offset, shard.row_offset + shard.num_rows
            ids = ids[(ids >= first) & (ids < end)]
            if len(ids):
                found.append((block.table, ids - first))
    return found
