"""Log of a stream: consecutive entries, each created exactly once and linked to its predecessor by hash.

:class:`Claim` and the functions below it follow the rules for publishers in FORMAT.md, which ensure a single history
even if publishers race or are killed at any step.
"""

import re
import secrets
import time
from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import xxhash

from delta_tracker.errors import (
    AlteredEntryError,
    FencedError,
    InvalidArgumentError,
    LivePublisherError,
    LostEntryError,
    MalformedError,
    NewerFormatError,
    StaleCacheError,
    StorageError,
    StreamReplacedError,
    UnknownOutcomeError,
    WriteRefusedError,
    is_unknown,
    without_traceback,
)
from delta_tracker.stream.format.manifest import ENTRY_NAME, MAX_ENTRY_BYTES, Fork, Link, Manifest, Merged, entry_name
from delta_tracker.stream.format.parse import parse_manifest
from delta_tracker.stream.format.table_choice import check_has_all
from delta_tracker.stream.pin import has_deletions, last_present
from delta_tracker.stream.pointer import HeadPointer, PointerReader, read_pointer
from delta_tracker.stream.reading.runtime import REAL, Runtime
from delta_tracker.stream.storage.objects import back_off
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.stream.storage.store import Transfer

_PART_GENERATION = re.compile(r"parts/[0-9]{20}-g([0-9]+)-")
_BEAT_GENERATION = re.compile(r"publishers/([0-9]{20})\.json")
_CLAIM_ATTEMPTS = 100  # attempts that may be lost to other publishers
_ALTERATIONS = 3  # consecutive altered claims that are created; each stays in the log
_REFUSALS = 5  # attempts at one name that the store refuses, although its listing does not show the name
_MAX_REFUSED = 16  # malformed entries that are remembered
_LOOK_AHEAD = 4  # names above a new entry that are looked for in a directory, which can only be listed as a whole
_MAX_GUARDS = 32  # consecutive claims, and entries before them, that are read to find another entry
_PROBE_SECONDS = 10.0  # after which a reader over http asks for an entry that the pointer does not show
_REREAD_SECONDS = 10.0  # between two reads of an entry past the caches, or of one that confirmed a pointer
_MAX_POINTED = 1 << 20  # versions that are returned of a pointer: a forged one may have any version
_SPREAD_SECONDS = 1.0  # readers that meet the same fault of a cache spread their requests over this time


class StreamLog:
    """Reader of a stream's log, which can also claim the stream. ``is_listed`` is False at an http url."""

    def __init__(self, storage: Storage, runtime: Runtime = REAL) -> None:
        self.storage = storage
        self.url = storage.url
        self._runtime = runtime
        self.is_listed = storage.lists
        self.pointer = PointerReader(storage, runtime=runtime)
        self._known = -1  # newest version that was read or listed; a hint, because the store may be replaced
        self._awaited: tuple[int, float] | None = None  # version of may_have(), and monotonic time to ask for it
        self._reread_at: tuple[str, float] | None = None  # entry read past the caches last, and the monotonic time
        self._ahead: tuple[Manifest, float] | None = None  # entry of a new pointer, and when it was read
        self._parsed: tuple[str, Manifest] | None = None  # name and manifest of the entry that was read last
        # Errors of malformed entries, by name and hash: readers read these again and again.
        self._refused: dict[tuple[str, str], MalformedError] = {}

    def may_have(self, version: int) -> bool:
        """Return False if the entry of ``version`` probably does not exist yet and should not be requested.

        If the store can list entries, always returns True. Over http, returns True if the pointer has reached the
        version, and otherwise once every 10 to 15 s, because a request for a missing entry leaves a "not found"
        response in caches.
        """
        if self.is_listed:
            return True
        pointer = self.pointer.newest()
        if pointer is not None and pointer.version >= version:
            return True
        now, awaited = self._runtime.monotonic(), self._awaited
        if awaited is not None and awaited[0] == version and now < awaited[1]:
            return False
        self._awaited = version, now + _PROBE_SECONDS * self._runtime.uniform(1, 1.5)
        return awaited is not None and awaited[0] == version

    def newest_version(self, after: int) -> int:
        """Return the newest version of the log. ``after`` is a version that is or was in the log, or -1.

        Over http, returns the version of :meth:`pointed`. In other stores, searches upwards from ``after`` or from the
        pointer's version. Lists the log if ``after`` is negative, the pointer's entry is missing, or the search ends at
        a claim. The result may be too low if an entry in between is missing.
        """
        pointer = self.pointer.newest()
        if not self.is_listed and pointer is not None and pointer.version > after:
            pointer = self.pointed(is_due=False)
        pointed = -1 if pointer is None else pointer.version
        if not self.is_listed:
            return max(after, pointed)
        if pointed > after and _has(self.storage, pointed):
            after = pointed
        if after < 0:
            return max(self.versions(after=after), default=after)
        present = last_present(partial(_has, self.storage), after + 1) if _has(self.storage, after + 1) else after
        if present == after > pointed and not _has(self.storage, after):
            return max(self.versions(after=after), default=after)  # retention may have deleted both entries
        with suppress(MalformedError):
            entry = self.read(present) if present > pointed else None
            if entry is not None and entry.kind == "claim":
                return max(self.versions(after=present), default=present)
        return present

    def read(self, version: int) -> Manifest | None:
        """Return the entry of ``version``; None if it does not exist.

        Over http, also returns None if the pointer shows that the version was deleted. Raises MalformedError if the
        entry does not follow the format, belongs to another version, or is a merged entry.
        """
        if not self.is_listed and self._is_deleted(version):
            return None
        ahead = self._ahead
        if ahead is not None and ahead[0].version == version and self._runtime.monotonic() - ahead[1] < _REREAD_SECONDS:
            return ahead[0]
        manifest = self._read(entry_name(version))
        if manifest is not None:
            check_version(manifest, version)
            self._known = max(self._known, version)
            if not self.is_listed:
                self.pointer.note_entry(manifest)
        return manifest

    def versions(self, *, after: int = -1) -> list[int]:
        """Return the versions above ``after``, ascending. Lists the log, which is slow for a remote store.

        Over http, returns the versions that the pointer lists, at most the newest 1,048,576.
        """
        if self.is_listed:
            found = self.storage.names("log", after=entry_name(after) if after >= 0 else None)
            versions = [int(match[1]) for match in map(ENTRY_NAME.fullmatch, found) if match is not None]
        elif (pointer := self.pointed()) is not None:
            first = max(after + 1, pointer.oldest, pointer.version + 1 - _MAX_POINTED)
            versions = [version for version in pointer.older if version > after]
            versions += range(first, pointer.version + 1)
        else:
            versions = []
        self._known = max(versions[-1:], default=self._known)
        return versions

    def head(self) -> Manifest | None:
        """Return the newest entry; None if the store is empty.

        Searches upwards from the newest known version, or lists the whole log if no version is known. Over http, raises
        StaleCacheError if the entry that the pointer names is missing, and UnreadablePointerError if the pointer object
        is invalid and no pointer was read before.
        """
        if self.is_listed:
            return self._known_head() or self._listed_head()
        pointer = self.pointer.newest()
        if pointer is None:
            self.check_pointer()
            return None
        head = self._confirmed_by(pointer)
        known = self.pointer.confirmed
        if head is None and known is not None and known is not pointer:
            head = self._confirmed_by(known)
        if head is None:
            raise StaleCacheError(self.url, entry_name(pointer.version), _REREAD_SECONDS)
        return head

    def _known_head(self) -> Manifest | None:
        """Return the newest entry, searching upwards from a known version; None if the whole log must be listed."""
        pointer = read_pointer(self.storage)  # not the view, which would not look again for a second if it is missing
        known = max(self._known, -1 if pointer is None else pointer.version)
        if known < 0:
            return None
        if self.storage.lists_from:
            versions = self.versions(after=known - 1)
            return self.read(versions[-1]) if versions else None
        if _has(self.storage, known):
            with suppress(MalformedError):
                head = self.read(last_present(partial(_has, self.storage), known))
                if head is not None and self.is_surely_newest(head):
                    return head
        return None

    def _listed_head(self) -> Manifest | None:
        while versions := self.versions():
            if (head := self.read(versions[-1])) is not None:
                return head
            # The head is never deleted, so the listing is old: list again.
        return None

    def pointed(self, *, is_due: bool = True) -> HeadPointer | None:
        """Return the newest pointer whose entry was read and has the expected hash; None if there is none.

        Call this method for a store that cannot list. With ``is_due=False``, does not request the pointer object.
        """
        pointer = self.pointer.newest(is_due=is_due)
        if pointer is not None and pointer is not self.pointer.confirmed:
            with suppress(MalformedError):
                entry = self._confirmed_by(pointer)
                self._ahead = None if entry is None else (entry, self._runtime.monotonic())
        return self.pointer.confirmed

    def check_pointer(self) -> None:
        """Raise the UnreadablePointerError or StaleCacheError of the last read of the pointer object, if it failed."""
        if not self.is_listed and (trouble := self.pointer.trouble) is not None:
            raise without_traceback(trouble)

    def _is_deleted(self, version: int) -> bool:
        seen = self.pointer.newest(is_due=False), self.pointer.confirmed
        if all(each is None or each.may_have(version) for each in seen):
            return False
        known = self.pointed(is_due=False)
        return known is not None and not known.may_have(version)

    def _confirmed_by(self, pointer: HeadPointer) -> Manifest | None:
        """Read the entry that ``pointer`` names, and confirm the pointer, or refuse the pointer and return None."""
        name = entry_name(pointer.version)
        is_only = self.pointer.confirmed in (None, pointer)
        trouble = StaleCacheError(self.url, name, _REREAD_SECONDS)
        for past_cache in (False, True):
            if past_cache and not self._may_reread(name):
                self.pointer.trouble = self.pointer.trouble or trouble
                return None
            try:
                entry = self._read_past_cache(name) if past_cache else self._read(name)
            except MalformedError:
                if (name, pointer.xxh3) in self._refused:
                    self.pointer.confirm(pointer)  # altered on the way to the store
                elif not past_cache:
                    continue  # a damaged copy
                raise
            if entry is None or (entry.version, entry.merges) != (pointer.version, None):
                continue
            if pointer.names(entry):
                self.pointer.confirm(pointer)
                return entry
            if is_only and entry.generation != pointer.generation:  # the log was replaced
                return entry
        self.pointer.refuse(pointer, trouble)
        return None

    def readable(self, version: int) -> Manifest | None:
        """Return the entry of ``version``; None if it is missing or malformed. Over http, rereads a malformed entry."""
        with suppress(MalformedError):
            return self.read(version)
        with suppress(MalformedError):
            return None if self.is_listed else self._read_past_cache(entry_name(version))
        return None

    def _may_reread(self, name: str) -> bool:
        """Return False if a read of the entry ``name`` bypassed the caches less than 10 s ago."""
        last = self._reread_at
        return last is None or last[0] != name or self._runtime.monotonic() - last[1] >= _REREAD_SECONDS

    def _read_past_cache(self, name: str) -> Manifest | None:
        """Read an entry, bypassing caches. Return None if it is missing, or was read in this way in the last 10 s."""
        if not self._may_reread(name):
            return None
        self._reread_at = name, self._runtime.monotonic()
        # The first answer replaces the copy in the cache for other readers with the same fault.
        self._runtime.sleep(self._runtime.uniform(0, _SPREAD_SECONDS))
        return self._read(name, past_cache=True)

    def merged(self, *, after: int = -1) -> list[Merged]:
        """Return references to the merged entries with a last version above ``after``, sorted by last version.

        Over http, returns only the merged entries that the pointer names.
        """
        if self.is_listed:
            # Names sort by the last version.
            named = map(Merged.named, self.storage.names("merged", after=f"merged/{after + 1:020d}"))
            return [merged for merged in named if merged is not None]
        if (pointer := self.pointed()) is None:
            return []
        found = {Merged(last, first, "delta") for first, last in pointer.merged}
        found |= {Merged(version, 0, "snapshot") for version in pointer.snapshots}
        if pointer.snapshot is not None and pointer.snapshot.merged:
            found.add(Merged(pointer.snapshot.version, 0, "snapshot"))
        return sorted((each for each in found if each.last > after), key=lambda each: each.name)

    def read_merged(self, merged: Merged) -> Manifest | None:
        """Return the merged entry that ``merged`` refers to; None if it does not exist."""
        manifest = self._read(merged.name)
        return None if manifest is None else check_merged(manifest, merged)

    def create_merged(self, manifest: Manifest) -> bool:
        """Validate and create a merged entry. See :meth:`create_copy` for the result and the errors."""
        name, data = Merged.of(manifest).name, manifest.to_json()
        parse_manifest(name, data)
        return self.create_copy(name, data)

    def create_copy(self, name: str, data: bytes) -> bool:
        """Create an entry on which no other entry depends yet. Return False if another entry with this name exists.

        If the bytes were altered in transit to a remote store, deletes the entry and raises AlteredEntryError.
        """
        try:
            return _create(self.storage, name, data)
        except AlteredEntryError:
            self.storage.delete(name)
            raise

    def newest_snapshot(self) -> Manifest | None:
        """Return the newest snapshot, in the log or merged, from which a reader can start; None if there is none."""
        head = self.head()
        if head is None:
            return None
        in_log = -1 if head.snapshot is None else head.snapshot
        for merged in reversed(self.merged(after=in_log)):
            if merged.kind == "snapshot" and merged.last <= head.version:
                manifest = self.read_merged(merged)
                if manifest is not None and manifest.stream == head.stream:
                    return manifest
        return self.read(in_log) if in_log >= 0 else None

    def longest_merged(self, version: int) -> Manifest | None:
        """Return the merged delta that leads a reader at ``version`` to the highest version; None without one."""
        found = [each for each in self.merged(after=version) if each.kind == "delta" and each.first <= version + 1]
        return next((entry for each in reversed(found) if (entry := self.read_merged(each)) is not None), None)

    def successors(self, entry: Manifest) -> list[Manifest] | None:
        """Return the entries after ``entry``; None if the log was replaced since ``entry`` was read."""
        there, found = self.read(entry.version), [entry]
        if there is None or (there.stream, there.link) != (entry.stream, entry.link):
            return None
        while (following := self.read(found[-1].version + 1)) is not None:
            if (following.stream, following.parent) != (entry.stream, found[-1].link):
                return None
            found.append(following)
        return found[1:]

    def is_surely_newest(self, entry: Manifest) -> bool:
        """Return True if it can be proven, without listing the log, that ``entry`` is the newest entry.

        Always False if the store is not a local directory.
        """
        # Retention deletes in ascending order, except that it keeps each claim and the entry before it. So if any other
        # entry at or below this one is still there, retention has deleted nothing above it. A power loss can undo some
        # deletions of an interrupted pass, but not its announcement.
        if self.storage.lists_from or not self.is_listed or _continues_after(self, entry.version):
            return False
        return _follows_deletable(self, entry) and not has_deletions(self.storage)

    def is_committed(self, entry: Manifest) -> bool:
        """Return True if ``entry`` is part of the log.

        Call this method for claims: a suspended publisher may have created a claim under the name of an entry that
        retention has deleted. Other entries need no check, because retention keeps every entry whose name a fenced
        publisher may use.
        """
        following = None if self.storage.lists_from else self.read(entry.version + 1)
        if following is None and self.is_surely_newest(entry):
            return True
        # List first, so that an entry committed between the two calls does not look like a gap.
        if following is None and not self.versions(after=entry.version):
            return True
        following = self.read(entry.version + 1)
        if following is None and not self.is_listed:
            following = self._read_past_cache(entry_name(entry.version + 1))
        return following is not None and following.parent == entry.link

    def precedes_claim(self, entry: Manifest) -> bool:
        """Return True if the entry after ``entry`` is a claim. Retention then keeps ``entry``, but not its parts."""
        following = self.read(entry.version + 1)
        return following is not None and following.kind == "claim"

    def claim(self, *, after: Link | None = None, writer: str | None = None, forks: bool = False) -> "Claim":
        """Claim the stream: append a claim with the next generation, and return it.

        If the store is empty, the claim starts a new stream. If a claim was altered in transit, appends another one.

        Args:
            after: link of the entry that the claim must follow; None to follow any entry.
            writer: id of the claim, 32 hex digits; None to generate one. If the newest entry is a claim with this id,
                because an earlier call did not receive the store's response, that claim is returned.
            forks: True to start a new stream after the newest entry.

        Raises:
            LivePublisherError: if the newest entry is not ``after``. Nothing was created.
            StreamReplacedError: if ``after`` is given and the store is empty.
            StorageError: if other publishers were faster in every attempt, or if the store fails. In the latter case,
                the claim may exist.
            AlteredEntryError: if three consecutive claims were altered in transit.
        """
        check_has_all(self.storage)
        writer = secrets.token_hex(16) if writer is None else writer
        refused, name = 0, ""
        altered: Manifest | None = None  # own claim whose bytes were altered on the way
        num_altered = 0  # consecutive altered claims
        for attempt in range(_CLAIM_ATTEMPTS):
            # A second attempt lists the log, in case entries are missing that retention has not deleted.
            head = altered
            if head is None:
                head = self._listed_head() if attempt else self.head()
                if head is not None and (adopted := _adopted(self, head, writer)) is not None:
                    return adopted
                if after is not None and head is None:
                    raise StreamReplacedError(self.url, after.version)
                if after is not None and head is not None and head.link != after:
                    raise LivePublisherError(self.url, head.generation, head.version)
            entry = _claim_after(head, writer, forks=forks and altered is None)
            refused = refused + 1 if name == entry_name(entry.version) else 0
            name = entry_name(entry.version)
            if refused == _REFUSALS:
                raise WriteRefusedError.taken(self.url, name, refused)
            try:
                claimed = _append(self, entry, set())
            except AlteredEntryError as error:
                altered = replace(entry, xxh3=error.xxh3)
                altered = altered if _confirm(self, altered) else None
                num_altered += 1
                if num_altered == _ALTERATIONS:
                    raise
                back_off(num_altered)
                continue
            if claimed is not None:
                return Claim(self, *claimed, needs_snapshot=altered is not None)
            altered, num_altered = None, 0
            back_off(refused + 1)
        reason = f"lost {_CLAIM_ATTEMPTS} claims to other publishers, the last for {name}"
        raise StorageError(self.url, reason, "Stop the other publishers of this stream, then try again")

    def _read(self, name: str, *, past_cache: bool = False) -> Manifest | None:
        response = Transfer()
        storage = self.storage.uncached if past_cache else self.storage
        data = storage.read(name, max_bytes=MAX_ENTRY_BYTES, transfer=response)
        if data is None:
            return None
        digest = xxhash.xxh3_128_hexdigest(data.data)
        parsed = self._parsed  # another thread may replace it
        if parsed is None or (parsed[0], parsed[1].xxh3) != (name, digest):
            if (refused := self._refused.get((name, digest))) is not None:
                raise without_traceback(refused)
            try:
                parsed = self._parsed = name, parse_manifest(name, data.tobytes())
            except MalformedError as error:
                if len(self._refused) >= _MAX_REFUSED:
                    self._refused.clear()
                self._refused[name, digest] = without_traceback(error)
                raise
        if parsed[1].modified != response.modified:
            parsed = self._parsed = name, replace(parsed[1], modified=response.modified)
        return parsed[1]


class _ParentLostError(StorageError):
    """Raised if another program has deleted the entry that a new entry follows."""


class Claim:
    """Right of one publisher to append entries to a stream, until another publisher claims the stream.

    Attributes:
        head: newest entry of this generation.
        data: bytes of the last committed entry, or of the claim before the first commit.
        needs_snapshot: True if the next version must be a snapshot, because an entry was lost, or was altered in
            transit so that it may be unreadable.
    """

    def __init__(self, log: StreamLog, entry: Manifest, data: bytes, *, needs_snapshot: bool = False) -> None:
        self.head = entry
        self.data = data
        self.needs_snapshot = needs_snapshot
        self._log = log
        self._sent: set[str] = set()  # hashes of the entries that were sent for the next version
        self._fenced: FencedError | None = None
        self._is_used = False

    def mark_used(self) -> None:
        """Mark this claim as used by a publisher. Raise InvalidArgumentError if a publisher already uses it."""
        if self._is_used:
            raise InvalidArgumentError("url", "a used claim", "Build the publisher with the url")
        self._is_used = True

    def release(self) -> None:
        """Mark this claim as unused. Call this method if the publisher that used the claim could not be built."""
        self._is_used = False

    def commit(self, entry: Manifest) -> Manifest:
        """Append a version, and return the committed entry.

        Sets the stream, generation, writer, version, parent, snapshot and creation time of the entry.

        Raises:
            FencedError: if a newer generation has claimed the stream.
            AlteredEntryError: if the stored bytes differ from the bytes that were sent. Nothing was committed.
            LostEntryError: if the newest entry was deleted and ``entry`` is a delta. Nothing was committed. The stream
                was claimed again.
            UnknownOutcomeError: if the store fails, and the entry may exist or may appear later. If it exists, the next
                commit follows it. If the error names a ``directory``, the entry exists, but a power loss may undo it.
            StorageError: for other failures of the store. Nothing was committed.
        """
        if self._fenced is not None:
            raise without_traceback(self._fenced)
        created: str | None = None  # name of an entry with this version that was created, and may stay in the log
        while True:
            try:
                if _is_lost(self._log.storage, self.head.link, self.head.writer):
                    self._claim_again(entry)
                committed = self._attempt(entry)
            except _ParentLostError:
                created = entry_name(self.head.version + 1)
            except StorageError as error:
                if created is None or isinstance(error, LostEntryError | AlteredEntryError) or is_unknown(error):
                    raise
                raise UnknownOutcomeError(self._log.url, created, error.reason) from error
            else:
                if committed is not None:
                    return committed

    def _attempt(self, entry: Manifest) -> Manifest | None:
        """Append a version after the newest known entry. Return None if the call must be repeated."""
        head = self.head
        version = head.version + 1
        draft = replace(
            entry,
            stream=head.stream,
            generation=head.generation,
            writer=head.writer,
            version=version,
            parent=head.link,
            snapshot=version if entry.kind == "snapshot" else head.snapshot,
            created=time.time(),
        )
        taken: Manifest | None
        altered: AlteredEntryError | None = None
        try:
            committed = _append(self._log, draft, self._sent)
        except AlteredEntryError as error:
            altered, taken = error, draft
        else:
            if committed is not None:
                self.head, self.data = committed
                self._sent.clear()
                self.needs_snapshot = self.needs_snapshot and entry.kind != "snapshot"
                return self.head
            taken = self._log.read(version)
            # If it is missing, its name was used: it was this entry or another one, which was deleted again.
            if taken is None or _is_superseded(taken, head):
                self._claim_again(entry)
                return None
            if taken.writer == head.writer and self._log.storage.is_remote and taken.xxh3 not in self._sent:
                altered = AlteredEntryError(self._log.url, entry_name(version), taken.xxh3)
        if altered is not None:  # continue after the stored bytes, but trust nothing that they say
            taken = replace(draft, snapshot=head.snapshot, xxh3=altered.xxh3)
        if taken.writer != head.writer or not _confirm(self._log, taken):
            newest = (taken if taken.writer != head.writer else self._log.head()) or head
            raise self._fence(newest.generation, newest.version)
        self.head = taken
        self._sent.clear()
        if altered is not None:
            self.needs_snapshot = True
            raise altered
        return None

    def _claim_again(self, entry: Manifest) -> None:
        """Claim the stream after this publisher's newest entry was lost. Raise LostEntryError if ``entry`` is a delta.

        The claim gets a name that was never used, because caches may contain the lost entries.
        """
        lost, num_altered = entry_name(self.head.version), 0
        for attempt in range(_CLAIM_ATTEMPTS):
            if attempt:
                back_off(min(attempt, _REFUSALS))
            try:
                claimed = self._claimed_again()
            except AlteredEntryError:
                num_altered += 1
                if num_altered == _ALTERATIONS:
                    raise
                continue
            if claimed is not None:
                self.head, self.data = claimed
                self._sent.clear()
                self.needs_snapshot = True
                if entry.kind != "snapshot":
                    raise LostEntryError(self._log.url, lost, self.data.decode())
                return
        raise WriteRefusedError.taken(self._log.url, lost, _CLAIM_ATTEMPTS)

    def _claimed_again(self) -> tuple[Manifest, bytes] | None:
        """Create a claim after the newest entry. Return None if another entry with this name exists."""
        head, writer = self.head, _next_writer(self.head.writer)
        top, data = self._check_owner(writer)
        before = head
        if data is not None:
            found = _parsed(top, data)
            if found is not None and (found.writer, found.generation) == (writer, head.generation + 1):
                return found, data  # an earlier call created the claim
            snapshot = head.snapshot if found is None or found.writer != head.writer else found.snapshot
            before = replace(head, version=top, xxh3=xxhash.xxh3_128_hexdigest(data), snapshot=snapshot)
        elif self._sent:
            before = replace(head, version=head.version + 1, xxh3=max(self._sent))
        claim = _claim_after(before, writer)
        try:
            created = _append(self._log, claim, set())
        except AlteredEntryError as error:  # the next claim follows the stored bytes
            self.head, self.needs_snapshot = replace(claim, xxh3=error.xxh3), True
            self._sent.clear()
            raise
        if created is not None:
            self._check_owner(writer)  # again: a claim may have been created meanwhile at the name of the lost entry
        return created

    def _check_owner(self, writer: str) -> tuple[int, bytes | None]:
        """Return the newest version above this publisher's lost entry, and its bytes; ``(-1, None)`` if there is none.

        If there is a newer publisher, deletes this publisher's entries above the lost entry, and raises FencedError.
        """
        log, head = self._log, self.head
        versions = log.versions()
        below = bisect_left(versions, head.version) - 1  # the newest one below shows another stream
        asked = versions[max(0, below) :]
        read = {version: read_bytes(log.storage, entry_name(version)) for version in asked}
        parsed = [_parsed(version, data) for version, data in read.items() if data is not None]
        entries = [entry for entry in parsed if entry is not None and entry.xxh3 != head.xxh3]  # it may be altered
        owner = _newer_publisher(log.storage, head, entries, writer)
        if owner is not None:
            for entry in entries:
                if entry.writer in (head.writer, writer) and entry.version > head.version:
                    log.storage.delete(entry_name(entry.version))
            raise self._fence(*owner)
        top = max(read, default=-1)
        return (top, read[top]) if top > head.version else (-1, None)

    def _fence(self, owner: int, version: int) -> FencedError:
        self._fenced = FencedError(self.head.generation, owner, version)
        return without_traceback(self._fenced)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClaimedStream:
    """Claimed stream on one rank, as returned by a takeover. Pass it to one publisher in place of the url.

    Args:
        storage: store of the stream.
        claim: the claim on rank 0; None on the other ranks.
        entry: entry of the claim, equal on all ranks.
        has_states: True for a recovery stream, whose versions contain states; False for a serving stream.
    """

    storage: Storage
    claim: Claim | None
    entry: Manifest
    has_states: bool

    def __repr__(self) -> str:
        """Return a text with the kind and url of the stream and the version of the claim."""
        kind = "recovery" if self.has_states else "serving"
        return f"<{kind} stream {self.storage.url}, claimed at version {self.entry.version}>"


def _has(storage: Storage, version: int) -> bool:
    return storage.stat(entry_name(version)) is not None


def _follows_deletable(log: StreamLog, entry: Manifest) -> bool:
    """Return True if the log contains the parent of ``entry`` and, up to ``entry``, an entry that may be deleted."""
    after: Manifest | None = None
    link: Link | None = entry.link
    is_deletable = False
    with suppress(MalformedError):  # altered on the way to the store
        for _ in range(_MAX_GUARDS):
            found = None if link is None else log.read(link.version)
            if found is None or found.link != link:
                break
            is_deletable |= found.kind != "claim" and (after is None or after.kind != "claim")
            if is_deletable and after is not None:
                return True
            after, link = found, found.parent
    return False


def _claim_after(head: Manifest | None, writer: str, *, forks: bool = False) -> Manifest:
    """Return a claim that follows ``head``. If ``head`` is None, or with ``forks``, the claim starts a new stream."""
    before = None if forks else head  # the entry before, if it is of the same stream
    return Manifest(
        stream=secrets.token_hex(16) if before is None else before.stream,
        generation=1 if head is None else head.generation + 1,
        writer=writer,
        version=0 if head is None else head.version + 1,
        kind="claim",
        parent=None if head is None else head.link,
        snapshot=None if before is None else before.snapshot,
        created=time.time(),
        forked_from=None if head is None or before else Fork(head.stream, head.version, head.xxh3),
    )


def _adopted(log: StreamLog, entry: Manifest, writer: str) -> Claim | None:
    """Return the claim that an earlier call created as ``entry``; None if ``entry`` may differ from what was sent."""
    if (entry.kind, entry.writer) != ("claim", writer):
        return None
    data = read_bytes(log.storage, entry_name(entry.version))
    try:
        before = None if entry.parent is None else log.read(entry.parent.version)
    except MalformedError:
        return None
    stream = entry.stream if before is None else before.stream
    sent = replace(_claim_after(before, writer), stream=stream, created=entry.created)
    if data is None or not data == entry.to_json() == sent.to_json():
        return None
    log.storage.sync("log")
    return Claim(log, entry, data)


def _append(log: StreamLog, draft: Manifest, sent: set[str]) -> tuple[Manifest, bytes] | None:
    """Append ``draft``, and add its hash to ``sent``. Return the entry and its bytes; None if the version is taken."""
    name, data = entry_name(draft.version), draft.to_json()
    entry = parse_manifest(name, data)
    sent.add(entry.xxh3)
    if not _create(log.storage, name, data):
        return None
    try:
        return (entry, data) if _confirm(log, entry) else None
    except _ParentLostError:
        raise
    except StorageError as error:
        raise UnknownOutcomeError(log.url, name, error.reason) from error


def _confirm(log: StreamLog, entry: Manifest) -> bool:
    """Return True if a newly created entry is part of the log; otherwise delete the entry and return False.

    The entry may reuse the name of a deleted entry. An entry of the log is the head or the parent of the next entry.
    Raises :class:`_ParentLostError`, and keeps the entry, if another program has deleted its parent.
    """
    follows = None if entry.kind == "claim" else entry.parent
    is_lost = follows is not None and _is_lost(log.storage, follows, entry.writer)
    if follows is not None and not is_lost and not _continues_after(log, entry.version):
        return True
    if log.is_committed(entry):
        if is_lost and follows is not None and not _is_succeeded(log, entry):
            raise _ParentLostError(log.url, f"{entry_name(follows.version)} is missing")
        return True
    log.storage.delete(entry_name(entry.version))
    return False


def _is_succeeded(log: StreamLog, entry: Manifest) -> bool:
    """Return True if the log continues after ``entry`` with an entry of a publisher that read ``entry`` as the head."""
    if not log.versions(after=entry.version):
        return False
    following = log.read(entry.version + 1)
    return following is not None and following.generation <= entry.generation + 1


def _create(storage: Storage, name: str, data: bytes) -> bool:
    """Create an entry. Return False if another entry with this name exists.

    If the store fails or reports that the name is taken, compares the stored entry with ``data`` and syncs it.
    """
    created, failure = False, None
    try:
        created = storage.create(name, data)
    except (UnknownOutcomeError, WriteRefusedError):
        raise
    except StorageError as error:
        failure = error
    if created and not storage.is_remote:
        return True
    there = _read_back(storage, name, failure)
    if there is None and created:
        raise StorageError(storage.url, f"{name} is missing after it was created")
    # A client repeats a request whose response was lost, so an unreadable entry may be from this call in any case.
    if there not in (None, data) and (created or (storage.is_remote and not _is_readable(name, there))):
        again = read_bytes(storage, name)  # the response may have been altered instead
        if again not in (data, there):
            raise StorageError(storage.url, f"it returned different bytes for {name} when it was read twice")
        if again != data:
            raise AlteredEntryError(storage.url, name, xxhash.xxh3_128_hexdigest(there))
        there = again
    if there != data:
        return False
    storage.sync(name.rpartition("/")[0])
    return True


def read_bytes(storage: Storage, name: str, max_bytes: int = MAX_ENTRY_BYTES) -> bytes | None:
    """Return the bytes of an object; None if it is missing. Raise MalformedError if it is larger than ``max_bytes``."""
    array = storage.read(name, max_bytes=max_bytes)
    return None if array is None else array.tobytes()


def _read_back(storage: Storage, name: str, failure: StorageError | None) -> bytes | None:
    """Read an entry after an attempt to create it. Return None if it is missing and will not appear later."""
    try:
        data = read_bytes(storage, name)
    except StorageError as error:
        first = error if failure is None else failure
        raise UnknownOutcomeError(storage.url, name, first.reason) from first
    if data is None and failure is not None:
        raise UnknownOutcomeError(storage.url, name, failure.reason) if storage.is_remote else failure
    return data


def _is_lost(storage: Storage, link: Link, writer: str) -> bool:
    """Return True if the entry at ``link``, created by ``writer``, is missing or was replaced by another writer."""
    data = storage.read(entry_name(link.version), max_bytes=MAX_ENTRY_BYTES)
    if data is None or xxhash.xxh3_128_hexdigest(data.data) == link.xxh3:
        return data is None
    entry = _parsed(link.version, data.tobytes())
    return entry is not None and entry.writer != writer


def _continues_after(log: StreamLog, version: int) -> bool:
    """Return True if an entry above ``version`` exists. In a directory, checks only the next names."""
    if log.storage.lists_from:
        return bool(log.versions(after=version))
    return log.storage.has_any([*map(entry_name, range(version + 1, version + 1 + _LOOK_AHEAD))])


def _is_superseded(taken: Manifest, head: Manifest) -> bool:
    """Return True if a fenced publisher created ``taken``, the entry after ``head``, under a deleted entry's name."""
    return (
        taken.stream == head.stream
        and taken.generation < head.generation
        and taken.writer not in (head.writer, _next_writer(head.writer))
    )


def _next_writer(writer: str) -> str:
    """Return the writer id of a publisher's next claim, which identifies the claim if the response was lost."""
    return xxhash.xxh3_128_hexdigest(writer.encode())


def _parsed(version: int, data: bytes) -> Manifest | None:
    """Return the entry of a version; None if it does not follow the format. Raises NewerFormatError."""
    try:
        return parse_manifest(entry_name(version), data)
    except NewerFormatError:
        raise
    except MalformedError:
        return None


def _is_readable(name: str, data: bytes) -> bool:
    try:
        parse_manifest(name, data)
    except MalformedError as error:
        return isinstance(error, NewerFormatError)
    return True


def _newer_publisher(storage: Storage, head: Manifest, entries: list[Manifest], writer: str) -> tuple[int, int] | None:
    """Return the generation and a version of a publisher that has superseded the publisher of ``head``, or None.

    ``entries`` begin with the entry before ``head``. ``writer`` is the id of the next claim of ``head``'s publisher.
    """
    for entry in entries:
        is_other = entry.writer not in (head.writer, writer) and entry.link != head.parent
        if is_other and (entry.stream != head.stream or entry.generation >= head.generation):
            return entry.generation, entry.version
    pointer = read_pointer(storage)
    if pointer is not None and pointer.stream == head.stream and pointer.generation > head.generation:
        return pointer.generation, pointer.version
    names = storage.names("parts", after=f"parts/{head.version + 1:020d}")
    beats = storage.names("publishers", after=f"publishers/{head.generation:020d}.json")
    found = [*map(_PART_GENERATION.match, names), *map(_BEAT_GENERATION.fullmatch, beats)]
    generation = max((int(match[1]) for match in found if match is not None), default=-1)
    return (generation, head.version + 1) if generation > head.generation else None


def check_version(entry: Manifest, version: int) -> Manifest:
    """Return ``entry``. Raise MalformedError if it is not the entry of ``version`` in the log."""
    if entry.version != version or entry.merges is not None:
        raise MalformedError(entry_name(version), f"it is the entry of version {entry.version}, merged: {entry.merges}")
    return entry


def check_merged(entry: Manifest, merged: Merged) -> Manifest:
    """Return ``entry``. Raise MalformedError if it is not the merged entry that ``merged`` refers to."""
    if entry.merges is None or Merged.of(entry) != merged:
        raise MalformedError(merged.name, f"it replaces versions after {entry.parent} up to {entry.merges}")
    return entry


def generation_error(entry: Manifest, before: Manifest) -> MalformedError:
    """Return the error for an ``entry`` whose generation is lower than that of its predecessor ``before``."""
    reason = f"its generation {entry.generation} is below {before.generation}, the generation of its predecessor"
    return MalformedError(entry_name(entry.version), reason)


def part_name(version: int, generation: int, author: str) -> str:
    """Return a unique name for a part of ``version`` or a later one. ``author`` is, for example, ``r3`` for rank 3."""
    return f"parts/{version:020d}-g{generation}-{author}-{secrets.token_hex(8)}.safetensors"
