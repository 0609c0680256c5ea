"""Mirror of a stream: a copy of its entries and objects in another store, which follows the source.

The log of the destination is always a contiguous range of the source's log with the same bytes, from a snapshot on, and
every object that it names is complete. Below it are only the claims that started its stream and former ones. So readers
may use it at any time, and a mirror that was killed continues where it stopped. A mirror only reads the source, and
never claims the destination: if another program appends to it, the mirror stops.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import xxhash
from msgspec.json import Decoder

from delta_tracker.errors import (
    CorruptPartError,
    InvalidArgumentError,
    MalformedError,
    MirrorDivergedError,
    MissingVersionError,
    NewerFormatError,
    NoSnapshotError,
    SourceGapError,
    StorageError,
    StreamError,
)
from delta_tracker.stream.format.digests import PieceHasher
from delta_tracker.stream.format.manifest import Manifest, Part, Stored
from delta_tracker.stream.format.parse import parse_manifest
from delta_tracker.stream.format.part_reader import check_object
from delta_tracker.stream.log import MAX_ENTRY_BYTES, Merged, StreamLog, entry_name
from delta_tracker.stream.maintenance.retention import Retained, Retention, RetentionPasses
from delta_tracker.stream.pin import MAX_PIN_BYTES, MAX_REASON, Pin, newest_pin
from delta_tracker.stream.pointer_writer import POINTER_SECONDS, PointerWriter
from delta_tracker.stream.reading.path import path_to
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.uncopied import Uncopied

if TYPE_CHECKING:
    from numpy.typing import NDArray

_logger = logging.getLogger(__name__)

_MEMORY_BYTES = 256 << 20  # objects up to this size are held in memory while they are copied
_PIECE_BYTES = 8 << 20
_PIN_SECONDS = 5.0  # interval of the copies of pins
_PINS = Decoder(Pin)
_CHECK_SECONDS = 60.0  # interval of the checks of the source, and of the copies of merged entries
_RETENTION_ENTRIES = 16
_MAX_BACK_OFF_SECONDS = 30.0
_REPAIR = (
    "Copy the object back to the source, for example from another mirror; or publish a snapshot there, and mirror to "
    "an empty destination"
)


class Mirror(Uncopied, remedy="Build a new Mirror where it is needed"):
    """Copier of the entries of one stream. Not thread-safe; run one mirror per destination.

    An empty destination starts at the source's newest snapshot, or if a pin applies, at the one that leads to it. The
    retention of the source does not apply to the destination, which keeps everything unless ``retention`` is given.

    Args:
        source: store of the stream. At an http url, entries are read past the caches, and parts through them.
        destination: store of the copy.
        retention: bounds on the versions at the destination; None deletes nothing.
        memory_bytes: maximum size of an object that is held in memory. Larger ones are copied in pieces of 8 MiB.
        pointer_seconds: minimum time between two writes of the pointer object of the destination, which readers over
            http need; None for no writes. Only :meth:`run` writes it.

    Raises:
        InvalidArgumentError: if both are one store, or the destination is read-only.

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
        memory_bytes: int = _MEMORY_BYTES,
        pointer_seconds: float | None = POINTER_SECONDS,
    ) -> None:
        if destination.is_read_only:
            raise InvalidArgumentError("destination", destination.url, "Pass the url of a bucket or directory")
        if source.is_same(destination):
            raise InvalidArgumentError("destination", destination.url, "Pass another store than the source")
        self._source, self._destination = source, destination
        # A cache may have an old 404, or an entry of a stream that was replaced; nothing would detect a wrong last one.
        self._entries = source.uncached
        self._from, self._to = StreamLog(self._entries), StreamLog(destination)
        self._passes = None if retention is None else RetentionPasses(self._to, retention)
        self._memory_bytes = memory_bytes
        self._pointer_seconds = pointer_seconds
        self._pointer: PointerWriter | None = None
        self._head: Manifest | None = None  # newest entry of the destination
        self._is_checked = False  # that the destination is a prefix of the source
        self._checked_at = self._merged_at = self._pinned_at = float("-inf")  # monotonic times
        self._num_pins = 0  # that this object has copied, or found at the destination
        self._waits_after = -1  # malformed version that was logged
        self._num_copied = 0
        self._has_waited = False  # for the first snapshot
        self._has_claims = False  # that were copied by copy_claims()

    @property
    def head(self) -> Manifest | None:
        """Newest entry of the destination, as of the last :meth:`step`; None before the first."""
        return self._head

    def step(self) -> bool:
        """Copy the next entry, after the objects that it names.

        Returns:
            True if an entry was copied; False if the source has none yet.

        Raises:
            MirrorDivergedError: if the destination is not a prefix of the source, or the source has deleted the next
                entry. It is a :class:`SourceGapError` if the source has lost the entry. Nothing was changed.
            CorruptPartError: if an object of the source does not match its entry.
            MalformedError: if an entry does not follow the format.
            StorageError: if a store fails, or the source has no entries any more, for example because its volume is
                not mounted. Call again to continue.
        """
        try:
            return self._step()
        except BaseException:
            self._is_checked = False
            raise

    def copy_merged(self) -> int:
        """Copy the merged entries that help readers of the destination, and return their number.

        These are the newest merged snapshot and the merged deltas after it that no other one covers. A merged entry
        whose objects the source has deleted meanwhile is skipped.
        """
        head = self._head
        if head is None:
            return 0
        return sum(self._copy_merged(each, head) for each in _useful(self._from.merged(), head, set(self._to.merged())))

    def copy_claims(self) -> int:
        """Copy the claims that prove which former streams the stream continues, and return their number.

        A destination that begins after a promotion lacks them, and readers of a former stream need them to continue.

        Raises:
            MirrorDivergedError: if the destination has another entry with this name.
            StorageError: as :meth:`step`.
        """
        if self._head is None:
            return 0
        listed, stream, num_copied = self._from.versions(), self._head.stream, 0
        while True:
            index = bisect_left(listed, True, key=lambda version: self._belongs(version, stream))
            fork = self._from.read(listed[index]) if index < len(listed) else None
            if fork is None or fork.forked_from is None:
                return num_copied
            name = entry_name(fork.version)
            if self._destination.size(name) is None and (data := self._read_entry(name)) is not None:
                self._create(name, data, fork.version)
                num_copied += 1
            listed, stream = listed[:index], fork.forked_from.stream

    def _belongs(self, version: int, stream: str) -> bool:
        """Return True if the entry of a version of the source, or the next readable one, belongs to a stream."""
        while self._head is not None and version <= self._head.version:
            with suppress(MalformedError):
                entry = self._from.read(version)
                if entry is not None:
                    return entry.stream == stream
            version += 1
        return True

    def copy_pins(self) -> int:
        """Copy the pins of the source in the order of their counters, and return their number.

        They wait until the destination has the entry that the newest one names, because predictors could not follow it
        before.

        Raises:
            MirrorDivergedError: if the destination has another pin with the same counter.
            MalformedError, StorageError: as :meth:`step`.
        """
        found: list[tuple[str, bytes]] = []
        while (data := self._read_pin(name := _pin_name(self._num_pins + len(found) + 1))) is not None:
            found.append((name, data))
        if not found:
            return 0
        try:
            pin = _PINS.decode(found[-1][1])
        except ValueError as error:
            raise MalformedError(found[-1][0], str(error)[:MAX_REASON]) from error
        entry = self._to.read(pin.version)
        if entry is None or (entry.stream, entry.xxh3) != (pin.stream, pin.xxh3):
            return 0
        for name, data in found:
            if not self._destination.create(name, data):
                there = self._destination.read(name, max_bytes=MAX_PIN_BYTES)
                if there is None or there.tobytes() != data:
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
        """Copy entries until ``stop`` is set. Retry after errors of the stores.

        Args:
            stop: event that ends the call after the current entry.
            poll_seconds: interval at which the source is polled, times a random factor of 0.75 to 1.25.
            on_entry: function to call with each copied entry.
            once: True to return when the destination has all entries of the source, and to raise errors of the stores.

        Raises:
            MirrorDivergedError, CorruptPartError, MalformedError: as :meth:`step`.
            StorageError: with ``once``, as :meth:`step`.
        """
        self._pointer = (
            None if self._pointer_seconds is None else PointerWriter(self._destination, seconds=self._pointer_seconds)
        )
        if self._pointer is not None and self._is_checked and self._head is not None:
            self._pointer.after(self._head)
        try:
            self._run(stop, poll_seconds, on_entry, once=once)
        finally:
            if self._pointer is not None:
                self._pointer.close()
            self._pointer = None

    def _run(
        self,
        stop: threading.Event,
        poll_seconds: float,
        on_entry: Callable[[Manifest], None] | None,
        *,
        once: bool,
    ) -> None:
        pause = poll_seconds
        while not stop.is_set():
            try:
                has_copied = self.step()
                if has_copied and on_entry is not None and self._head is not None:
                    on_entry(self._head)
                self._maintain(is_due=once and not has_copied)
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
            stop.wait(pause * random.uniform(0.75, 1.25))  # noqa: S311  no secret

    def _maintain(self, *, is_due: bool) -> None:
        """Copy merged entries each minute or if ``is_due``, and apply the retention after some entries."""
        now = time.monotonic()
        try:
            if is_due or now - self._merged_at >= _CHECK_SECONDS:
                self._merged_at = now
                if self.copy_merged():
                    self._rescan()
                if not self._has_claims:
                    self.copy_claims()
                    self._has_claims = True
            if is_due or now - self._pinned_at >= _PIN_SECONDS:
                self._pinned_at = now
                self.copy_pins()
            if self._passes is not None and self._num_copied >= (1 if is_due else _RETENTION_ENTRIES):
                self._num_copied = 0
                if self._passes.run() != Retained():
                    self._rescan()
        except MalformedError as error:  # a later pass may succeed
            _logger.warning("merged entries, pins or the retention were skipped: %s", error)

    def _step(self) -> bool:
        if not self._is_checked:
            self._head = self._newest()
            if self._head is not None:
                self._check(self._head)
                self._point_at(self._head)
            self._is_checked = True
        version = self._first() if self._head is None else self._head.version + 1
        if version is None:
            self._log_wait()
            return False
        name = entry_name(version)
        data = self._read_entry(name) if self._from.may_have(version) else None
        if data is None:
            self._check_now_and_then()
            return False
        entry = self._parsed(version, data)
        if entry is None:
            return False
        if self._head is None:
            self._check_first(version, entry)
        elif not self._follows(self._head, entry):
            raise self._diverged(version, f"its entry does not follow {self._head.link}")
        is_committed = entry.kind != "claim" or self._is_committed(entry)
        if is_committed is False:
            raise self._gone(version)
        if is_committed is None:
            return False
        self._copy_objects(entry)
        self._create(name, data, version)
        self._head = entry
        self._point_at(entry)
        self._num_copied += 1
        return True

    def _log_wait(self) -> None:
        """Log once that an empty destination waits for the first snapshot of the source."""
        if not self._has_waited:
            self._has_waited = True
            _logger.warning("waiting for the first snapshot: url=%s", self._source.url)

    def _point_at(self, entry: Manifest) -> None:
        if self._pointer is not None:
            self._pointer.after(entry)

    def _rescan(self) -> None:
        if self._pointer is not None:
            self._pointer.rescan()

    def _first(self) -> int | None:
        """Return the version at which an empty destination starts; None if the source has no snapshot.

        If a pin applies, this is the snapshot that leads to the pinned version: predictors of the destination could not
        follow the pin otherwise. If only a merged snapshot is left, it is copied, and the log starts with the entry
        after it.
        """
        head = self._from.head()
        if head is None:
            return None
        start = self._pinned_start(head)
        if start is not None:
            return self._after_merged(start, head) if start.merges is not None else start.version
        if head.snapshot is not None and self._from.read(head.snapshot) is not None:
            return head.snapshot
        newest = self._from.newest_snapshot()
        return None if newest is None or newest.merges is None else self._after_merged(newest, head)

    def _after_merged(self, snapshot: Manifest, head: Manifest) -> int | None:
        """Copy a merged snapshot. Return the version at which the log of the destination starts, None to repeat."""
        if not self._copy_merged(Merged.of(snapshot), head):
            return None  # the source has replaced it meanwhile
        return snapshot.version if self._from.read(snapshot.version) is not None else snapshot.version + 1

    def _pinned_start(self, head: Manifest) -> Manifest | None:
        """Return the snapshot that leads to the pinned version; None if no pin of the stream applies.

        Also None if the log from the snapshot on is not complete, which is logged: the destination then starts above
        the pinned version.
        """
        pin = newest_pin(self._entries)
        if pin is None or pin.kind != "pin" or pin.stream != head.stream:
            return None
        try:
            start = path_to(self._from, pin.version)[0]
        except (MissingVersionError, NoSnapshotError, InvalidArgumentError) as error:
            text = "the pinned version cannot be copied, so predictors of the copy cannot follow the pin: %s"
            _logger.warning(text, error)
            return None
        first = start.version if start.merges is None else start.version + 1
        if all(self._from.read(version) is not None for version in range(first, pin.version + 1)):
            return start
        text = (
            "the log does not lead to the pinned version, so predictors of the copy cannot follow the pin: version=%d"
        )
        _logger.warning(text, pin.version)
        return None

    def _newest(self) -> Manifest | None:
        """Return the newest entry of the destination, see :meth:`_unreadable` for a malformed one."""
        malformed: list[tuple[int, bytes]] = []
        fault: MalformedError | None = None
        for version in reversed(self._to.versions()):
            try:
                entry = self._to.read(version)
            except NewerFormatError:
                raise
            except MalformedError as error:
                fault = error
                found = self._destination.read(entry_name(version), max_bytes=MAX_ENTRY_BYTES)
                malformed.append((version, b"" if found is None else found.tobytes()))
                continue
            for number, data in reversed(malformed):
                entry = None if entry is None else _unreadable(number, data, entry)
            return entry
        if fault is not None:
            raise fault
        return None

    def _parsed(self, version: int, data: bytes) -> Manifest | None:
        """Return the next entry of the source.

        The log of the source continues after an entry whose bytes were altered on the way to the store, so such an
        entry is copied, too. None if it is malformed and no entry follows it yet.
        """
        try:
            return parse_manifest(entry_name(version), data)
        except NewerFormatError:
            raise
        except MalformedError as error:
            if self._head is None:
                raise
            entry = _unreadable(version, data, self._head)
            is_followed = self._is_followed(entry)
            if is_followed is False:
                raise
            if is_followed is None and version != self._waits_after:
                self._waits_after = version
                _logger.warning("waiting for the entry after a malformed one: version=%d error=%s", version, error)
            return entry if is_followed else None

    def _is_committed(self, claim: Manifest) -> bool | None:
        """Return True if a claim is part of the source's log, see :meth:`StreamLog.is_committed`.

        None if only malformed entries follow it yet.
        """
        # Look for newer versions first, so that one committed between the two calls does not look like a gap.
        if not self._from.versions(after=claim.version):
            return True
        return self._read_entry(entry_name(claim.version + 1)) is not None and self._is_followed(claim)

    def _is_followed(self, entry: Manifest) -> bool | None:
        """Return True if the next entry of the source names ``entry`` as its parent; None if there is none.

        If the next entry is malformed, the one after it decides, which is the first that can be trusted.
        """
        data = self._read_entry(entry_name(entry.version + 1))
        if data is None:
            return None
        try:
            following = parse_manifest(entry_name(entry.version + 1), data)
        except NewerFormatError:
            raise
        except MalformedError:
            return self._is_followed(_unreadable(entry.version + 1, data, entry))
        return self._follows(entry, following)

    def _check_first(self, version: int, entry: Manifest) -> None:
        """Check the first entry of an empty destination."""
        if entry.version != version or entry.merges is not None:
            raise MalformedError(entry_name(version), f"it is the entry of version {entry.version}")

    def _follows(self, head: Manifest, entry: Manifest) -> bool:
        return (
            entry.merges is None
            and (entry.stream, entry.parent) == (head.stream, head.link)
            and entry.generation >= head.generation
        )

    def _check_now_and_then(self) -> None:
        """Check the source each minute while there is no next entry: the log may be another one, or have a gap."""
        now = time.monotonic()
        if self._head is not None and now - self._checked_at >= _CHECK_SECONDS:
            self._check(self._head)

    def _check(self, head: Manifest) -> None:
        """Check that the source has the newest entry of the destination, or has deleted it, but not the next one."""
        data = self._read_entry(entry_name(head.version))
        if data is not None and xxhash.xxh3_128_hexdigest(data) != head.xxh3:
            raise self._diverged(head.version, "the entries have other bytes")
        has_newer = bool(self._from.versions(after=head.version))
        if data is None and not has_newer:
            raise self._emptied() or self._diverged(head.version, "the source has neither this version nor a newer one")
        if has_newer and self._read_entry(entry_name(head.version + 1)) is None:
            raise self._gone(head.version + 1)
        self._from.check_pointer()
        self._checked_at = time.monotonic()

    def _copy_merged(self, merged: Merged, head: Manifest) -> bool:
        """Copy a merged entry; return False if the source no longer has it or its objects."""
        data = self._read_entry(merged.name)
        if data is None:
            return False
        entry = parse_manifest(merged.name, data)
        if entry.merges is None or Merged.of(entry) != merged:
            raise MalformedError(merged.name, f"it replaces versions after {entry.parent} up to {entry.merges}")
        if entry.stream != head.stream:
            return False
        try:
            self._copy_objects(entry)
        except CorruptPartError as error:
            _logger.info("skipped a merged entry: name=%s reason=%s", merged.name, error)
            return False
        self._to.create_copy(merged.name, data)  # no-op if there is another compaction's entry for the same versions
        return True

    def _copy_objects(self, entry: Manifest) -> None:
        """Copy the objects that an entry names."""
        for stored in entry.objects:
            if self._is_there(stored):
                continue
            try:
                self._copy(self._source, stored)
            except CorruptPartError as error:
                if self._source is self._entries:
                    raise self._explained(entry, error) from error
                try:
                    self._copy(self._entries, stored)  # past the cache
                except CorruptPartError as again:
                    raise self._explained(entry, again) from again

    def _explained(self, entry: Manifest, error: CorruptPartError) -> StreamError:
        """Return the error for an object that cannot be copied."""
        if entry.merges is None and (self._from.read(entry.version) is None or self._from.precedes_claim(entry)):
            return self._emptied() or self._diverged(entry.version, "the source has deleted this version")
        return error.advising(_REPAIR)

    def _is_there(self, stored: Part | Stored) -> bool:
        """Return True if the destination has an object with these bytes, from an interrupted copy or another entry."""
        if self._destination.size(stored.name) != stored.num_bytes:
            return False
        try:
            for _ in self._checked(self._destination, stored):
                pass
        except CorruptPartError:
            return False
        return True

    def _copy(self, source: Storage, stored: Part | Stored) -> None:
        """Copy an object. It becomes visible only if its bytes match its record."""
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
        """Yield the bytes of an object, in order. The last piece is yielded only if all bytes match the record."""
        if stored.num_bytes <= self._memory_bytes:
            try:
                data = storage.read(stored.name, max_bytes=stored.num_bytes)
            except MalformedError as error:
                raise CorruptPartError(stored.name, error.reason) from error
            yield check_object(stored, data)
            return
        if storage.size(stored.name) != stored.num_bytes:
            raise CorruptPartError(stored.name, f"it does not have {stored.num_bytes} bytes")
        # In format 2, the hash covers the digests of the pieces of the body; in format 1, it covers the whole object.
        whole, body = xxhash.xxh3_128(), PieceHasher()
        digests = bytearray()
        for begin in range(0, stored.num_bytes, _PIECE_BYTES):
            end = min(begin + _PIECE_BYTES, stored.num_bytes)
            piece = storage.read_range(stored.name, begin, end)
            if piece is None:
                raise CorruptPartError(stored.name, "it was deleted while it was read")
            num_body = max(0, min(len(piece), stored.body - begin))
            body.update(piece[:num_body].data)
            whole.update(piece[num_body:].data)
            digests += piece[num_body:].data if stored.body else b""
            if end == stored.num_bytes:
                is_body = not stored.body or body.digests().numpy().tobytes() == bytes(digests)
                if whole.hexdigest() != stored.xxh3 or not is_body:
                    raise CorruptPartError(stored.name, "its bytes do not match its record")
            yield piece

    def _create(self, name: str, data: bytes, version: int) -> None:
        if not self._to.create_copy(name, data):
            raise self._diverged(version, "another program has appended this version")

    def _read_entry(self, name: str) -> bytes | None:
        array = self._entries.read(name, max_bytes=MAX_ENTRY_BYTES)
        return None if array is None else array.tobytes()

    def _read_pin(self, name: str) -> bytes | None:
        array = self._entries.read(name, max_bytes=MAX_PIN_BYTES)
        return None if array is None else array.tobytes()

    def _gone(self, version: int) -> MirrorDivergedError | StorageError:
        """Return the error for a version that the source lacks. Retention deletes only versions below a snapshot."""
        if (emptied := self._emptied()) is not None:
            return emptied
        snapshot = self._from.newest_snapshot()
        if snapshot is None or snapshot.version < version:
            is_there = self._read_entry(entry_name(version)) is not None  # a claim, whose successor is missing
            return SourceGapError(self._source.url, self._destination.url, version + 1 if is_there else version)
        return self._diverged(version, "the source has deleted this version")

    def _emptied(self) -> StorageError | None:
        """Return the error for a source that has no entry any more; None if it has one.

        It may be on a volume that is not mounted, so the mirror waits.
        """
        if self._from.versions():
            return None
        remedy = "Mount its volume, or correct its url: the mirror continues once the source has its entries again"
        return StorageError(self._source.url, "it has no entries, although some were copied from it", remedy)

    def _diverged(self, version: int, reason: str) -> MirrorDivergedError:
        return MirrorDivergedError(self._source.url, self._destination.url, version, reason)


def _pin_name(counter: int) -> str:
    return f"control/pins/{counter:020d}.json"


def _unreadable(version: int, data: bytes, before: Manifest) -> Manifest:
    """Return a stand-in for a malformed entry, of which only the hash counts; ``before`` is the entry before it."""
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


def _useful(merged: list[Merged], head: Manifest, there: set[Merged]) -> list[Merged]:
    """Return the merged entries to copy to a log with the newest entry ``head`` and the merged entries ``there``."""
    reached = [each for each in merged if each.last <= head.version]
    snapshots = [each for each in reached if each.kind == "snapshot"]
    start = max([-1 if head.snapshot is None else head.snapshot, *(each.last for each in snapshots)])
    deltas = [each for each in reached if each.kind == "delta" and each.last > start]
    found = [each for each in snapshots if each.last == start]
    for each in deltas:
        others = (other for other in deltas if other != each)
        if not any(other.first <= each.first and each.last <= other.last for other in others):
            found.append(each)
    return [each for each in found if each not in there]
