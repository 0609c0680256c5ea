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

    ``saved`` has the positions of the consumers on each rank that published the version.

    Returns:
        Consumer to FQN to ``[N]`` int64 local ids, ascending and unique. The ids are None for all rows.
    """
    found: dict[str, dict[str, Tensor | None]] = {}
    for name in consumers:
        held = [each[name] for each in saved if name in each]
        versions = [each.version for each in held if each.version is not None]
        rows = rows_after(log, last, min(versions), shards) if len(versions) == len(saved) else None
        if rows is None:
            found[name] = dict.fromkeys(shards)
            continue
        found[name] = {}
        for fqn, shard in shards.items():
            left_out = [local_rows(each.left_out[fqn], shard) for each in held if fqn in each.left_out]
            ids = torch.cat([rows.get(fqn, torch.empty(0, dtype=torch.int64)), *left_out])
            found[name][fqn] = ids.unique()  # type: ignore[no-untyped-call]
    return found


def saved_places(
    saved: Sequence[Mapping[str, Consumer]], pending: Mapping[str, Mapping[str, Tensor | None]]
) -> dict[str, dict[str, Any]]:
    """Return the saved positions of the streams of other publishers, by consumer, so that they continue with a delta.

    A consumer is omitted if the ranks have saved different positions, or if its pending rows are unknown.
    """
    found = {}
    for name, tables in pending.items():
        first, *others = [each[name].place if name in each else None for each in saved]
        is_known = all(rows is not None for rows in tables.values())
        if is_known and first is not None and all(each == first for each in others):
            found[name] = first
    return found


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
