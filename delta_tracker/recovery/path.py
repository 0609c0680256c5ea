"""Find the entries of a stream to apply, to restore the training state of a version."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass

from delta_tracker.errors import (
    InvalidArgumentError,
    MalformedError,
    MissingVersionError,
    NoSnapshotError,
    NotRecoverableError,
    StreamError,
)
from delta_tracker.stream.format.manifest import STATES_FORMAT, Manifest
from delta_tracker.stream.log import Merged, StreamLog
from delta_tracker.stream.reading.path import committed_entry, path_to_entry
from delta_tracker.stream.reading.position import Position
from delta_tracker.stream.reading.seen import Failed, Look, SeenLog
from delta_tracker.stream.reading.source import Source

_logger = logging.getLogger(__name__)


def recovery_path(
    log: StreamLog, version: int | None = None, *, applied: Manifest | None = None, avoid: Manifest | None = None
) -> list[Manifest]:
    """Return the entries to apply in order: a snapshot, the deltas after it, and the entry with the training state.

    The last entry is the newest one up to ``version``, by default up to the head, that is not a claim. All have the
    same tables and states. Merged entries are used where they replace several versions, except for unreadable ones,
    which are logged, and for ``avoid``, which cannot be applied. Reads each entry once.

    The rows of the model are written up to ``applied``, an entry of the log or a merged one. If deltas lead from it to
    the version, it is the first entry, instead of a snapshot, which overwrites all rows.

    If there is no such path, raises NotRecoverableError; its ``version`` is None if the stream has no version.
    """
    head = log.head()
    if head is None:
        raise NotRecoverableError(log.url, None, "the stream is empty")
    asked = head.version if version is None else version
    if type(asked) is not int or not 0 <= asked <= head.version:
        raise InvalidArgumentError("version", version, f"Pass a version up to {head.version}, the newest")
    source = Source(0, log.storage, log=log)
    search = _Search(number=0, url=log.url, answers={("read", head.version): head}, source=source)
    try:
        path = _path(search, head, asked, applied, avoid)
    except (MissingVersionError, NoSnapshotError) as error:
        reason = "it has no snapshot" if isinstance(error, NoSnapshotError) else f"version {error.version} is missing"
        raise NotRecoverableError(log.url, asked, reason) from error
    for entry in path:
        if entry.schema != path[0].schema:
            reason = f"version {entry.version} has other tables, states, buckets of raw ids or another format"
            raise NotRecoverableError(log.url, asked, f"{reason} than the snapshot of version {path[0].version}")
    return path


def _path(log: SeenLog, head: Manifest, asked: int, applied: Manifest | None, avoid: Manifest | None) -> list[Manifest]:
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
            entry = log.read_merged(merged)
        except MalformedError as error:
            _logger.warning("a merged entry is unreadable; the versions that it replaces are used: %s", error)
            return None
        return None if entry == avoid else entry

    position = None if applied is None else Position.after(applied)
    path = path_to_entry(log, target, head.version, position=position, shortcut=shortcut)
    if applied is not None and path and path[0].kind != "snapshot":
        path = [applied, *path]
    elif applied is not None and path:
        text = "version %d is restored from a snapshot: no deltas lead to it from version %d"
        _logger.info(text, target.version, applied.version)
    return [entry for entry in path if entry.kind != "claim"] or [target]


@dataclass(frozen=True, eq=False, kw_only=True)
class _Search(SeenLog):
    """Log that is looked up as a search needs it. The ways that a search tries share what was found."""

    source: Source
    answers: dict[tuple[str, Hashable], object]

    def merged(self, *, after: int = -1) -> list[Merged]:
        listings = [key for about, key in self.answers if about == "merged" and isinstance(key, int) and key <= after]
        found = super().merged(after=max(listings, default=after))
        return [each for each in found if each.last > after]

    def _ask(self, about: str, key: Hashable = None, subject: object = None) -> object:
        if (about, key) not in self.answers:
            try:
                self.answers[about, key] = self.source.answer(Look(0, about, key, subject))
            except StreamError as error:
                self.answers[about, key] = Failed(error)
        return super()._ask(about, key, subject)
