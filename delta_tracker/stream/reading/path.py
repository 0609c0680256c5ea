"""Search for the entries that lead to a version: pure functions of the entries of a log.

The functions read only entries. ``allows`` returns False for an entry that the reader must not apply yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from delta_tracker.errors import (
    InvalidArgumentError,
    MalformedError,
    MissingVersionError,
    NoSnapshotError,
    StorageError,
    StreamReplacedError,
)
from delta_tracker.stream.entry_names import Merged
from delta_tracker.stream.format.manifest import Link, Manifest
from delta_tracker.stream.log import generation_error
from delta_tracker.stream.reading.position import Position
from delta_tracker.stream.reading.seen import Entries, Following

_MAX_UNREADABLE = 3
_T = TypeVar("_T")

Allows = Callable[[Manifest], bool]


def readable(read: Callable[[_T], Manifest | None], what: _T) -> Manifest | None:
    """Return the entry ``read(what)``; None if it does not exist, cannot be read, or is malformed."""
    try:
        return read(what)
    except (MalformedError, StorageError):
        return None


def next_entry(log: Following, position: Position, *, looks_for_gap: bool) -> Manifest | None:
    """Return the entry that follows a position, None if there is none.

    Args:
        log: the log.
        position: position of the reader.
        looks_for_gap: True to check, if there is none, whether it was deleted or is not committed yet.

    Raises:
        StreamReplacedError: if another entry is in its place, or the log lacks the entry of the position.
        MissingVersionError: if it was deleted, or is a claim that is not part of the log.
        MalformedError, StorageError: if the log cannot be read.
    """
    entry = log.next(position.version + 1)
    if entry is None:
        if looks_for_gap:
            log.check_gap(position)
        return None
    follows = entry.stream == position.stream and entry.parent == position.link
    if not follows or entry.generation < (position.generation or 0):
        raise StreamReplacedError(log.url, position.version)
    if entry.kind == "claim" and not log.is_committed(entry):
        head = log.head() or entry
        raise MissingVersionError(entry.version, head.version)
    return entry


def snapshots(log: Entries, *, allows: Allows | None = None, skips_unreadable: bool = False) -> Iterator[Manifest]:
    """Yield the snapshots that a reader can start from, newest first.

    Args:
        log: the log.
        allows: see the module; None to allow every entry.
        skips_unreadable: True to skip entries that the store cannot read, and malformed entries of the log. Malformed
            merged entries are always skipped.
    """
    if skips_unreadable:
        yield from (each for each in _readable_snapshots(log) if allows is None or allows(each))
    elif allows is not None:
        yield from _allowed_snapshots(log, allows)
    else:
        yield from _snapshots(log)


def _snapshots(log: Entries) -> Iterator[Manifest]:
    manifest = _newest_snapshot(log)
    while manifest is not None and manifest.kind == "snapshot":
        yield manifest
        before = None if manifest.version == 0 else log.read(manifest.version - 1)
        manifest = None if before is None or before.snapshot is None else log.read(before.snapshot)


def _newest_snapshot(log: Entries) -> Manifest | None:
    try:
        return log.newest_snapshot()
    except MalformedError:  # perhaps of a merged entry, which adds no information
        head = log.head()
    return None if head is None or head.snapshot is None else log.read(head.snapshot)


def _allowed_snapshots(log: Entries, allows: Allows) -> Iterator[Manifest]:
    head = log.head()
    if head is None:
        return
    merged = [each for each in log.merged() if each.kind == "snapshot" and each.last <= head.version]
    version = head.snapshot
    while merged or version is not None:
        if version is None or (merged and merged[-1].last > version):
            manifest = readable(log.read_merged, merged.pop())
        else:
            manifest = log.read(version)
            before = None if version == 0 else log.read(version - 1)
            version = None if before is None else before.snapshot
        if manifest is not None and manifest.stream == head.stream and allows(manifest):
            yield manifest


def _readable_snapshots(log: Entries) -> Iterator[Manifest]:
    head = max(log.versions(), default=-1)
    in_log = _readable_in_log(log, head)
    newest = next(in_log, None)
    after = -1 if newest is None else newest.version
    for merged in reversed(log.merged(after=after)):
        if merged.kind == "snapshot" and merged.last <= head:
            manifest = readable(log.read_merged, merged)
            if manifest is not None and (newest is None or manifest.stream == newest.stream):
                yield manifest
    if newest is not None:
        yield newest
        yield from in_log


def _readable_in_log(log: Entries, head: int) -> Iterator[Manifest]:
    """Yield the snapshots in the log up to version ``head``, newest first.

    Stops after three unreadable entries, because each read may take as long as the store's timeout. During an outage,
    the caller should wait instead.
    """
    version, num_unreadable = head, 0
    while version >= 0 and num_unreadable < _MAX_UNREADABLE:
        entry = readable(log.read, version)
        if entry is not None and entry.kind == "snapshot":
            yield entry
        elif entry is not None:
            version = -1 if entry.snapshot is None else entry.snapshot
            continue
        else:
            num_unreadable += 1
        version -= 1  # the entry below names the preceding snapshot


def merged_deltas(
    log: Entries, position: Position, *, allows: Allows | None, skips_unreadable: bool
) -> Iterator[Manifest]:
    """Yield the merged deltas that a reader at a position can apply, the one with the highest last version first.

    A malformed one ends the search, because merged entries add no information.
    """
    try:
        for merged in reversed(log.merged(after=position.version)):
            if merged.kind == "delta" and merged.first <= position.version + 1:
                entry = log.read_merged(merged)
                if entry is not None and is_next(entry, position) and (allows is None or allows(entry)):
                    yield entry
    except (MalformedError, StorageError) as error:
        if isinstance(error, StorageError) and not skips_unreadable:
            raise


def is_next(merged: Manifest, position: Position) -> bool:
    """Return True if a reader at a position can apply a merged delta."""
    parent = merged.parent
    if merged.stream != position.stream or merged.generation < (position.generation or 0) or parent is None:
        return False
    return parent == position.link if parent.version == position.version else parent.version < position.version


def path_to(log: Entries, version: int, *, position: Position | None = None, of_any: bool = False) -> list[Manifest]:
    """Return the entries to apply to reach a version, in order: a snapshot and its successors up to the version.

    Starts at a merged snapshot if there is one: retention may have deleted the versions that it replaces, or only their
    parts.

    Args:
        log: the log.
        version: version of the newest stream of the log.
        position: position of the reader, whose stream must be the newest one; None for any stream.
        of_any: True to accept also a version of a former stream of the log, and one below a malformed newest entry.

    Raises:
        MissingVersionError: if a required entry is missing or was replaced.
        NoSnapshotError: if there is no snapshot at or below the version.
        InvalidArgumentError: if the version is invalid or not committed yet.
        StreamReplacedError: if the position belongs to another stream.
        MalformedError: if an entry cannot be read, or has a lower generation than its predecessor.
        StorageError: if the store cannot be read.
    """
    head = _newest_below(log, version) if of_any else log.head()
    if head is None or type(version) is not int or not 0 <= version <= head.version:
        remedy = "Publish a snapshot first" if head is None else f"Pass one of the versions up to {head.version}"
        raise InvalidArgumentError("version", version, remedy)
    if position is not None and position.stream != head.stream:
        raise StreamReplacedError(log.url, position.version)
    merged = {each.last: each for each in log.merged() if each.kind == "snapshot"}
    path: list[Manifest] = []
    link: Link | None = None
    asked = version
    found = _entry(log, version, None, merged) if of_any else None
    stream = head.stream if found is None else found.stream
    while not path or path[-1].kind != "snapshot":
        entry = _entry(log, version, link, merged)
        if of_any and path and path[-1].forked_from is not None:
            remedy = f"Pass one before version {path[-1].version}, which starts another stream, or a later snapshot"
            raise InvalidArgumentError("version", asked, remedy)
        if entry is None or entry.stream != stream:
            raise MissingVersionError(version, head.version)
        if not path and entry.kind == "claim" and not log.is_committed(entry):
            raise MissingVersionError(version, head.version)
        if path and entry.generation > path[-1].generation:
            raise generation_error(path[-1], entry)
        path.append(entry)
        if entry.kind != "snapshot":
            if entry.parent is None:
                raise NoSnapshotError(log.url, None if head.snapshot is None else asked)
            link = entry.parent
            version = link.version
    return path[::-1]


def steps_to(log: Entries, target: Manifest, position: Position) -> list[Manifest] | None:
    """Return the entries of the log from a position to a later entry; None if they do not lead there."""
    path: list[Manifest] = []
    entry: Manifest | None = target
    while entry is not None and entry.stream == position.stream and entry.version > position.version:
        path.append(entry)
        if entry.parent == position.link:
            return path[::-1]
        link = entry.parent
        entry = None if link is None else readable(log.read, link.version)
        if entry is not None and (entry.link != link or entry.generation > path[-1].generation):
            return None
    return None


def _newest_below(log: Entries, version: int) -> Manifest | None:
    """Return the newest entry; if it is malformed, the newest well-formed one, if that reaches ``version``."""
    try:
        return log.head()
    except MalformedError:
        found = (readable(log.read, each) for each in reversed(log.versions()))
        head = next((each for each in found if each is not None), None)
        if head is None or version > head.version:
            raise
        return head


def _entry(log: Entries, version: int, link: Link | None, merged: Mapping[int, Merged]) -> Manifest | None:
    """Return the merged snapshot or else the log entry of a version, or another merged entry that ends with it.

    Returns None if no entry matches.

    Args:
        log: the log.
        version: version of the entry.
        link: required link of the entry; None accepts every link.
        merged: last version to reference of each merged snapshot.
    """
    entry = log.read(version)
    if entry is not None and link in (None, entry.link):
        snapshot = merged.get(version) if entry.kind != "snapshot" else None
        whole = None if snapshot is None else readable(log.read_merged, snapshot)
        return whole if whole is not None and whole.link == entry.link else entry
    found = [each for each in log.merged(after=version - 1) if each.last == version]
    # A store that cannot list names only the newest merged snapshot.
    found.sort(key=lambda each: (each.kind != "snapshot", each.first))
    for each in (*found, Merged(version, 0, "snapshot")):
        whole = log.read_merged(each)
        if whole is not None and link in (None, whole.link):
            return whole
    return None
