"""Find the rows that are pending for the consumers of a tracker after a restore."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from delta_tracker.errors import CorruptPartError, MalformedError
from delta_tracker.recovery.library import Consumer
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.format.shard_rows import local_rows, rows_of
from delta_tracker.stream.log import StreamLog
from delta_tracker.types import ShardSpec

_logger = logging.getLogger(__name__)


def pending_rows(
    consumers: Sequence[str],
    saved: Sequence[Mapping[str, Consumer]],
    log: StreamLog,
    last: Manifest,
    shards: Mapping[str, ShardSpec],
) -> dict[str, dict[str, Tensor | None]]:
    """Return the rows that are pending for each consumer, other than that of the version's publisher.

    For such a consumer, a version has the last version of which it had read all rows, and the rows that its reads left
    out. ``saved`` has them for each rank that published the version.

    Returns:
        Consumer to FQN to ``[N]`` int64 local ids, ascending and unique. The ids are None for all rows.
    """
    found: dict[str, dict[str, Tensor | None]] = {}
    for name in consumers:
        held = [each[name] for each in saved if name in each]
        rows = _rows_of(held, log, last, shards) if len(held) == len(saved) else None
        found[name] = dict.fromkeys(shards) if rows is None else rows
    return found


def saved_places(
    saved: Sequence[Mapping[str, Consumer]], pending: Mapping[str, Mapping[str, Tensor | None]]
) -> dict[str, dict[str, Any]]:
    """Return the saved positions of the streams of other publishers, by consumer, so that they continue with a delta.

    A consumer is omitted if the ranks have saved different positions, or if its pending rows are unknown.
    """
    found = {}
    for name, tables in pending.items():
        places = [each[name].place if name in each else None for each in saved]
        is_known = all(rows is not None for rows in tables.values())
        if is_known and places and places[0] is not None and all(place == places[0] for place in places):
            found[name] = places[0]
    return found


def _rows_of(
    saved: Sequence[Consumer], log: StreamLog, last: Manifest, shards: Mapping[str, ShardSpec]
) -> dict[str, Tensor | None] | None:
    """Return the pending rows of a consumer by FQN, from its position on each rank; None if they are unknown."""
    versions = [each.version for each in saved if each.version is not None]
    rows = rows_after(log, last, min(versions), shards) if len(versions) == len(saved) else None
    if rows is None:
        return None
    found: dict[str, Tensor | None] = {}
    for fqn, shard in shards.items():
        left_out = [local_rows(each.left_out[fqn], shard) for each in saved if fqn in each.left_out]
        found[fqn] = torch.cat([rows.get(fqn, torch.empty(0, dtype=torch.int64)), *left_out]).unique()  # type: ignore[no-untyped-call]
    return found


def rows_after(
    log: StreamLog, last: Manifest, version: int, shards: Mapping[str, ShardSpec]
) -> dict[str, Tensor] | None:
    """Return the rows of this rank's shards that are in the versions after ``version`` up to ``last``.

    Returns:
        FQN to ``[N]`` int64 local ids, ascending and unique; tables without such rows are omitted. None if one of the
        versions is a snapshot, is damaged, or is missing, so that the rows are unknown. The restore may not need these
        versions, because merged entries replace them.
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
