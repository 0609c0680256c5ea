"""Stream position of a reader, and methods to find the entries to apply next or after a fault."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from msgspec import Struct, convert

from delta_tracker.errors import (
    DenseMismatchError,
    HeldVersionError,
    InvalidArgumentError,
    MalformedError,
    MissingVersionError,
    NoSnapshotError,
    StorageError,
    StreamError,
    StreamReplacedError,
    TableMismatchError,
    kind_of,
)
from delta_tracker.stream.format.field_types import Count
from delta_tracker.stream.format.manifest import Link, Manifest
from delta_tracker.stream.log import Merged, StreamLog, entry_name, generation_error
from delta_tracker.stream.store_clock import skew_problem

_logger = logging.getLogger(__name__)

_MAX_UNREADABLE = 3
_LIST_SECONDS = 60.0  # after which a log that seems to have no newer version is listed
_MIN_MERGED = 8  # fewer versions are read one by one to catch up
_MERGED_LIST_VERSIONS = 64  # the merged entries are listed once while a reader applies this many versions
_MAX_SIZED = 64  # versions whose sizes are read, to compare them with a snapshot's
_LEAST_LAG = 1e-6  # seconds; a lag of 0 means that all versions are applied
_T = TypeVar("_T")


class _SavedPlace(Struct, forbid_unknown_fields=True):
    stream: str
    version: Count
    xxh3: str


@dataclass(frozen=True, slots=True)
class Place:
    """Stream position of a reader: the id of the stream, 32 hex digits, and the link of the last applied entry."""

    stream: str
    link: Link

    def to_dict(self) -> dict[str, str | int]:
        """Return the stream position as plain values, for JSON."""
        return {"stream": self.stream, "version": self.link.version, "xxh3": self.link.xxh3}

    @classmethod
    def from_dict(cls, state: object) -> Place:
        """Restore a stream position from the result of :meth:`to_dict`.

        Raises:
            InvalidArgumentError: if ``state`` is invalid.
        """
        try:
            fields = convert(state, _SavedPlace)
        except ValueError as error:
            raise InvalidArgumentError("state", state, "Pass what state_dict() returned") from error
        return cls(fields.stream, Link(fields.version, fields.xxh3))


class StreamCursor:
    """Stream position of one reader, with methods to find the entries to apply.

    The cursor reads only manifests. The reader must call :meth:`moved` after it has applied an entry. Methods raise
    MalformedError and StorageError if the log cannot be read.

    Args:
        log: log of the stream.

    Attributes:
        log: log of the stream.
        place: stream position of the reader, None before the first applied entry.
        allows: returns False for an entry that the reader must not apply yet, for example because it stays behind the
            newest version; None to allow every entry.
        rested: version after which :meth:`next` found no entry, and the monotonic time at which that began; None if
            it found one since.
        has_listed: True if the last :meth:`check_for_gap` had to list the log.
    """

    def __init__(self, log: StreamLog) -> None:
        self.log = log
        self.place: Place | None = None
        self.allows: Callable[[Manifest], bool] | None = None
        self.rested: tuple[int, float] | None = None
        self.has_listed = False
        self._skewed = ""  # last publisher whose skew was logged
        self._listed_at = time.monotonic()  # time of the last listing by check_for_gap(), or of the construction
        self._newest = -1, 0.0  # newest version seen, and the monotonic time at which it was seen first
        # Entries that were skipped since the last applied entry, with the kinds of their errors. Each is logged once.
        self._skipped: set[tuple[object, ...]] = set()
        self._applied: tuple[Place, int] | None = None  # the last position of moved(), and its generation
        self._merged: tuple[int, list[Merged]] | None = (
            None  # merged entries, and the version at which they were listed
        )
        self._bound = -1  # version up to which ahead() leads
        self._avoided: set[str] = set()  # names of merged entries that could not be applied

    def through(self, log: StreamLog) -> StreamCursor:
        """Return a cursor with the same position and bound that reads the entries from ``log``."""
        other = StreamCursor(log)
        other.place, other.allows, other._applied = self.place, self.allows, self._applied
        return other

    @property
    def version(self) -> int | None:
        """Last applied version, None before the first."""
        return None if self.place is None else self.place.link.version

    def moved(self, manifest: Manifest) -> None:
        """Advance to ``manifest`` after it was applied."""
        self.place = Place(manifest.stream, manifest.link)
        self._skipped.clear()
        self._applied = self.place, manifest.generation
        if not self.log.is_listed:
            self.log.pointer.saw(manifest)  # it may have been read from another view of the store

    def next(self) -> Manifest | None:
        """Return the entry to apply next, None if there is none yet.

        Before the first applied entry, this is the newest snapshot. Returns None for an entry that :attr:`allows`
        rejects.

        Raises:
            NoSnapshotError: if there is no snapshot to start from.
            StreamReplacedError: if the next entry does not follow the last applied one, or has a lower generation.
            MissingVersionError: if the next entry is a claim that is not part of the log.
        """
        if self.place is None:
            return next(self.starts())
        held, now = self.place.link.version, time.monotonic()
        if not self.log.is_listed and not self.log.may_have(held + 1):
            self.rested = held, now
            return None
        manifest = self.log.read(held + 1)
        if manifest is None:
            self.rested = held, now
            return None
        self.rested = None
        if manifest.version > self._newest[0]:
            self._newest = manifest.version, now
        self._log_skew(manifest)
        applied = self._applied
        is_known = applied is not None and applied[0] is self.place
        generation = applied[1] if applied is not None and is_known else self._generation(self.place)
        if (
            manifest.stream != self.place.stream
            or manifest.parent != self.place.link
            or manifest.generation < generation
        ):
            raise StreamReplacedError(self.log.storage.url, held)
        if manifest.kind == "claim" and not self.log.is_committed(manifest):
            head = self.log.head() or manifest
            raise MissingVersionError(manifest.version, head.version)
        return manifest if self.allows is None or self.allows(manifest) else None

    def _generation(self, place: Place) -> int:
        """Return the generation of the last applied entry.

        A restored position does not contain it, so the entry is read. Returns 0 if it does not exist or is unreadable.
        """
        if self._applied is not None and self._applied[0] == place:
            return self._applied[1]
        entry = self._readable(self.log.read, place.link.version)
        if entry is None or (entry.stream, entry.link) != (place.stream, place.link):
            return 0
        self._applied = place, entry.generation
        return entry.generation

    def check_for_gap(self) -> None:
        """Raise an error if the next entry was deleted, or if the log was replaced.

        Call this method if :meth:`next` returns None. If the pointer object shows no newer version, and the log has the
        last applied entry, nothing is listed: retention deletes in ascending order, so the next entry was not deleted.
        Retention keeps claims, so that a claim proves this only with an entry before it, see
        :meth:`StreamLog.is_surely_newest`. Over http, a pointer to the last applied entry is enough. Otherwise, and
        once per minute because other programs may delete entries in any order, the entries from the last applied one on
        are listed, and :attr:`has_listed` is True.

        Raises:
            MissingVersionError: if the log has versions after the missing entry.
            StreamReplacedError: if the log does not have the last applied entry.
            UnreadablePointerError, StaleCacheError: if the pointer, over http, shows nothing.
        """
        self.has_listed = False
        if self.place is None:
            return
        held = self.place.link
        pointer = self.log.pointer.newest()
        if not self.log.is_listed:
            self.log.check_pointer()
        if pointer is not None and pointer.stream == self.place.stream and pointer.version <= held.version:
            if not self.log.is_listed and (pointer.version, pointer.xxh3) == (held.version, held.xxh3):
                return
            own = self.log.read(held.version)
            is_own = own is not None and own.xxh3 == held.xxh3
            is_due = self.log.is_listed and time.monotonic() - self._listed_at >= _LIST_SECONDS
            if own is not None and is_own and not is_due and (own.kind != "claim" or self.log.is_surely_newest(own)):
                return
        self.has_listed = self.log.is_listed
        self._listed_at = time.monotonic()
        if self.log.is_listed:  # a long log has many older entries
            head = max(self.log.versions(after=held.version - 1), default=-1)
        else:  # a claim of the pointer is a reason to look for the next entry, and is confirmed before a resync
            head = -1 if pointer is None else pointer.version
        present = self.log.read(held.version) if head == held.version else None
        if head < held.version or (present is not None and present.xxh3 != held.xxh3):
            raise StreamReplacedError(self.log.storage.url, held.version)
        # A version committed between next() and the listing is not a gap.
        if head > held.version and self.log.read(held.version + 1) is None:
            raise MissingVersionError(held.version + 1, head)

    def ahead(self) -> Manifest | None:
        """Return a merged delta or a newer snapshot to apply instead of many versions; None to use :meth:`next`.

        The merged delta is the longest that applies to the last applied version and skips at least 8 versions. A
        snapshot that is newer is returned instead if its parts are smaller than those of all versions on the way to it;
        beyond 64 versions their size is estimated. Entries that were passed to :meth:`avoid` and unreadable merged
        entries are skipped. The merged entries are listed once per 64 versions.
        """
        if self.place is None:
            return None
        held = self.place.link.version
        if self._bound < held + _MIN_MERGED:  # otherwise, it need not be looked for again
            self._bound = self.log.newest_version(held)
        newest = self._bound
        if newest < held + _MIN_MERGED:
            return None
        merged = self._merged_ahead(held, newest)
        snapshot = self._snapshot_ahead(held if merged is None else merged.version, newest)
        if snapshot is not None and self._is_smaller(snapshot, merged):
            return snapshot
        return merged

    def avoid(self, manifest: Manifest) -> None:
        """Do not return an entry from :meth:`ahead` again until 64 more versions are applied: it cannot be applied."""
        self._avoided.add(entry_name(manifest.version) if manifest.merges is None else Merged.of(manifest).name)

    def _merged_list(self, held: int) -> list[Merged]:
        """Return references to the merged entries, listed at most 64 versions ago."""
        listed = self._merged
        if listed is None or not listed[0] <= held < listed[0] + _MERGED_LIST_VERSIONS:
            listed = self._merged = held, self.log.merged(after=held)
            self._avoided.clear()
        return listed[1]

    def _merged_ahead(self, held: int, newest: int) -> Manifest | None:
        """Return the longest merged delta that the reader can apply; None if there is none."""
        for each in reversed(self._merged_list(held)):
            if each.kind == "delta" and each.first <= held + 1 and held + _MIN_MERGED <= each.last <= newest:
                manifest = self._read_ahead(each)
                if manifest is not None:
                    return manifest
        return None

    def _read_ahead(self, merged: Merged) -> Manifest | None:
        """Return a merged entry that the reader can apply; None if it cannot apply it, or cannot read it."""
        if merged.name in self._avoided:
            return None
        manifest = self._readable(self.log.read_merged, merged)
        if manifest is None:
            self._avoided.add(merged.name)
        return manifest if manifest is not None and self._is_ahead(manifest) else None

    def _snapshot_ahead(self, after: int, newest: int) -> Manifest | None:
        """Return the newest snapshot above ``after`` that the reader can apply; None if there is none."""
        for each in reversed(self._merged_list(self.version or 0)):
            if each.kind == "snapshot" and after < each.last <= newest:
                manifest = self._read_ahead(each)
                if manifest is not None:
                    in_log = self._log_snapshot(manifest.version, newest)
                    return manifest if in_log is None else in_log
        return self._log_snapshot(after, newest)

    def _log_snapshot(self, after: int, newest: int) -> Manifest | None:
        """Return the newest snapshot above ``after`` that is an entry of the log, and that the reader can apply."""
        entry = self._readable(self.log.read, newest)
        while entry is not None and entry.snapshot is not None and entry.snapshot > after:
            snapshot = self._readable(self.log.read, entry.snapshot)
            is_avoided = snapshot is not None and entry_name(snapshot.version) in self._avoided
            if snapshot is not None and not is_avoided and self._is_ahead(snapshot):
                return snapshot
            entry = self._readable(self.log.read, entry.snapshot - 1)
        return None

    def _is_ahead(self, manifest: Manifest) -> bool:
        """Return True if the reader can apply an entry that skips versions."""
        assert self.place is not None, "checked by ahead()"
        return (
            manifest.stream == self.place.stream
            and manifest.generation >= self._generation(self.place)
            and (manifest.kind != "delta" or _follows(manifest, self.place.link))
            and (self.allows is None or self.allows(manifest))
        )

    def _is_smaller(self, snapshot: Manifest, merged: Manifest | None) -> bool:
        """Return True if a snapshot has fewer bytes than ``merged`` and the versions after it, up to the snapshot's.

        True for an entry of the log, which is one of these versions. If another one is missing or cannot be read, the
        snapshot is the only way.
        """
        assert self.place is not None, "checked by ahead()"
        if snapshot.merges is None:
            return True
        num_bytes = 0 if merged is None else merged.num_bytes
        first = self.place.link.version if merged is None else merged.version
        for number, version in enumerate(range(first + 1, snapshot.version + 1), start=1):
            if num_bytes > snapshot.num_bytes:
                return True
            entry = self._readable(self.log.read, version)
            if entry is None:
                return True
            num_bytes += entry.num_bytes
            if number == _MAX_SIZED:
                so_far = num_bytes - (0 if merged is None else merged.num_bytes)
                num_bytes += so_far * (snapshot.version - version) // number
                break
        return num_bytes > snapshot.num_bytes

    def heads(self) -> list[Manifest]:
        """Return the newest snapshot and the newest entry, each only if it is newer than the last applied version.

        Entries that :attr:`allows` rejects are omitted.
        """
        found = [self.log.newest_snapshot(), self.log.head()]
        after = -1 if self.version is None else self.version
        newer = [manifest for manifest in found if manifest is not None and manifest.version > after]
        return newer if self.allows is None else [manifest for manifest in newer if self.allows(manifest)]

    def starts(self) -> Iterator[Manifest]:
        """Yield the snapshots that a reader can start from, newest first. Skip those that :attr:`allows` rejects.

        Raises:
            NoSnapshotError: if there is none.
        """
        found = self.snapshots()
        first = next(found, None)
        if first is None:
            raise NoSnapshotError(self.log.storage.url)
        yield first
        yield from found

    def snapshots(self, *, skips_unreadable: bool = False) -> Iterator[Manifest]:
        """Yield the snapshots that a reader can start from, newest first. Skip those that :attr:`allows` rejects.

        Args:
            skips_unreadable: True to skip entries that the store cannot read, and malformed entries of the log.
                Malformed merged entries are always skipped.
        """
        if not skips_unreadable:
            yield from self._starts() if self.allows is None else self._allowed_starts(self.allows)
            return
        for snapshot in self._readable_starts():
            if self.allows is not None and not self.allows(snapshot):
                continue
            yield snapshot

    def _starts(self) -> Iterator[Manifest]:
        manifest = self._newest_snapshot()
        while manifest is not None and manifest.kind == "snapshot":
            yield manifest
            before = None if manifest.version == 0 else self.log.read(manifest.version - 1)
            has_older = before is not None and before.snapshot is not None
            manifest = self.log.read(before.snapshot) if has_older else None  # type: ignore[union-attr, arg-type]

    def _allowed_starts(self, allows: Callable[[Manifest], bool]) -> Iterator[Manifest]:
        """Yield the snapshots of the log and the merged ones that ``allows`` accepts, newest first."""
        head = self.log.head()
        if head is None:
            return
        merged = [each for each in self.log.merged() if each.kind == "snapshot" and each.last <= head.version]
        version = head.snapshot
        while merged or version is not None:
            if version is None or (merged and merged[-1].last > version):
                manifest = self._readable(self.log.read_merged, merged.pop())
            else:
                manifest = self.log.read(version)
                before = None if version == 0 else self.log.read(version - 1)
                version = None if before is None else before.snapshot
            if manifest is not None and manifest.stream == head.stream and allows(manifest):
                yield manifest

    def _readable_starts(self) -> Iterator[Manifest]:
        """Yield the snapshots that a reader can start from, newest first. Skip unreadable entries."""
        head = max(self.log.versions(), default=-1)
        in_log = self._readable_snapshots(head)
        newest = next(in_log, None)
        after = -1 if newest is None else newest.version
        for merged in reversed(self.log.merged(after=after)):
            if merged.kind == "snapshot" and merged.last <= head:
                manifest = self._readable(self.log.read_merged, merged)
                if manifest is not None and (newest is None or manifest.stream == newest.stream):
                    yield manifest
        if newest is not None:
            yield newest
            yield from in_log

    def _readable_snapshots(self, head: int) -> Iterator[Manifest]:
        """Yield the snapshots in the log up to version ``head``, newest first.

        Stops after three unreadable entries, because each read may take as long as the store's timeout. During an
        outage, the caller should wait instead.
        """
        version, num_unreadable = head, 0
        while version >= 0 and num_unreadable < _MAX_UNREADABLE:
            entry = self._readable(self.log.read, version)
            if entry is not None and entry.kind == "snapshot":
                yield entry
            elif entry is not None:
                version = -1 if entry.snapshot is None else entry.snapshot
                continue
            else:
                num_unreadable += 1
            version -= 1  # the entry below names the preceding snapshot

    def way_back(self, fault: StreamError, *, skips_unreadable: bool = False) -> Iterator[Manifest]:
        """Yield entries that a reader can apply to recover from a fault, best first.

        Yields a merged delta that includes the faulty version, if there is one, and then the snapshots that are newer
        than the last applied version. There are three exceptions:

        - If the gate holds the faulty version, no merged delta is yielded, because it would contain the held rows.
        - If the stream was replaced, no merged delta is yielded. If the last applied entry is also missing from the
          log, older snapshots are yielded, too.
        - If no version was applied yet and the newest snapshot does not match the model, nothing is yielded. Otherwise
          the reader would serve an older snapshot, and the mismatch would remain unnoticed.

        No entry is yielded that :attr:`allows` rejects.

        Args:
            fault: error raised for the next entry.
            skips_unreadable: True to skip entries that the store cannot read, and malformed entries of the log.
                Malformed merged entries are always skipped.
        """
        place = self.place
        if place is None and isinstance(fault, TableMismatchError | DenseMismatchError):
            return
        if place is not None and not isinstance(fault, StreamReplacedError | HeldVersionError):
            merged = self._longest_merged(place.link.version, skips_unreadable=skips_unreadable)
            if merged is not None and merged.stream == place.stream and merged.generation >= self._generation(place):
                yield merged
        for snapshot in self.snapshots(skips_unreadable=skips_unreadable):
            is_older = place is not None and snapshot.version <= place.link.version
            # An older snapshot is useful only if the last applied entry was replaced, not only later entries.
            # Checked last, so that an unreadable entry does not prevent the use of a newer snapshot.
            if is_older and not (isinstance(fault, StreamReplacedError) and not self._is_in_log()):
                return
            yield snapshot

    def _is_in_log(self) -> bool:
        """Return True if the last applied entry is still in the log."""
        if self.place is None:
            return False
        entry = self.log.read(self.place.link.version)
        return entry is not None and (entry.stream, entry.xxh3) == (self.place.stream, self.place.link.xxh3)

    def _newest_snapshot(self) -> Manifest | None:
        try:
            return self.log.newest_snapshot()
        except MalformedError as error:
            self._skip("ignored the merged snapshots", error)
        head = self.log.head()
        return None if head is None or head.snapshot is None else self.log.read(head.snapshot)

    def _longest_merged(self, version: int, *, skips_unreadable: bool) -> Manifest | None:
        """Return the merged delta with the highest last version that applies to a reader at ``version``.

        Returns None if there is none. If an entry is malformed, logs the error and returns None, because merged
        entries add no information. If ``skips_unreadable`` is True, an entry that the store cannot read is treated in
        the same way.
        """
        try:
            if self.allows is None:
                return self.log.longest_merged(version)
            merged = [each for each in self.log.merged(after=version) if each.kind == "delta"]
            found = (self.log.read_merged(each) for each in reversed(merged) if each.first <= version + 1)
            return next((each for each in found if each is not None and self.allows(each)), None)
        except (MalformedError, StorageError) as error:
            if isinstance(error, StorageError) and not skips_unreadable:
                raise
            self._skip("ignored the merged versions", error)
            return None

    def _readable(self, read: Callable[[_T], Manifest | None], what: _T) -> Manifest | None:
        """Return the entry ``read(what)``; None if it does not exist, cannot be read, or is malformed."""
        try:
            return read(what)
        except (MalformedError, StorageError) as error:
            self._skip("skipped an unreadable entry", error, what)
            return None

    def _skip(self, text: str, error: MalformedError | StorageError, *what: object) -> None:
        """Log that entries were skipped, once until the next entry is applied.

        An error of the store is logged as INFO, because the reader reports that the store fails.
        """
        key = text, *what, *kind_of(error)
        if key not in self._skipped:
            self._skipped.add(key)
            level = logging.INFO if isinstance(error, StorageError) else logging.WARNING
            _logger.log(level, "%s: %s", text, str(error))

    def path_to(self, version: int, *, is_elsewhere: bool = False, of_any: bool = False) -> list[Manifest]:
        """Return the entries to apply to reach a version, in order: a snapshot and its successors up to the version.

        Starts at a merged snapshot if there is one: retention may have deleted the versions that it replaces, or only
        their parts.

        Args:
            version: version of the newest stream of the log.
            is_elsewhere: True to accept that the last applied entry belongs to another stream.
            of_any: True to accept also a version of a former stream of the log, and one below a malformed newest entry.

        Raises:
            MissingVersionError: if a required entry is missing or was replaced.
            NoSnapshotError: if there is no snapshot at or below the version.
            InvalidArgumentError: if the version is invalid or not committed yet.
            StreamReplacedError: if the last applied entry belongs to another stream, unless ``is_elsewhere`` is True.
            MalformedError: if an entry cannot be read, or has a lower generation than its predecessor.
        """
        head = self._newest_below(version) if of_any else self.log.head()
        if head is None or type(version) is not int or not 0 <= version <= head.version:
            remedy = "Publish a snapshot first" if head is None else f"Pass one of the versions up to {head.version}"
            raise InvalidArgumentError("version", version, remedy)
        if self.place is not None and self.place.stream != head.stream and not is_elsewhere:
            raise StreamReplacedError(self.log.storage.url, self.place.link.version)
        snapshots = {each.last: each for each in self.log.merged() if each.kind == "snapshot"}
        path: list[Manifest] = []
        link: Link | None = None
        asked = version
        found = self._entry(version, None, snapshots) if of_any else None
        stream = head.stream if found is None else found.stream
        while not path or path[-1].kind != "snapshot":
            manifest = self._entry(version, link, snapshots)
            if of_any and path and path[-1].forked_from is not None:
                remedy = f"Pass one before version {path[-1].version}, which starts another stream, or a later snapshot"
                raise InvalidArgumentError("version", asked, remedy)
            if manifest is None or manifest.stream != stream:
                raise MissingVersionError(version, head.version)
            if not path and manifest.kind == "claim" and not self.log.is_committed(manifest):
                raise MissingVersionError(version, head.version)
            if path and manifest.generation > path[-1].generation:
                raise generation_error(path[-1], manifest)
            path.append(manifest)
            if manifest.kind != "snapshot":
                if manifest.parent is None:
                    raise NoSnapshotError(self.log.storage.url, None if head.snapshot is None else asked)
                link = manifest.parent
                version = link.version
        return path[::-1]

    def _newest_below(self, version: int) -> Manifest | None:
        """Return the newest entry; if it is malformed, the newest well-formed one, if that reaches ``version``."""
        try:
            return self.log.head()
        except MalformedError:
            head = self.log.newest_readable()
            if head is None or version > head.version:
                raise
            return head

    def _entry(self, version: int, link: Link | None, snapshots: Mapping[int, Merged]) -> Manifest | None:
        """Return the merged snapshot or else the log entry of a version, or another merged entry that ends with it.

        Returns None if no entry matches.

        Args:
            version: version of the entry.
            link: required link of the entry; None accepts every link.
            snapshots: last version to reference of each merged snapshot.
        """
        manifest = self.log.read(version)
        if manifest is not None and link in (None, manifest.link):
            snapshot = snapshots.get(version) if manifest.kind != "snapshot" else None
            whole = None if snapshot is None else self._readable(self.log.read_merged, snapshot)
            return whole if whole is not None and whole.link == manifest.link else manifest
        found = [merged for merged in self.log.merged(after=version - 1) if merged.last == version]
        for merged in sorted(found, key=lambda each: (each.kind != "snapshot", each.first)):
            manifest = self.log.read_merged(merged)
            if manifest is not None and link in (None, manifest.link):
                return manifest
        if not self.log.is_listed:  # the pointer names only the newest merged snapshot
            manifest = self.log.read_merged(Merged(version, 0, "snapshot"))
            if manifest is not None and link in (None, manifest.link):
                return manifest
        return None

    def lag(self) -> tuple[int, float]:
        """Return the number of committed versions not yet applied, and the age of the oldest one in seconds.

        The age is the sum of two times, each measured by one clock: the time from the oldest version not yet applied to
        the newest version, by the store's modification times, and the time since this cursor first saw the newest
        version, by this process's monotonic clock. It is too low by the time from the commit of the newest version
        until this cursor saw it, and by up to one second if the store truncates modification times. It is above 0 if
        the number is, and 0 if the number is. Reads no entries, and lists the log only before the first applied
        version, or if the next entry is missing although there are newer ones.

        Raises:
            StreamReplacedError: if the log has neither the last applied version nor a newer one.
            UnreadablePointerError, StaleCacheError: if the pointer, over http, shows nothing.
        """
        began = time.monotonic()
        held = -1 if self.version is None else self.version
        if held < 0:
            return self._listed_lag(began, held)
        newest = self.log.newest_version(held)
        self.log.check_pointer()
        first = self.log.storage.stat(entry_name(min(held + 1, newest)))
        last = first if newest <= held + 1 else self.log.storage.stat(entry_name(newest))
        if first is None or last is None:
            return self._listed_lag(began, held)
        self._sees(newest, began)
        if newest == held:
            return 0, 0.0
        seconds = max(0.0, last.modified - first.modified) + time.monotonic() - self._newest[1]
        return newest - held, max(seconds, _LEAST_LAG)

    def _listed_lag(self, began: float, held: int) -> tuple[int, float]:
        """Return the lag by a listing, for a reader that has no version, or whose next entry is missing."""
        listed = self.log.listed(after=held - 1)
        self.log.check_pointer()
        if not listed and held >= 0:
            raise StreamReplacedError(self.log.storage.url, held)
        self._sees(max(listed, default=-1), began)
        waiting = {version: modified for version, modified in listed.items() if version > held}
        if not waiting:
            return 0, 0.0
        seconds = max(waiting.values()) - waiting[min(waiting)] + time.monotonic() - self._newest[1]
        return len(waiting), max(seconds, _LEAST_LAG)

    def _sees(self, head: int, now: float) -> None:
        """Record the newest version of the log, and that it was there at the monotonic time ``now``."""
        if head != self._newest[0]:  # a lower one is of another log
            self._newest = head, now

    def _log_skew(self, manifest: Manifest) -> None:
        """Log once per publisher that its clock differs from the store's."""
        problem = skew_problem(f"the publisher of generation {manifest.generation}", manifest.skew)
        if problem is not None and manifest.writer != self._skewed:
            self._skewed = manifest.writer
            _logger.warning("%s: url=%s", problem, self.log.storage.url)


def _follows(merged: Manifest, held: Link) -> bool:
    """Return True if a reader at ``held`` can apply a merged delta."""
    parent = merged.parent
    return parent is not None and (parent == held if parent.version == held.version else parent.version < held.version)
