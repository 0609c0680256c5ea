"""Mirror of a stream: a copy of its entries and objects in another store, which is updated continuously.

The destination's log is always a copy of a contiguous range of the source's log. The range begins with a snapshot. Only
the claims that started the current and former streams may precede the range. A mirror copies the objects of all tables
or of some tables. A killed mirror continues where it stopped. A mirror stops if another program appends to the
destination.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import xxhash
from msgspec.json import decode
from numpy.typing import NDArray

from delta_tracker.errors import (
    CorruptPartError,
    InvalidArgumentError,
    MalformedError,
    MirrorDivergedError,
    MissingVersionError,
    NewerFormatError,
    NoSnapshotError,
    StorageError,
)
from delta_tracker.live_objects import Uncopied
from delta_tracker.stream.format.manifest import Manifest, Merged, Part, Stored, entry_name
from delta_tracker.stream.format.object_reader import check_size, checked_pieces, read_object
from delta_tracker.stream.format.parse import parse_manifest
from delta_tracker.stream.format.table_choice import TableChoice, check_has_all, check_mirrored, write_mirrored_tables
from delta_tracker.stream.log import StreamLog, check_merged, check_version, read_bytes
from delta_tracker.stream.maintenance.retention import Retained, Retention, RetentionPasses
from delta_tracker.stream.pin import MAX_PIN_BYTES, Pin, newest_pin, pin_name
from delta_tracker.stream.pointer_writer import POINTER_SECONDS, PointerWriter, uncovered_deltas
from delta_tracker.stream.reading.path import forks, path_to
from delta_tracker.stream.reading.position import Position
from delta_tracker.stream.reading.runtime import REAL, Runtime
from delta_tracker.stream.storage.storage import Storage

_logger = logging.getLogger(__name__)

_MEMORY_BYTES = 256 << 20  # objects up to this size are held in memory while they are copied
_PIN_SECONDS = 5.0  # interval of the copies of pins
_CHECK_SECONDS = 60.0  # interval of the checks of the source, and of the copies of merged entries
_RETENTION_ENTRIES = 16
_MAX_BACK_OFF_SECONDS = 30.0
_NEVER = float("-inf")
_DELETED = "the source has deleted this version"
_REPAIR = (
    "Copy the object back to the source, for example from another mirror; or publish a snapshot there, and mirror to "
    "an empty destination"
)


class Mirror(Uncopied, remedy="Build a new Mirror where it is needed"):
    """Copier of the entries and objects of one stream. Not thread-safe; run one mirror per destination.

    An empty destination starts at the source's newest snapshot or, if the stream is pinned, at the snapshot that leads
    to the pinned version. Versions that the source deletes stay at the destination, unless ``retention`` is given.
    Raises InvalidArgumentError if ``source`` and ``destination`` are the same store, or ``destination`` is read-only.

    Args:
        source: store of the stream. At an http url, reads of entries bypass caches, but reads of parts do not.
        destination: store of the copy.
        retention: bounds on the versions that the destination retains; None to delete nothing.
        tables: names of the tables and dense tensors whose parts are copied, or patterns with ``*``, ``?`` and
            ``[...]``; None to copy all objects. The choice for a destination cannot be changed later.
        memory_bytes: maximum size of an object that is copied as a whole. Larger objects are copied in pieces of 8 MiB.
        pointer_seconds: minimum time between two writes of the destination's pointer object, which readers over http
            need. Only :meth:`run` writes it. None disables the writes.
        runtime: functions for time, random numbers and threads.

    Attributes:
        head: newest entry of the destination after the last :meth:`step`; None before the first copied entry.

    Example:
        >>> mirror = Mirror(Storage("memory://"), Storage("memory://"))
        >>> mirror.step()
        False
    """

    def __init__(
        self,
        source: Storage,
        destination: Storage,
        *,
        retention: Retention | None = None,
        tables: str | Sequence[str] | None = None,
        memory_bytes: int = _MEMORY_BYTES,
        pointer_seconds: float | None = POINTER_SECONDS,
        runtime: Runtime = REAL,
    ) -> None:
        if destination.is_read_only:
            raise InvalidArgumentError("destination", destination.url, "Pass the url of a bucket or directory")
        if source.is_same(destination):
            raise InvalidArgumentError("destination", destination.url, "Pass another store than the source")
        # A cache may have an old 404, or an entry of a stream that was replaced; nothing would detect a wrong last one.
        self._source = StreamLog(source.uncached, runtime)
        self._to = StreamLog(destination, runtime)
        self._objects = ObjectCopier(source, destination, memory_bytes, TableChoice(tables))
        self._passes = None if retention is None else RetentionPasses(self._to, retention)
        self._pointer_seconds = pointer_seconds
        self._runtime = runtime
        self.head: Manifest | None = None
        self._checked_at: float | None = None  # monotonic time of the last check; None to read the destination again
        self._merged_at = self._pinned_at = _NEVER  # monotonic times
        self._num_pins = 0  # that this object has copied, or found at the destination
        self._num_copied = 0  # entries since the last retention
        self._has_claims = False  # that were copied by copy_claims()
        self._noted = ""  # last note that was logged

    def step(self) -> bool:
        """Copy the objects of the next entry, then the entry itself. Return False if the source has no next entry yet.

        Raises:
            MirrorDivergedError: if the destination is not a prefix of the source, or the next entry was deleted from
                the source. Nothing was changed.
            MissingVersionError: if the next entry is missing in the source, and the source has no newer snapshot.
            CorruptPartError: if an object of the source does not match its entry.
            LeftOutPartError: if the source is a mirror of some tables, and lacks a part of a chosen table.
            InvalidArgumentError: if the destination began with another choice of tables. Nothing was changed.
            MissingTableError: if a name or pattern matches nothing in the first snapshot. Nothing was changed.
            MalformedError: if an entry does not follow the format.
            StorageError: if a store fails, or the source no longer has entries, for example because its volume is not
                mounted. Call again to continue.
        """
        try:
            decision = self._decide()
            note = decision.note if isinstance(decision, Copy) else decision
            if note not in ("", self._noted):
                self._noted = note
                _logger.warning("%s", note)
            return isinstance(decision, Copy) and self._copy(decision)
        except BaseException:
            self._checked_at = None
            raise

    def copy_merged(self) -> int:
        """Copy the newest merged snapshot and the merged deltas after it. Return the number of copied entries.

        Skips deltas that another merged delta covers, and entries whose objects were deleted from the source.
        """
        head = self.head
        if head is None:
            return 0
        found = _merged_to_copy(self._source.merged(), head, set(self._to.merged()))
        return sum(self._copy_merged(each, head.stream) for each in found)

    def copy_claims(self) -> int:
        """Copy the claims that link the stream to its former streams. Return the number of copied claims.

        Readers of a former stream need these claims to continue with the current stream.
        """
        if self.head is None:
            return 0
        log, head, num_copied = self._source, self.head, 0
        for claim in forks([each for each in log.versions() if each <= head.version], head.stream, log.readable):
            is_missing = self._to.storage.size(entry_name(claim.version)) is None
            if is_missing and (data := _read(log, claim.version)) is not None:
                self._create(data, claim.version)
                num_copied += 1
        return num_copied

    def copy_pins(self) -> int:
        """Copy new pins of the source in the order of their counters. Return the number of copied pins.

        Copies no pin until the destination contains the entry that the newest pin names. Raises MirrorDivergedError if
        the destination contains another pin with the same counter.
        """
        source, destination = self._source.storage, self._to.storage
        found: list[bytes] = []
        pin: Pin | None = None
        while (data := read_bytes(source, pin_name(self._num_pins + len(found) + 1), MAX_PIN_BYTES)) is not None:
            found.append(data)
            with suppress(ValueError):  # readers ignore a malformed pin
                pin = decode(data, type=Pin)
        entry = None if pin is None else self._to.read(pin.version)
        if pin is None or entry is None or (entry.stream, entry.xxh3) != (pin.stream, pin.xxh3):
            return 0
        for data in found:
            name = pin_name(self._num_pins + 1)
            if not destination.create(name, data) and read_bytes(destination, name, MAX_PIN_BYTES) != data:
                raise self._diverged(pin.version, f"another program has written {name}")
            self._num_pins += 1
        return len(found)

    def run(
        self,
        *,
        stop: threading.Event,
        poll_seconds: float,
        on_entry: Callable[[Manifest], None] | None = None,
        once: bool = False,
    ) -> None:
        """Copy entries until ``stop`` is set. Retry after a StorageError; raise the other errors of :meth:`step`.

        Args:
            stop: event that ends the call after the current entry.
            poll_seconds: interval at which the source is polled, with a random jitter of 25 %.
            on_entry: function to call with each copied entry.
            once: True to return once all entries of the source are copied, and to raise each StorageError.
        """
        seconds, runtime, pause, pointed = self._pointer_seconds, self._runtime, poll_seconds, None
        pointer = None if seconds is None else PointerWriter(self._to.storage, seconds=seconds, runtime=runtime)
        with nullcontext() if pointer is None else closing(pointer):
            while not stop.is_set():
                try:
                    has_copied, head = self.step(), self.head
                    if pointer is not None and head is not None and head is not pointed:
                        pointed = head
                        pointer.after(head)
                    if has_copied and head is not None and on_entry is not None:
                        on_entry(head)
                    self._maintain(pointer, is_due=once and not has_copied)
                except StorageError as error:
                    if once:
                        raise
                    if pause == poll_seconds:
                        _logger.warning("a copy failed and is repeated: %s", error)
                    pause = min(2 * pause, max(poll_seconds, _MAX_BACK_OFF_SECONDS))
                else:
                    pause = poll_seconds
                    if has_copied:
                        continue
                    if once:
                        return
                runtime.wait(stop, pause * runtime.uniform(0.75, 1.25))

    def _maintain(self, pointer: PointerWriter | None, *, is_due: bool) -> None:
        """Copy merged entries once per minute, or now if ``is_due``. Run retention after several copied entries."""
        now, is_changed = self._runtime.monotonic(), False
        try:
            if is_due or now - self._merged_at >= _CHECK_SECONDS:
                self._merged_at = now
                is_changed = self.copy_merged() > 0
                if not self._has_claims:
                    is_changed |= self.copy_claims() > 0
                    self._has_claims = True
            if is_due or now - self._pinned_at >= _PIN_SECONDS:
                self._pinned_at = now
                self.copy_pins()
            if self._passes is not None and self._num_copied >= (1 if is_due else _RETENTION_ENTRIES):
                self._num_copied = 0
                is_changed |= self._passes.run() != Retained()
        except MalformedError as error:  # a later pass may succeed
            _logger.warning("merged entries, pins or the retention were skipped: %s", error)
        finally:
            if pointer is not None and is_changed:
                pointer.rescan()

    def _decide(self) -> "Copy | str":
        is_checked, now = self._checked_at is not None, self._runtime.monotonic()
        if not is_checked:
            self.head = self._newest(self._to.versions())
            check_mirrored(self._to.storage, self._objects.choice, is_empty=self.head is None)
        is_due = self._checked_at is None or now - self._checked_at >= _CHECK_SECONDS
        log = _Seen(self._source, self._diverged)
        decision = next_copy(log, self.head, is_checked=is_checked, is_due=is_due)
        if self.head is None:
            self._checked_at = _NEVER
        elif not is_checked or (is_due and isinstance(decision, str)):
            self._checked_at = now
        return decision

    def _newest(self, versions: list[int]) -> Manifest | None:
        data = _read(self._to, versions[-1]) if versions else None
        if data is None:
            return None
        try:
            return _parsed(versions[-1], data)
        except NewerFormatError:
            raise
        except MalformedError:
            if (before := self._newest(versions[:-1])) is None:
                raise
            return _placeholder(versions[-1], data, before)

    def _copy(self, decision: "Copy") -> bool:
        entry, merged = decision.entry, decision.merged
        if merged is not None and not self._copy_merged(merged, entry.stream):
            return False
        self._copy_objects(entry, is_merged=merged is not None and merged.last == entry.version)
        self._create(decision.data, entry.version)
        self.head = entry
        self._num_copied += 1
        return True

    def _copy_merged(self, merged: Merged, stream: str) -> bool:
        data = read_bytes(self._source.storage, merged.name)
        if data is None:
            return False
        entry = check_merged(parse_manifest(merged.name, data), merged)
        if entry.stream != stream:
            return False
        try:
            self._copy_objects(entry)
        except CorruptPartError as error:
            _logger.info("skipped a merged entry: name=%s reason=%s", merged.name, error)
            return False
        self._to.create_copy(merged.name, data)  # no-op if there is another compaction's entry for the same versions
        return True

    def _copy_objects(self, entry: Manifest, *, is_merged: bool = False) -> None:
        """Copy the objects of an entry. If ``is_merged``, retention may have deleted them from the source."""
        log, choice = self._source, self._objects.choice
        if self.head is None:
            choice.narrowed(entry)  # raises MissingTableError
            write_mirrored_tables(self._to.storage, choice)
        for stored in choice.copied(entry).objects:
            try:
                self._objects.copy(stored)
            except CorruptPartError as error:
                is_kept_for_claim = log.precedes_claim(entry)
                if is_merged and is_kept_for_claim:
                    return
                is_passed = is_kept_for_claim and self.head is not None
                if entry.merges is None and (is_passed or log.read(entry.version) is None):
                    raise (_empty_error(log) or self._diverged(entry.version, _DELETED)) from error
                raise error.with_remedy(_REPAIR) from error

    def _create(self, data: bytes, version: int) -> None:
        if not self._to.create_copy(entry_name(version), data):
            raise self._diverged(version, "another program has appended this version")

    def _diverged(self, version: int, reason: str) -> MirrorDivergedError:
        return MirrorDivergedError(self._source.url, self._to.url, version, reason)


def promote(storage: Storage) -> Manifest:
    """Start a new stream in a mirror's log, so that a publisher can append to it. Return the claim that starts it.

    Stop the former trainer and the mirror first: this function does not check whether they are running. Restore the new
    trainer from the mirror before this call, and build its publisher afterwards; see ``guide/fleet.md``.

    The call is idempotent: if the newest entry is already a claim that starts a stream, it is returned.

    Raises:
        InvalidArgumentError: if the store contains no stream, or a mirror of only some tables.
        LivePublisherError: if a running mirror or publisher appended an entry during the call. Nothing was created.
        StorageError: if the store fails. The stream may have been started: repeat the call.

    Example:
        >>> promote(Storage("memory://"))
        Traceback (most recent call last):
        ...
        delta_tracker.errors.InvalidArgumentError: url='memory://' cannot be used. Pass the url of a stream.
    """
    check_has_all(storage)
    log = StreamLog(storage)
    head = log.head()
    if head is None:
        raise InvalidArgumentError("url", storage.url, "Pass the url of a stream")
    if head.forked_from is not None:
        return head
    return log.claim(after=head.link, forks=True).head


class ObjectCopier:
    """Copier of the objects of entries from one store to another. Copies large objects in pieces of 8 MiB.

    ``choice`` selects the tables to copy.
    """

    def __init__(self, source: Storage, destination: Storage, memory_bytes: int, choice: TableChoice) -> None:
        self.choice = choice
        self._source = source
        self._destination = destination
        self._memory_bytes = memory_bytes

    def copy(self, stored: Part | Stored) -> None:
        """Copy an object unless it exists at the destination.

        Raises CorruptPartError, and creates no object, if the bytes do not match the record ``stored``.
        """
        if self._is_there(stored):
            return
        try:
            self._copy(self._source, stored)
        except CorruptPartError:
            if self._source is self._source.uncached:
                raise
            self._copy(self._source.uncached, stored)

    def _is_there(self, stored: Part | Stored) -> bool:
        """Return True if the object exists at the destination, from an interrupted copy or another entry."""
        if self._destination.size(stored.name) != stored.num_bytes:
            return False
        try:
            for _ in self._checked(self._destination, stored):
                pass
        except CorruptPartError:
            return False
        return True

    def _copy(self, source: Storage, stored: Part | Stored) -> None:
        pieces = self._checked(source, stored)
        if stored.num_bytes <= self._memory_bytes:
            self._destination.put(stored.name, (piece.data for piece in pieces))
            return

        def buffers(reader: ThreadPoolExecutor) -> Iterator[memoryview]:
            pending = reader.submit(next, pieces, None)
            while (piece := pending.result()) is not None:
                pending = reader.submit(next, pieces, None)
                yield piece.data

        # obstore requests the buffers in a thread of its runtime, which must not call obstore.
        with ThreadPoolExecutor(1) as reader:
            self._destination.put(stored.name, buffers(reader))

    def _checked(self, storage: Storage, stored: Part | Stored) -> Iterator[NDArray[np.uint8]]:
        if stored.num_bytes <= self._memory_bytes:
            yield read_object(storage, stored)
            return
        check_size(stored, storage.size(stored.name), storage)
        yield from checked_pieces(partial(storage.read_range, stored.name), stored)


@dataclass(frozen=True, slots=True)
class Copy:
    """Decision to copy ``entry``, whose bytes are ``data``. If they are malformed, only the hash in ``entry`` is valid.

    ``merged`` is a merged snapshot to copy first, or None. ``note`` is a warning to log; empty for no warning.
    """

    entry: Manifest
    data: bytes
    merged: Merged | None = None
    note: str = ""


class _Seen:
    """Cache of the source's responses in one step of a mirror. Each object is requested only once."""

    def __init__(self, log: StreamLog, diverged: Callable[[int, str], MirrorDivergedError]) -> None:
        self.source = log
        self.url, self.diverged = log.url, diverged
        self.entry = cache(partial(_read, log))
        self.read, self.read_merged = cache(log.read), cache(log.read_merged)
        self.merged, self.versions = cache(log.merged), cache(log.versions)
        self.head, self.newest_snapshot = cache(log.head), cache(log.newest_snapshot)
        self.is_committed = log.is_committed

    def is_kept_for_claim(self, entry: Manifest) -> bool:
        """Return True if retention has deleted the objects of ``entry``, and keeps it only for the claim after it."""
        if not self.source.precedes_claim(entry):
            return False
        size = self.source.storage.size
        return any(size(each.name) is None for each in entry.objects)

    def next_entry(self, version: int) -> bytes | None:
        """Poll for the entry of ``version``, and return its bytes; None if it was not found."""
        return _read(self.source, version) if self.source.may_have(version) else None


def next_copy(log: _Seen, head: Manifest | None, *, is_checked: bool, is_due: bool) -> Copy | str:
    """Return the decision to copy the next entry. If the mirror must wait, return a note to log, which may be empty.

    ``head`` is the newest entry of the destination. ``is_checked`` is True if an earlier check has found that the
    destination is a prefix of the source. ``is_due`` is True to check this if it is unknown or there is no next entry.
    """
    if head is None:
        return _first(log)
    version = head.version + 1
    data = log.next_entry(version) if is_checked else None
    if data is None and is_due:
        data = _check(log, head)
    if data is None:
        return ""
    entry, error = _parse_or_placeholder(version, data, head)
    if error is not None:
        # The source continues after an entry whose bytes were altered on the way to the store.
        if (is_followed := _is_followed(log, entry)) is None:
            return f"waiting for the entry after a malformed one: version={version} error={error}"
        if not is_followed:
            raise error
    if not Position.after(head).leads_to(entry):
        raise log.diverged(version, f"its entry does not follow {head.link}")
    is_committed = entry.kind != "claim" or _is_committed(log, entry)
    if is_committed is False:
        raise _missing_error(log, version)
    return "" if is_committed is None else Copy(entry, data)


def _first(log: _Seen) -> Copy | str:
    """Begin at the snapshot that leads to the pinned version, if possible, otherwise at the newest snapshot."""
    head = log.head()
    waits = f"waiting for the first snapshot: url={log.url}"
    if head is None:
        return waits
    start, note = _pinned_start(log, head)
    if start is None:
        start = None if head.snapshot is None else log.read(head.snapshot)
    if start is None or log.is_kept_for_claim(start):
        newest = log.newest_snapshot()
        start = start if newest is None or newest.merges is None else newest
    if start is None:
        return waits
    merged = None if start.merges is None else Merged.of(start)
    version = start.version if merged is None or log.read(start.version) is not None else start.version + 1
    data = log.next_entry(version)
    return note if data is None else Copy(_parsed(version, data), data, merged, note)


def _pinned_start(log: _Seen, head: Manifest) -> tuple[Manifest | None, str]:
    """Return the snapshot that leads to the pinned version, or None, and a note to log, which may be empty."""
    pin = newest_pin(log.source.storage)
    if pin is None or pin.kind != "pin" or pin.stream != head.stream:
        return None, ""
    try:
        start = path_to(log, pin.version)[0]
    except (MissingVersionError, NoSnapshotError, InvalidArgumentError) as error:
        return None, f"the pinned version cannot be copied, so predictors of the copy cannot follow the pin: {error}"
    first = start.version if start.merges is None else start.version + 1
    if all(log.read(version) is not None for version in range(first, pin.version + 1)):
        return start, ""
    text = "the log does not lead to the pinned version, so predictors of the copy cannot follow the pin"
    return None, f"{text}: version={pin.version}"


def _check(log: _Seen, head: Manifest) -> bytes | None:
    """Return the bytes of the next entry; None if there is none.

    Raise MirrorDivergedError if the destination is not a prefix of the source.
    """
    data = log.entry(head.version)
    if data is not None and xxhash.xxh3_128_hexdigest(data) != head.xxh3:
        raise log.diverged(head.version, "the entries have other bytes")
    has_newer = bool(log.versions(after=head.version))
    if data is None and not has_newer:
        raise _empty_error(log) or log.diverged(head.version, "the source has neither this version nor a newer one")
    following = log.entry(head.version + 1) if has_newer else None
    if has_newer and following is None:
        raise _missing_error(log, head.version + 1)
    log.source.check_pointer()
    return following


def _is_committed(log: _Seen, claim: Manifest) -> bool | None:
    """Return True if a claim is part of the source's log; None if only malformed entries follow it."""
    # Look for newer versions first, so that one committed between the two looks does not look like a gap.
    if not log.versions(after=claim.version):
        return True
    return log.entry(claim.version + 1) is not None and _is_followed(log, claim)


def _is_followed(log: _Seen, entry: Manifest) -> bool | None:
    """Return True if the parent of the next well-formed entry is ``entry``; None if there is no such entry."""
    version = entry.version + 1
    data = log.entry(version)
    if data is None:
        return None
    following, error = _parse_or_placeholder(version, data, entry)
    return Position.after(entry).leads_to(following) if error is None else _is_followed(log, following)


def _missing_error(log: _Seen, version: int) -> MirrorDivergedError | MissingVersionError | StorageError:
    """Return the error for a missing version of the source. Retention deletes only versions below a snapshot."""
    if (emptied := _empty_error(log)) is not None:
        return emptied
    snapshot = log.newest_snapshot()
    if snapshot is None or snapshot.version < version:
        is_there = log.entry(version) is not None  # a claim, whose successor is missing
        remedy = (
            f"Publish a snapshot to {log.url}, which lacks it and has no snapshot above it, "
            "then mirror to an empty destination"
        )
        return MissingVersionError(version + 1 if is_there else version, log.versions()[-1]).with_remedy(remedy)
    return log.diverged(version, _DELETED)


def _empty_error(log: _Seen | StreamLog) -> StorageError | None:
    """Return the error for a source that has no entries any more; None if it has entries. The mirror retries later."""
    if log.versions():
        return None
    remedy = "Mount its volume, or correct its url: the mirror continues once the source has its entries again"
    return StorageError(log.url, "it has no entries, although some were copied from it", remedy)


def _read(log: StreamLog, version: int) -> bytes | None:
    return read_bytes(log.storage, entry_name(version))


def _parsed(version: int, data: bytes) -> Manifest:
    return check_version(parse_manifest(entry_name(version), data), version)


def _parse_or_placeholder(version: int, data: bytes, before: Manifest) -> tuple[Manifest, MalformedError | None]:
    try:
        return _parsed(version, data), None
    except NewerFormatError:
        raise
    except MalformedError as error:
        return _placeholder(version, data, before), error


def _placeholder(version: int, data: bytes, before: Manifest) -> Manifest:
    """Return a placeholder for a malformed entry after ``before``. Only its hash is used."""
    return Manifest(
        stream=before.stream,
        generation=before.generation,
        writer=before.writer,
        version=version,
        kind="delta",
        parent=before.link,
        snapshot=before.snapshot,
        created=before.created,
        xxh3=xxhash.xxh3_128_hexdigest(data),
    )


def _merged_to_copy(merged: list[Merged], head: Manifest, there: set[Merged]) -> list[Merged]:
    """Return the merged entries to copy to a log with the newest entry ``head`` and the merged entries ``there``."""
    reached = [each for each in merged if each.last <= head.version]
    snapshots = [each for each in reached if each.kind == "snapshot"]
    start = max([-1 if head.snapshot is None else head.snapshot, *(each.last for each in snapshots)])
    found = [each for each in snapshots if each.last == start]
    found += uncovered_deltas(each for each in reached if each.last > start)
    return [each for each in found if each not in there]
