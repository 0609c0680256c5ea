"""Retention: deletion of versions and objects that no reader needs. See the sections Log and Pins of FORMAT.md.

Versions are deleted oldest first, so that the entries that readers use form a contiguous range. These entries are kept:

- the head and its parent;
- each claim and the entry before it, without their objects, so that a fenced publisher cannot create these entries;
- the newest snapshot that is older than the grace period, and all later versions. A snapshot does not count if one of
  its objects is missing or has another size;
- the entries that lead to the version of the newest pin.

An *orphan* is an object that no process needs: an object below ``parts/`` that no entry names, the draft of an
interrupted write, the object of an interrupted probe, the heartbeat of a process that has ended, or the announcement of
an interrupted pass.

In a local store, the kept entries are synced before any deletion, and the deletions of entries are synced before their
objects are deleted. After a power loss, the objects of every entry therefore exist. Any process may run retention at
any time.
"""

import logging
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeVar

from delta_tracker.arguments import check_count, is_number, refuses_unknown
from delta_tracker.errors import InvalidArgumentError, MissingVersionError, NoSnapshotError
from delta_tracker.stream.format.manifest import Manifest, Merged, entry_name
from delta_tracker.stream.format.table_choice import mirrored_tables
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.pin import (
    DELETIONS_NAME,
    DELETIONS_SECONDS,
    Pin,
    announce_deletions,
    newest_counter,
    newest_pin,
)
from delta_tracker.stream.reading.path import path_to
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.stream.storage.store import StoredObject

_logger = logging.getLogger(__name__)
_K = TypeVar("_K")

_DELETIONS_PER_LOOK = 100
_PASS_SECONDS = DELETIONS_SECONDS / 2
_SCAN_SECONDS = 600.0  # between two passes of RetentionPasses that read every entry
_SCAN_SHARE = 0.01  # of the time, which these passes take at most
# Minimum age of a deleted orphan. A part with a version up to the head's must get its entry within this time.
ORPHAN_SECONDS = 3600.0
GRACE_SECONDS = 600.0  # for which readers may still need a superseded snapshot
HEARTBEAT_SECONDS = 86_400.0  # predictors and publishers replace their heartbeats every few seconds
_PART_NAME = re.compile(r"parts/([0-9]{20})-g[0-9]+-[0-9a-z]+-[0-9a-f]{16}\.safetensors")
_DRAFT_NAME = re.compile(r"drafts/[0-9a-f]{16}")
_NAMES = {
    "parts": _PART_NAME,
    "drafts": _DRAFT_NAME,
    "probe": re.compile(r"probe/[0-9a-f]{32}"),
    "predictors": re.compile(r"predictors/[A-Za-z0-9][A-Za-z0-9_-]{0,63}\.json"),
    "publishers": re.compile(r"publishers/[0-9]{20}\.json"),
    "control/retention": DELETIONS_NAME,
}  # folder to the names of those of its objects that may be orphans


@refuses_unknown()
@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Bounds on the number, age and size of the versions that a stream keeps.

    A version that exceeds one of the bounds is deleted once no reader needs it.

    Args:
        versions: maximum number of versions; None for no bound.
        seconds: maximum age of a version; None for no bound.
        num_bytes: maximum total size in bytes of the objects of a version and all newer versions; None for no bound.
        grace_seconds: time for which a snapshot and the versions after it are kept after the next snapshot's commit.

    A heartbeat is deleted if it is not replaced for a day. A part that no entry names, a draft and the object of a
    probe are deleted after an hour. The draft of a running write is always kept.

    Raises:
        InvalidArgumentError: if a bound is invalid.

    Example:
        >>> Retention(versions=500).versions  # for Upkeep(retention=Retention(versions=500))
        500
    """

    versions: int | None = None
    seconds: float | None = None
    num_bytes: int | None = None
    grace_seconds: float = GRACE_SECONDS

    def __post_init__(self) -> None:
        for name, bound in (("versions", self.versions), ("num_bytes", self.num_bytes)):
            if bound is not None:
                check_count(name, bound)
        for name, seconds in (("seconds", self.seconds or 0.0), ("grace_seconds", self.grace_seconds)):
            if not (is_number(seconds) and seconds >= 0):
                raise InvalidArgumentError(name, seconds, "Pass 0 seconds or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Retained:
    """Numbers of log entries, merged entries and orphans that a pass deleted, and total size of the deleted objects."""

    versions: int = 0
    merged: int = 0
    orphans: int = 0
    num_bytes: int = 0


def retain(stream: Storage | StreamLog, retention: Retention, now: Callable[[], float] | None = None) -> Retained:
    """Delete the versions, merged entries and orphans that ``retention`` does not keep.

    All entries are read first, and nothing is deleted if an entry cannot be read. An interrupted pass leaves a valid
    stream. Objects with names that this library does not use are never deleted.

    ``now`` returns the store's Unix time in seconds, from which ages of versions and merged entries are computed. None
    uses the newest modification time in the store.

    Raises:
        MalformedError: if an entry does not follow the format; nothing was deleted.
        StorageError: if the store cannot be read, or fails during the pass.
    """
    return RetentionPasses(stream if isinstance(stream, StreamLog) else StreamLog(stream), retention, now).run()


class RetentionPasses:
    """Runner of repeated retention passes over one log. Not thread-safe.

    A pass first reads only the entries created since the last pass. The pass then runs :func:`retain`, which reads all
    entries, if there is something to delete or if the last :func:`retain` was at least ten minutes ago (longer for a
    long log).
    """

    def __init__(self, log: StreamLog, retention: Retention, now: Callable[[], float] | None = None) -> None:
        self._log = log
        self._retention = retention
        self._now = now
        self._left: _PassState | None = None  # by the last pass; None to run retain()
        self._due = 0.0  # monotonic time of the next retain()

    def run(self) -> Retained:
        """Run one pass, see :func:`retain`."""
        left, self._left = self._left, None
        is_known = left is not None and time.monotonic() < self._due and left.advance(self._log)
        if left is not None and is_known and not left.may_delete(self._retention, self._now):
            self._left = left
            return Retained()
        began = time.monotonic()
        retained = self._read_all()
        ended = time.monotonic()
        self._due = ended + max(_SCAN_SECONDS, (ended - began) / _SCAN_SHARE)
        return retained

    def _read_all(self) -> Retained:
        storage, pin = self._log.storage, newest_pin(self._log.storage)
        held = _Held.read(self._log, pin)
        if held is None:
            return Retained()
        plan = _Plan.of(held, self._retention, held.newest if self._now is None else self._now())
        left = _PassState.of(held, plan)
        if not (plan.versions or plan.merged or plan.unused or plan.orphans):
            self._left = left
            return Retained()
        # The entries that were read make these objects unnecessary, so they must be on disk first. An entry whose
        # deletion is not on disk may be there again after a power loss, and must find its objects then.
        _sync_entries(storage)
        # Announced before the look for a pin: a pin that is written after this look finds the announcement.
        deletions = _Deletions(storage, 0 if pin is None else pin.counter)
        announcement = announce_deletions(storage, held.head.stream, plan.before)
        versions = deletions.of(map(entry_name, plan.versions))
        merged = deletions.of(each.name for each in plan.merged)
        if plan.versions or plan.merged:
            _sync_entries(storage)
        unused = deletions.of(plan.unused)
        storage.delete(announcement)
        orphans = deletions.of(plan.orphans)
        if not deletions.is_over:
            self._left = left
        num_bytes = sum(plan.unused[name] for name in unused) + sum(plan.orphans[name] for name in orphans)
        return Retained(versions=len(versions), merged=len(merged), orphans=len(orphans), num_bytes=num_bytes)


# What a pass reads


@dataclass(frozen=True, slots=True)
class _Held:
    """All entries of a stream, with the objects that the store should contain and the objects that may be orphans.

    The entries below the first gap are claims, the entries before claims, and entries of delayed publishers.
    """

    head: Manifest
    entries: Mapping[int, Manifest]  # from the head down to the first gap
    below: Mapping[int, Manifest]  # below this gap
    merged: Mapping[Merged, Manifest]
    snapshots: Mapping[int, float]  # version of each whole snapshot in the log to the Unix time of its commit
    lost: set[Merged]  # merged entries of which an object is missing or has another size
    path: Sequence[Manifest]  # entries that lead to the version of a pin
    own: Sequence[StoredObject]  # objects in the folders of `_NAMES` whose names this library creates
    parts: Mapping[str, int]  # name to size in bytes of the objects below `parts/`
    # Newest modification time, also of the entries, at most this host's time. The store's time is not before it, so
    # ages relative to it are never too high. A time after this host's is wrong, or this host's clock is behind. Ages
    # that are too low only delay deletions.
    newest: float

    @classmethod
    def read(cls, log: StreamLog, pin: Pin | None) -> "_Held | None":
        """Read all entries; return None if the store is empty."""
        # List parts before entries, so that a part committed between the two listings does not look like an orphan.
        listed = {folder: log.storage.objects(folder) for folder in _NAMES}
        choice, versions = mirrored_tables(log.storage), log.versions()
        entries: dict[int, Manifest] = {}
        # Read downwards, because a concurrent pass deletes upwards and could otherwise cause a gap. A listing may miss
        # an entry created during it, so only a read that finds no object is a gap.
        for version in range(versions[-1] if versions else -1, -1, -1):
            manifest = log.read(version)
            if manifest is None:
                break
            entries[version] = choice.copied(manifest)
        if not entries:
            return None
        first, head = min(entries), entries[max(entries)]
        # Other programs may date theirs freely.
        own = [each for folder in _NAMES for each in listed[folder] if _NAMES[folder].fullmatch(each.name)]
        parts = {each.name: each.num_bytes for each in listed["parts"]}
        older = _present({version: log.read(version) for version in versions if version < first})
        below = {version: choice.copied(entry) for version, entry in older.items()}
        merged = {each: choice.copied(found) for each in log.merged() if (found := log.read_merged(each)) is not None}
        times = [each.modified or 0.0 for each in (*entries.values(), *merged.values())]
        newest = min(max(0.0, *times, *(each.modified for each in own)), time.time())

        def is_whole(entry: Manifest) -> bool:
            return all(parts.get(each.name) == each.num_bytes for each in entry.objects)

        whole = {version: each for version, each in entries.items() if each.kind == "snapshot" and is_whole(each)}
        snapshots = {version: each.committed for version, each in whole.items()}
        lost = {each for each, entry in merged.items() if not is_whole(entry)}
        path = _pinned_path(log, entries, pin)
        return cls(head, entries, below, merged, snapshots, lost, path, own, parts, newest)


def _present(found: Mapping[_K, Manifest | None]) -> dict[_K, Manifest]:
    return {key: manifest for key, manifest in found.items() if manifest is not None}


def _pinned_path(log: StreamLog, entries: Mapping[int, Manifest], pin: Pin | None) -> list[Manifest]:
    if pin is None or pin.kind != "pin" or pin.stream != entries[max(entries)].stream:
        return []
    try:
        path = path_to(log, pin.version)
    except (MissingVersionError, NoSnapshotError, InvalidArgumentError) as error:
        text = "the pinned version cannot be reached, so nothing is kept for it: counter=%d version=%d error=%s"
        _logger.warning(text, pin.counter, pin.version, error)
        return []
    entry = entries.get(pin.version)
    return path if entry is None or path[-1].merges is None else [*path, entry]


# Rules: pure functions of what was read


def _orphans(held: _Held, named: Collection[str]) -> dict[str, int]:
    ages = {"predictors": HEARTBEAT_SECONDS, "publishers": HEARTBEAT_SECONDS, "control/retention": DELETIONS_SECONDS}
    found = {}
    for each in held.own:
        part = _PART_NAME.fullmatch(each.name)
        # A part above the head may get its entry yet.
        is_needed = part is not None and (int(part[1]) > held.head.version or each.name in named)
        age = ages.get(each.name.rpartition("/")[0], ORPHAN_SECONDS)
        if not is_needed and held.newest - each.modified > age:
            found[each.name] = each.num_bytes
    return found


def _needed(held: "_Held | _PassState", before: float) -> tuple[int, int, list[Merged]]:
    """Return the version at which all readers can start, the lowest version to keep, and superseded merged entries.

    Readers can start at the newest snapshot, in the log or merged, that was committed at or before ``before``; -1 if
    there is none. Superseded merged entries, sorted by name, are snapshots and entries of former streams that end
    before this start, deltas that end at or before it, and deltas that another delta, committed at or before
    ``before``, covers. Merged entries in ``held.lost`` do not supersede others.
    """
    snapshots, merged, lost, head = held.snapshots, held.merged, held.lost, held.head
    in_time = [
        each
        for each, entry in merged.items()
        if entry.stream == head.stream and each.last <= head.version and entry.committed <= before and each not in lost
    ]
    starts = [version for version, committed in snapshots.items() if committed <= before]
    start = max([*starts, *(each.last for each in in_time if each.kind == "snapshot")], default=-1)
    deltas = [each for each in in_time if each.kind == "delta"]

    def is_superseded(each: Merged) -> bool:
        if each.kind == "snapshot" or merged[each].stream != head.stream:
            return each.last < start
        return each.last <= start or any(
            other != each and other.first <= each.first and each.last <= other.last for other in deltas
        )

    superseded = sorted(filter(is_superseded, merged), key=lambda each: each.name)
    return start, min(start if start in snapshots else start + 1, head.version - 1), superseded


def _exceeds(retention: Retention, num_versions: int, seconds: float, num_bytes: int) -> bool:
    bounds = (retention.versions, num_versions), (retention.seconds, seconds), (retention.num_bytes, num_bytes)
    return any(bound is not None and value > bound for bound, value in bounds)


def _guards(entries: Mapping[int, Manifest], head: Manifest) -> set[int]:
    """Return the versions of the stream's claims, of the entries before them, and of earlier promotions' claims."""
    # A delayed publisher may have given its claim the name of an entry that retention had deleted. Such a claim has a
    # lower version than the log's claim of the same generation, or a higher generation than the head.
    claims = {
        manifest.generation: version  # keeps the highest version per generation
        for version, manifest in sorted(entries.items())
        if manifest.kind == "claim" and manifest.stream == head.stream and manifest.generation <= head.generation
    }
    found = set(claims.values())
    for version in claims.values():
        if version - 1 in entries and entries[version].parent == entries[version - 1].link:
            found.add(version - 1)
    forks = {each.stream: (each.version, each.forked_from.stream) for each in entries.values() if each.forked_from}
    stream = head.stream
    while stream in forks:
        version, stream = forks.pop(stream)
        found.add(version)
    return found


@dataclass(frozen=True, slots=True)
class _Plan:
    versions: list[int]  # whose entries are deleted, ascending
    first: int  # lowest version whose objects are kept
    merged: list[Merged]
    unused: dict[str, int]  # name to size in bytes of the objects of deleted entries
    orphans: dict[str, int]
    before: int  # version below which all deleted entries are

    @classmethod
    def of(cls, held: _Held, retention: Retention, now: float) -> "_Plan":
        start, floor, superseded = _needed(held, now - retention.grace_seconds)
        floor = min([floor, *(each.version for each in held.path if each.merges is None)])
        expired, num_bytes = set[int](), 0
        for number, (version, manifest) in enumerate(sorted(held.entries.items(), reverse=True), 1):
            num_bytes += manifest.total_bytes
            if _exceeds(retention, number, now - manifest.committed, num_bytes):
                expired.add(version)
        old = [version for version in takewhile(expired.__contains__, sorted(held.entries)) if version < floor]
        pinned = {Merged.of(each) for each in held.path if each.merges is not None}
        stale = [each for each in superseded if each not in pinned]
        # If another program has deleted entries, readers start below the gap until a snapshot above it is old enough.
        below = [] if start < min(held.entries) - 1 else sorted(held.below)

        entries = {**held.below, **held.entries}
        guards = _guards(entries, held.head)
        gone = [*below, *old]
        remaining = [entries[version] for version in entries.keys() - set(gone)]
        remaining += [held.merged[each] for each in held.merged.keys() - set(stale)]
        kept = {each.name for manifest in remaining for each in manifest.objects}
        objects = [each for merged in stale for each in held.merged[merged].objects]
        for version in gone:  # an earlier pass deleted the objects of most guards
            objects += [each for each in entries[version].objects if version not in guards or each.name in held.parts]
        unused = {each.name: each.num_bytes for each in objects if each.name not in kept}
        return cls(
            versions=[version for version in gone if version not in guards],
            first=old[-1] + 1 if old else min(held.entries),
            merged=stale,
            unused=unused,
            orphans=_orphans(held, kept | unused.keys()),
            before=1 + max([*gone, *(each.last for each in stale)], default=-1),
        )


@dataclass(slots=True)
class _PassState:
    """State after a complete pass, with which later passes decide whether they can delete anything."""

    head: Manifest
    first: int
    first_committed: float
    num_bytes: int  # of the versions from ``first`` on
    snapshots: dict[int, float]
    merged: dict[Merged, Manifest]
    lost: set[Merged]
    newest: float

    @classmethod
    def of(cls, held: _Held, plan: _Plan) -> "_PassState":
        kept = {version: each for version, each in held.entries.items() if version >= plan.first}
        return cls(
            head=held.head,
            first=plan.first,
            first_committed=kept[plan.first].committed,
            num_bytes=sum(each.total_bytes for each in kept.values()),
            snapshots={version: committed for version, committed in held.snapshots.items() if version in kept},
            merged={each: held.merged[each] for each in held.merged.keys() - set(plan.merged)},
            lost=held.lost,
            newest=held.newest,
        )

    def advance(self, log: StreamLog) -> bool:
        """Read the entries created since the last call. Return False if a complete pass is needed instead."""
        found = log.successors(self.head)
        if found is None:
            return False
        for entry in found:
            self.head = entry
            self.num_bytes += entry.total_bytes
            self.newest = max(self.newest, entry.committed)
            if entry.kind == "snapshot":
                self.snapshots[entry.version] = entry.committed
        # The next name is also free if another process has deleted the next entries, up to the ones that it kept.
        if not log.is_surely_newest(self.head) and log.versions(after=self.head.version):
            return False
        self.merged = _present({each: self.merged.get(each) or log.read_merged(each) for each in log.merged()})
        self.newest = max([self.newest, *(manifest.committed for manifest in self.merged.values())])
        return True

    def may_delete(self, retention: Retention, now: Callable[[], float] | None) -> bool:
        """Return True if a pass may delete a version or a merged entry."""
        clock = min(self.newest, time.time()) if now is None else now()
        _, floor, superseded = _needed(self, clock - retention.grace_seconds)
        num_versions = self.head.version - self.first + 1
        is_expired = _exceeds(retention, num_versions, clock - self.first_committed, self.num_bytes)
        return (self.first < floor and is_expired) or bool(superseded)


# Deletions


class _Deletions:
    """Deletions of one pass. They end when an operator writes a pin above ``counter``, or after half an hour."""

    def __init__(self, storage: Storage, counter: int) -> None:
        self._storage = storage
        self._counter = counter
        self._ends_at = time.monotonic() + _PASS_SECONDS
        self._left = 0  # deletions before the next look
        self.is_over = False  # True once the deletions ended before all objects were deleted

    def of(self, names: Iterable[str]) -> list[str]:
        """Delete objects, except drafts that are still being written. Return the names of the deleted objects."""
        return [name for name in names if self._may_continue() and self._delete(name)]

    def _delete(self, name: str) -> bool:
        if _DRAFT_NAME.fullmatch(name) is not None:
            return self._storage.delete_draft(name)
        self._storage.delete(name)
        return True

    def _may_continue(self) -> bool:
        """Return True if the next object may be deleted. Checks for a new pin at every 100th object."""
        if time.monotonic() >= self._ends_at:
            self.is_over = True
        if not self._left and not self.is_over:
            self.is_over = newest_counter(self._storage, after=self._counter) > self._counter
            self._left = _DELETIONS_PER_LOOK
        self._left -= 1
        return not self.is_over


def _sync_entries(storage: Storage) -> None:
    storage.sync("log")
    storage.sync("merged")
