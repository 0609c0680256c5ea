"""Find the rows to republish after the trainer resumed from an older checkpoint.

A checkpoint contains the stream position of the consumer. Predictors may have applied versions that were published
after the checkpoint. The rows of these versions are treated as changed and are published again.
"""

import logging
from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor

from delta_tracker.errors import CorruptPartError, InvalidArgumentError, MalformedError, StorageError
from delta_tracker.predictor.model_fit import MISSING, difference, spec_texts
from delta_tracker.publisher.rank_tables import RankSchema
from delta_tracker.stream.format.manifest import DenseSpec, Manifest, Schema
from delta_tracker.stream.format.shard_rows import rows_of
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.reading.path import last_with_rows
from delta_tracker.stream.reading.position import Position
from delta_tracker.types import ShardSpec

_logger = logging.getLogger(__name__)


def rows_to_repair(
    log: StreamLog, note: object, claim: Manifest, schema: Schema, shards: Mapping[str, ShardSpec]
) -> dict[str, Tensor] | None:
    """Return the rows of this rank that were published after a checkpoint and must be published again.

    Args:
        log: log of the stream.
        note: stream position in the checkpoint, as returned by
            :meth:`~delta_tracker.stream.reading.position.Position.to_dict`.
        claim: manifest of the new publisher's claim.
        schema: schema of the new publisher's versions: format, tables, states and identities.
        shards: shards of this rank, by FQN.

    Returns:
        Local ids of the rows by FQN: ``[N]`` int64, ascending and unique. Tables without such rows are omitted. None if
        a snapshot is required instead: if ``note`` is not a position in this stream; if a later version is missing, is
        damaged, is a snapshot or has a different schema; or if the newest snapshot has a different schema or the log is
        incomplete after it.
    """
    try:  # releases before 0.1.0 saved neither a generation nor a time, which are not used here
        position = Position.from_dict({"generation": 0, "created": 0, **note} if isinstance(note, dict) else note)
    except InvalidArgumentError:
        return None
    if position.stream != claim.stream or position.version > claim.version:
        return None
    found: dict[str, list[Tensor]] = {}
    link = position.link
    try:
        if not _may_continue(log, claim, schema):
            return None
        for version in range(position.version + 1, claim.version + 1):
            entry = log.read(version)
            if (
                entry is None
                or (entry.parent, entry.stream) != (link, claim.stream)
                or (entry.kind != "claim" and (entry.kind, entry.schema) != ("delta", schema))
            ):
                return None
            link = entry.link
            for fqn, ids in rows_of(log.storage, entry, shards):
                found.setdefault(fqn, []).append(ids)
    except (CorruptPartError, MalformedError) as error:
        _logger.warning("a version after the checkpoint is unreadable; all rows are sent: %s", error)
        return None
    return None if link != claim.link else {fqn: torch.unique(torch.cat(ids)) for fqn, ids in found.items()}


def warn_of_changes(log: StreamLog, claim: Manifest, schema: RankSchema, dense: Mapping[str, Tensor] | None) -> None:
    """Log differences between the newest version and the model's tables and published ``dense`` tensors."""
    specs = {name: DenseSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in (dense or {}).items()}
    own = spec_texts(schema.tables, schema.identities), spec_texts(specs, ())
    with suppress(MalformedError, StorageError):
        newest = last_with_rows(log, claim)
        if newest is None or newest.kind == "claim":
            return
        held = spec_texts(newest.tables, newest.identities), {} if dense is None else spec_texts(newest.dense, ())
        for kind, before, after in zip(("table", "dense tensor"), held, own, strict=True):
            for name in sorted(before.keys() | after):
                if (found := before.get(name, MISSING)) != (given := after.get(name, MISSING)):
                    text = difference(kind, name, found, given)
                    _logger.warning("the model differs from version %d of the stream: %s", newest.version, text)


def _may_continue(log: StreamLog, claim: Manifest, schema: Schema) -> bool:
    """Return True if the newest snapshot has ``schema``, and the log contains all entries from it to ``claim``.

    Returns True for a stream that contains only claims.
    """
    snapshot = log.newest_snapshot()
    if snapshot is None:
        return claim.snapshot is None
    versions = [version for version in log.versions(after=snapshot.version) if version <= claim.version]
    return snapshot.schema == schema and len(versions) == claim.version - snapshot.version
