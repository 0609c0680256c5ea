"""Find the rows that are pending for the consumers of a tracker after a restore."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from delta_tracker.errors import CorruptPartError, MalformedError
from delta_tracker.recovery.training_states import TrainingStates
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.format.shard_rows import local_rows, rows_of
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.reading.position import Position
from delta_tracker.tracker.tracker import ModelDeltaTracker
from delta_tracker.types import ShardSpec

_logger = logging.getLogger(__name__)


def pending_rows(
    tracker: ModelDeltaTracker | None,
    states: TrainingStates,
    log: StreamLog,
    last: Manifest,
    shards: Mapping[str, ShardSpec],
) -> tuple[dict[str, dict[str, Tensor | None]], dict[str, object]]:
    """Return the rows that are pending for each consumer of a tracker, and its notes, after a restore of ``last``.

    Only the tables in ``shards`` are restored: all rows of the others are pending.

    Returns:
        Consumer to FQN to ``[N]`` int64 local ids, ascending and unique; the ids are None for all rows. And consumer to
        the position of its publisher's stream, so that the stream continues with a delta. A position is omitted if the
        ranks have saved different ones, or if the pending rows are unknown.
    """
    publisher = states.publisher()
    if tracker is None:
        return {}, {}
    others = [name for name in tracker.consumers if name != publisher]
    saved = [states.consumers(rank) for rank in range(states.world_size)] if others else []
    unrestored: dict[str, Tensor | None] = dict.fromkeys(fqn for fqn in tracker.shards if fqn not in shards)
    pending = {name: dict(unrestored) for name in tracker.consumers}
    notes: dict[str, object] = {publisher: Position(last.stream, last.link).to_dict()} if publisher in pending else {}
    for name in others:
        held = [each[name] for each in saved if name in each]
        versions = [each.version for each in held if each.version is not None]
        rows = rows_after(log, last, min(versions), shards) if len(versions) == len(saved) else None
        if rows is None:
            pending[name] |= dict.fromkeys(shards)
            continue
        for fqn, shard in shards.items():
            left_out = [local_rows(each.left_out[fqn], shard) for each in held if fqn in each.left_out]
            ids = torch.cat([rows.get(fqn, torch.empty(0, dtype=torch.int64)), *left_out])
            pending[name][fqn] = ids.unique()  # type: ignore[no-untyped-call]
        place = held[0].place
        if place is not None and all(each.place == place for each in held):
            notes[name] = place
    return pending, notes


def rows_after(
    log: StreamLog, last: Manifest, version: int, shards: Mapping[str, ShardSpec]
) -> dict[str, Tensor] | None:
    """Return the rows of this rank's shards that are in the versions after ``version`` up to ``last``.

    Returns:
        FQN to ``[N]`` int64 local ids, ascending and unique; tables without such rows are omitted. None if one of the
        versions is a snapshot, damaged or missing. The restore may use merged entries instead of it.
    """
    found: dict[str, list[Tensor]] = {}
    link = last.link
    try:
        while link.version > version:
            entry = log.read(link.version)
            if entry is None or entry.link != link or entry.kind == "snapshot" or entry.parent is None:
                return None
            if entry.kind == "delta":
                for fqn, ids in rows_of(log.storage, entry, shards):
                    found.setdefault(fqn, []).append(ids)
            link = entry.parent
    except (CorruptPartError, MalformedError) as error:
        _logger.warning("a version that a consumer had not read is unreadable; all rows are pending for it: %s", error)
        return None
    return {fqn: torch.unique(torch.cat(ids)) for fqn, ids in found.items()}
