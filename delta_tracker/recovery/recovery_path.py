"""Find the entries to apply for restoring a version, and the rows that are pending for consumers afterwards."""

import logging

import torch
from torch import Tensor

from delta_tracker.errors import (
    CorruptPartError,
    InvalidArgumentError,
    MalformedError,
    MissingVersionError,
    NoSnapshotError,
    NotRecoverableError,
)
from delta_tracker.recovery.training_states import TrainingStates
from delta_tracker.stream.format.manifest import STATES_FORMAT, Manifest, Merged
from delta_tracker.stream.format.shard_rows import local_rows, rows_of
from delta_tracker.stream.format.table_choice import check_has_all
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.reading.orders import OrderPolicy, Orders
from delta_tracker.stream.reading.path import committed_entry, path_to_entry
from delta_tracker.stream.reading.position import Position
from delta_tracker.stream.reading.seen import SeenLog
from delta_tracker.stream.reading.source import Source
from delta_tracker.tracker.tracker import ModelDeltaTracker
from delta_tracker.types import ShardSpec

_logger = logging.getLogger(__name__)


def recovery_path(
    log: StreamLog, version: int | None = None, *, applied: Manifest | None = None, avoid: Manifest | None = None
) -> list[Manifest]:
    """Return the entries to apply, in order, to restore a version: a snapshot and the deltas after it.

    The last entry contains the training states. It is the newest snapshot or delta up to ``version``, or in the log if
    ``version`` is None. All entries have the same tables and states. Where possible, a merged entry replaces several
    versions. Unreadable merged entries are logged and skipped. The result never contains ``avoid``, an entry that
    cannot be applied.

    ``applied`` is the last entry, possibly merged, whose rows have already been written to the model. If deltas lead
    from ``applied`` to the version, the result starts with ``applied`` instead of a snapshot.

    Raises NotRecoverableError if there are no such entries. The error's ``version`` is None if the stream has no
    version.
    """
    head = log.head()
    if head is None:
        raise NotRecoverableError(log.url, None, "the stream is empty")
    check_has_all(log.storage)
    asked = head.version if version is None else version
    if type(asked) is not int or not 0 <= asked <= head.version:
        raise InvalidArgumentError("version", version, f"Pass a version up to {head.version}, the newest")
    source = Source(0, log.storage, log=log)
    seen = SeenLog(source, Orders(OrderPolicy(), []), answers={("read", head.version): head})
    try:
        path = _path(seen if avoid is None else seen.without([avoid]), head, asked, applied)
    except (MissingVersionError, NoSnapshotError) as error:
        reason = "it has no snapshot" if isinstance(error, NoSnapshotError) else f"version {error.version} is missing"
        raise NotRecoverableError(log.url, asked, reason) from error
    for entry in path:
        if entry.schema != path[0].schema:
            reason = f"version {entry.version} has other tables, states, buckets of raw ids or another format"
            raise NotRecoverableError(log.url, asked, f"{reason} than the snapshot of version {path[0].version}")
    return path


def _path(log: SeenLog, head: Manifest, asked: int, applied: Manifest | None) -> list[Manifest]:
    target = committed_entry(log, asked, head)
    while target.kind == "claim" and target.parent is not None:
        target = committed_entry(log, target.parent.version, head, link=target.parent)
    if target.kind == "claim":
        if asked == head.version:
            raise NotRecoverableError(log.url, None, "the stream has only a claim")
        raise NotRecoverableError(log.url, asked, "the stream has no version up to this one, only a claim")
    if target.format != STATES_FORMAT or not target.training:
        what = "was published without states" if target.format != STATES_FORMAT else "has no training states"
        raise NotRecoverableError(log.url, asked, f"version {target.version} {what}")

    def shortcut(merged: Merged) -> Manifest | None:
        try:
            return log.read_merged(merged)
        except MalformedError as error:
            _logger.warning("a merged entry is unreadable; the versions that it replaces are used: %s", error)
            return None

    position = None if applied is None else Position.after(applied)
    path = path_to_entry(log, target, head.version, position=position, shortcut=shortcut)
    if applied is not None and path and path[0].kind != "snapshot":
        path = [applied, *path]
    elif applied is not None and path:
        text = "version %d is restored from a snapshot: no deltas lead to it from version %d"
        _logger.info(text, target.version, applied.version)
    return [entry for entry in path if entry.kind != "claim"] or [target]


def pending_rows(
    tracker: ModelDeltaTracker | None,
    states: TrainingStates,
    log: StreamLog,
    last: Manifest,
    shards: dict[str, ShardSpec],
) -> tuple[dict[str, dict[str, Tensor | None]], dict[str, object]]:
    """Return the pending rows and the stream position of each consumer of ``tracker`` after a restore of ``last``.

    ``shards`` contains the shards of the completely restored tables. All rows of other tables are pending.

    Returns:
        Two dicts by consumer name. The first contains the local ids of pending rows by FQN (``[N]`` int64, ascending
        and unique), or None for all rows. The second contains the stream positions from which the consumers' publishers
        can continue with a delta. It omits positions that differ between ranks or have unknown pending rows.
    """
    publisher = states.publisher()
    if tracker is None:
        return {}, {}
    others = [name for name in tracker.consumers if name != publisher]
    saved = [states.consumers(rank) for rank in range(states.world_size)] if others else []
    unrestored: dict[str, Tensor | None] = dict.fromkeys(fqn for fqn in tracker.shards if fqn not in shards)
    pending = {name: dict(unrestored) for name in tracker.consumers}
    notes: dict[str, object] = {publisher: Position.after(last).to_dict()} if publisher in pending else {}
    for name in others:
        held = [each[name] for each in saved if name in each]
        versions = [each.version for each in held if each.version is not None]
        rows = rows_after(log, last, min(versions), shards) if len(versions) == len(saved) else None
        if rows is None:
            pending[name] |= dict.fromkeys(shards)
            continue
        for fqn, shard in shards.items():
            left_out = [local_rows(each.left_out[fqn], shard) for each in held if fqn in each.left_out]
            ids = torch.cat([rows.get(fqn, torch.empty(0, dtype=torch.int64, device="cpu")), *left_out])
            pending[name][fqn] = ids.unique()  # type: ignore[no-untyped-call]
        place = held[0].place
        if place is not None and all(each.place == place for each in held):
            notes[name] = place
    return pending, notes


def rows_after(log: StreamLog, last: Manifest, version: int, shards: dict[str, ShardSpec]) -> dict[str, Tensor] | None:
    """Return the rows of this rank's ``shards`` that are contained in the versions after ``version`` up to ``last``.

    Returns:
        Local ids of the rows by FQN: ``[N]`` int64, ascending and unique. Tables without such rows are omitted. None if
        one of these versions is a snapshot, damaged or missing.
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
