"""Functions that find the entries to apply to reach a version. Their results depend only on the entries of a log.

The argument ``allows`` is a function that returns False for an entry that the reader must not apply yet. None allows
every entry.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeVar

from delta_tracker.errors import (
    InvalidArgumentError,
    MalformedError,
    MissingVersionError,
    NoSnapshotError,
    OlderCopyError,
    StorageError,
    StreamReplacedError,
)
from delta_tracker.stream.format.manifest import Link, Manifest, Merged
from delta_tracker.stream.log import generation_error
from delta_tracker.stream.reading.position import Position

_MAX_UNREADABLE = 3
_MAX_MALFORMED = 2  # consecutive malformed entries that are skipped in a search for a claim
_T = TypeVar("_T")

Allows = Callable[[Manifest], bool]
ReadMerged = Callable[[Merged], Manifest | None]


class Entries(Protocol):
    """Protocol for reading one log: a :class:`~delta_tracker.stream.log.StreamLog`, or an immutable view of it.

    The methods raise MalformedError for an entry that does not follow the format, and StorageError if a read fails.
    """

    @property
    def url(self) -> str:
        """URL of the store."""

    def read(self, version: int) -> Manifest | None:
        """Return the entry of ``version``; None if it does not exist."""

    def read_merged(self, merged: Merged) -> Manifest | None:
        """Return the merged entry to which ``merged`` refers; None if it does not exist."""

    def merged(self, *, after: int = -1) -> list[Merged]:
        """Return references to the merged entries with a last version above ``after``, ascending."""

    def versions(self, *, after: int = -1) -> list[int]:
        """Return the versions above ``after``, ascending."""

    def head(self) -> Manifest | None:
        """Return the newest entry; None if there is none."""

    def is_committed(self, entry: Manifest) -> bool:
        """Return True if ``entry`` is part of the log; see :meth:`StreamLog.is_committed`."""


def readable(read: Callable[[_T], Manifest | None], what: _T) -> Manifest | None:
    """Return the entry ``read(what)``; None if it does not exist, cannot be read, or is malformed."""
    with suppress(MalformedError, StorageError):
        return read(what)
    return None


def newest_readable(log: Entries) -> Manifest | None:
    """Return the newest entry that can be read and follows the format; None if there is none. Lists the log."""
    found = (readable(log.read, version) for version in reversed(log.versions()))
    return next((each for each in found if each is not None), None)


def last_with_rows(log: Entries, entry: Manifest | None) -> Manifest | None:
    """Return the last snapshot or delta up to and including ``entry``; None if an entry in between is missing."""
    while entry is not None and entry.kind == "claim" and entry.parent is not None:
        entry = log.read(entry.parent.version)
    return entry


def next_entry(log: Entries, position: Position, entry: Manifest | None) -> Manifest | None:
    """Check ``entry``, the result of :meth:`Source.next` for ``position``, and return it.

    Raises StreamReplacedError if ``entry`` does not follow the position's entry, and MissingVersionError if ``entry``
    is a claim that is not part of the log.
    """
    if entry is None:
        return None
    if not position.leads_to(entry):
        raise StreamReplacedError(log.url, position.version)
    if entry.kind == "claim" and not log.is_committed(entry):
        head = log.head() or entry
        raise MissingVersionError(entry.version, head.version)
    return entry


def snapshots(log: Entries, *, allows: Allows | None = None, skips_unreadable: bool = False) -> Iterator[Manifest]:
    """Yield the snapshots that a reader can start from, newest first.

    With ``skips_unreadable``, skips up to two consecutive entries of the log that are unreadable or malformed.
    Unreadable merged entries are always skipped, because they are redundant.
    """
    found = _snapshots(log, skips_unreadable=skips_unreadable, are_all_merged=skips_unreadable or allows is not None)
    return (each for each in found if allows is None or allows(each))


def _snapshots(log: Entries, *, skips_unreadable: bool, are_all_merged: bool) -> Iterator[Manifest]:
    read = partial(readable, log.read) if skips_unreadable else log.read
    num_tries = _MAX_UNREADABLE if skips_unreadable else 1

    def newest_below(version: int) -> Manifest | None:
        entries = map(read, range(version - 1, max(-1, version - 1 - num_tries), -1))
        return next((each for each in entries if each is not None), None)

    listed = max(log.versions(), default=-1) if skips_unreadable else -1
    head = newest_below(listed + 1) if skips_unreadable else log.head()
    if head is None and listed < 0:
        return
    version = None if head is None else head.snapshot
    newest = listed if head is None else max(head.version, listed)
    after = -1 if are_all_merged or version is None else version
    merged = [each for each in log.merged(after=after) if each.kind == "snapshot" and each.last <= newest]
    while merged or version is not None:
        if version is None or (merged and merged[-1].last > version):
            manifest = readable(log.read_merged, merged.pop())
            if manifest is not None and (head is None or manifest.stream == head.stream):
                yield manifest
            continue
        manifest = read(version)
        if manifest is not None and manifest.kind == "snapshot":
            yield manifest
        before = newest_below(version)  # which names the preceding snapshot
        version = None if before is None else before.snapshot


def merged_deltas(
    log: Entries, position: Position, *, allows: Allows | None, skips_unreadable: bool
) -> Iterator[Manifest]:
    """Yield the merged deltas that a reader at ``position`` can apply, ordered by last version, highest first.

    A malformed merged delta ends the search, because merged deltas are redundant.
    """
    with suppress(MalformedError, *([StorageError] if skips_unreadable else [])):
        for merged in reversed(log.merged(after=position.version)):
            if merged.kind == "delta" and merged.first <= position.version + 1:
                entry = log.read_merged(merged)
                if entry is not None and is_next(entry, position) and (allows is None or allows(entry)):
                    yield entry


def is_next(merged: Manifest, position: Position) -> bool:
    """Return True if a reader at ``position`` can apply the merged delta ``merged``."""
    parent = merged.parent
    if merged.stream != position.stream or merged.generation < position.generation or parent is None:
        return False
    return parent == position.link if parent.version == position.version else parent.version < position.version


def path_to(log: Entries, version: int, *, position: Position | None = None, of_any: bool = False) -> list[Manifest]:
    """Return the entries to apply, in order, to reach ``version``: a snapshot and its successors.

    ``version`` must belong to the newest stream of the log. With ``of_any``, it may also belong to a former stream, and
    the newest entry may be malformed.

    Raises InvalidArgumentError if ``version`` is invalid or has not been committed, StreamReplacedError if ``position``
    is given and belongs to another stream, and the errors of :func:`path_to_entry`.
    """
    head = _newest_below(log, version) if of_any else log.head()
    if head is None or type(version) is not int or not 0 <= version <= head.version:
        remedy = "Publish a snapshot first" if head is None else f"Pass one of the versions up to {head.version}"
        raise InvalidArgumentError("version", version, remedy)
    if position is not None and position.stream != head.stream:
        raise StreamReplacedError(log.url, position.version)
    try:
        return path_to_entry(log, committed_entry(log, version, head, of_any=of_any), head.version)
    except NoSnapshotError:
        if head.snapshot is None:
            raise NoSnapshotError(log.url) from None
        raise
    except MissingVersionError as error:
        first = log.read(error.version + 1) if of_any else None
        if first is None or first.forked_from is None:
            raise
        remedy = f"Pass one before version {first.version}, which starts another stream, or a later snapshot"
        raise InvalidArgumentError("version", version, remedy) from error


def path_to_entry(
    log: Entries, target: Manifest, newest: int, *, position: Position | None = None, shortcut: ReadMerged | None = None
) -> list[Manifest]:
    """Return the entries to apply, in order, to reach the entry ``target``, which may be a merged entry.

    The path begins after ``position`` if only deltas and claims follow up to ``target``. Otherwise, the path begins
    with the newest snapshot at or below ``target``, which may be a merged snapshot. The path is empty if ``target`` is
    the entry at ``position``. ``newest`` is the newest version, for error messages. ``shortcut`` is a function that
    reads a merged entry to apply instead of the versions that it replaces, and returns None if the entry must not be
    used. Without ``shortcut``, merged deltas are used only for missing versions.

    Raises:
        MissingVersionError: if a required entry is missing or was replaced.
        NoSnapshotError: if there is no snapshot at or below ``target``.
        MalformedError: if an entry cannot be read, or has a lower generation than its predecessor.
    """
    if position is not None:
        is_near = (target.snapshot or 0) <= position.version <= target.version
        position = position if is_near and position.stream == target.stream else None
    ways = [(place, read) for place in dict.fromkeys((position, None)) for read in dict.fromkeys((shortcut, None))]
    for way in ways[:-1]:
        with suppress(MalformedError, MissingVersionError, NoSnapshotError):
            return _path(log, target, newest, *way)
    return _path(log, target, newest, *ways[-1])


def _path(
    log: Entries, target: Manifest, newest: int, position: Position | None, shortcut: ReadMerged | None
) -> list[Manifest]:
    """Follow the links of the entries from ``target`` back to ``position`` or to the first snapshot."""
    after = (target.snapshot or 0) - 1 if position is None else position.version
    merged = [] if position is not None and shortcut is None else log.merged(after=after)
    starts = [each for each in merged if position is None and each.kind == "snapshot" and each.last <= target.version]
    floor = max((each.last for each in starts), default=-1) if position is None else position.version
    deltas = [each for each in merged if shortcut is not None and each.kind == "delta" and each.first > floor]
    instead = {each.last: each for each in [*reversed(deltas), *starts]}  # the longest delta with each last version
    read = shortcut or partial(readable, log.read_merged)
    path: list[Manifest] = []
    link = target.link
    while position is None or link != position.link:
        if position is not None and link.version <= position.version:
            raise MissingVersionError(position.version, newest)
        entry = read(instead[link.version]) if link.version in instead else None
        if entry is None or entry.link != link:
            entry = target if link == target.link else _entry(log, link.version, link)
        if entry is None and (entry := _over(log, link.version, merged, path)) is not None:
            path = [each for each in path if each.version > entry.version]
        if entry is None or entry.stream != target.stream:
            raise MissingVersionError(link.version, newest)
        if path and entry.generation > path[-1].generation:
            raise generation_error(path[-1], entry)
        path.append(entry)
        if entry.kind == "snapshot":
            break
        if entry.parent is None:
            raise NoSnapshotError(log.url, target.version)
        link = entry.parent
    if position is not None and path and path[-1].generation < position.generation:
        raise MissingVersionError(path[-1].version, newest)
    return path[::-1]


def _over(log: Entries, version: int, merged: Sequence[Merged], path: Sequence[Manifest]) -> Manifest | None:
    """Return a merged entry that replaces ``version`` and ends with an entry of ``path``; None if there is none."""
    spans = [each for each in merged if each.kind == "delta" and each.first <= version < each.last]
    # A store that cannot list names no older ones. Retention keeps the entry that a snapshot ends with, and one more.
    spans += [Merged(each.version, 0, "snapshot") for each in reversed(path[-2:])]
    found = (readable(log.read_merged, each) for each in spans)
    links = {each.link for each in path}
    return next((each for each in found if each is not None and each.link in links), None)


def _newest_below(log: Entries, version: int) -> Manifest | None:
    """Return the newest entry or, if it is malformed, the newest well-formed entry, which must reach ``version``."""
    try:
        return log.head()
    except MalformedError:
        head = newest_readable(log)
        if head is None or version > head.version:
            raise
        return head


def committed_entry(
    log: Entries, version: int, head: Manifest, *, link: Link | None = None, of_any: bool = False
) -> Manifest:
    """Return the entry of ``version`` in the log, or a merged entry that ends with this version.

    The entry must match ``link`` unless ``link`` is None, and belong to the stream of ``head``, the newest entry,
    unless ``of_any`` is True. Raises MissingVersionError if no committed entry meets these conditions.
    """
    entry = _entry(log, version, link)
    if entry is None or (entry.stream != head.stream and not of_any):
        raise MissingVersionError(version, head.version)
    if entry.kind == "claim" and not log.is_committed(entry):
        raise MissingVersionError(version, head.version)
    return entry


def _entry(log: Entries, version: int, link: Link | None) -> Manifest | None:
    entry = log.read(version)
    if entry is not None and link in (None, entry.link):
        return entry
    found = [each for each in log.merged(after=version - 1) if each.last == version]
    found.sort(key=lambda each: (each.kind != "snapshot", each.first))
    for each in [*found, Merged(version, 0, "snapshot")]:  # a store that cannot list names only the newest snapshot
        entry = log.read_merged(each)
        if entry is not None and link in (None, entry.link):
            return entry
    return None


def _is_other_copy(log: Entries, position: Position) -> bool:
    """Return True if ``log``, of the position's stream, ends before the position, or its entry there differs."""
    head = log.head()
    return (head is not None and head.version < position.version) or has_other_entry(log, position)


def has_other_entry(log: Entries, position: Position) -> bool:
    """Return True if the log's entry at the position's version differs from the position's entry."""
    held = readable(log.read, position.version)
    return held is not None and not position.names(held)


def continues(log: Entries, position: Position, merged: Manifest) -> bool:
    """Return True if ``merged``, a merged delta, belongs to the history of ``position``, so that it lacks no rows."""
    assert merged.parent is not None, "the entry before a delta"
    return merged.parent.version == position.version or not has_other_entry(log, position)


def is_forward(log: Entries, position: Position, entry: Manifest) -> bool:
    """Return True if ``entry``, of the position's stream, is newer. In a restored copy, its version may be lower."""
    if position.precedes(entry):
        return entry.version > position.version or _is_other_copy(log, position)
    return _is_restored(log, position, entry) and _is_other_copy(log, position)


def _is_restored(log: Entries, position: Position, entry: Manifest) -> bool:
    """Return True if a publisher has continued an older copy of the log, from which later claims are missing.

    The generation of ``entry`` is then not higher than the position's, but ``entry`` was committed much later.
    """
    head = log.head()
    return head is not None and head.generation == entry.generation and position.is_long_before(entry)


def check_is_newer(log: Entries, position: Position) -> None:
    """Raise OlderCopyError if ``log`` is another copy of the position's stream, without a newer entry."""
    head = log.head()
    if head is None or head.stream != position.stream or position.precedes(head) or position.is_long_before(head):
        return
    if _is_other_copy(log, position):
        raise OlderCopyError(log.url, head.version, position.version)


def former_streams(
    log: Entries, head: Manifest, read: Callable[[int], Manifest | None] | None = None
) -> tuple[str, ...]:
    """Return the ids of the former streams that the stream of ``head`` continues, newest first.

    ``read`` returns the entry of a version, or None if it cannot be read. By default, reads the entries of ``log``.
    """
    claims = forks(log.versions(), head.stream, read or partial(readable, log.read))
    return tuple(each.forked_from.stream for each in claims if each.forked_from is not None)


def forks(versions: list[int], stream: str, read: Callable[[int], Manifest | None]) -> Iterator[Manifest]:
    """Yield the claim that links ``stream`` to its former stream, then the claim of the former stream, and so on.

    ``versions`` are the versions of the log, ascending. The last version must belong to ``stream``.
    """
    found = {stream}
    while versions:

        def is_of_stream(version: int, name: str = stream) -> bool:
            entries = map(read, range(version, version + _MAX_MALFORMED + 1))
            return next((entry.stream == name for entry in entries if entry is not None), False)

        first = bisect_left(versions, True, key=is_of_stream)
        claim = None if first == len(versions) else read(versions[first])
        if claim is None or claim.forked_from is None or claim.forked_from.stream in found:
            return
        yield claim
        stream = claim.forked_from.stream
        found.add(stream)
        versions = versions[:first]
