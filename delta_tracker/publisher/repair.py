"""Find the rows to republish after the trainer resumed from an older checkpoint.

A checkpoint contains the stream position of the consumer. Predictors may have applied later versions, whose values the
resumed trainer does not have. The rows of those versions are treated as changed, so that the trainer's values are
published.
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
    """Return the rows of this rank that are in versions after a checkpoint.

    Args:
        log: log of the stream.
        note: stream position in the checkpoint, as :meth:`~delta_tracker.stream.cursor.Place.to_dict` returned it.
        claim: manifest of the new publisher's claim.
        tables: FQN to table of the trainer.
        shards: FQN to shard of this rank.

    Returns:
        FQN to ``[N]`` int64 local ids, ascending and unique; tables without such rows are omitted. None if the rows
        cannot be determined, so that every row must be published. This is the case if ``note`` is not a position in
        this stream, or if a later version is missing, is damaged, is a snapshot, has other tables, or does not follow
        its predecessor.

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
        _logger.warning("a version after the checkpoint is unreadable; all rows are sent: %s", error)
        return None
    if link != claim.link:
        return None
    return {fqn: torch.unique(torch.cat(ids)) for fqn, ids in found.items()}


def _listed(log: StreamLog, entry: Manifest, shards: Mapping[str, ShardSpec]) -> list[tuple[str, Tensor]]:
    """Return a pair (table FQN, local ids) for each block of ``entry`` that contains rows of this rank."""
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
