"""Pointer object ``control/head.json``: a hint with the newest entry of a log, for readers that cannot list.

No writer depends on it. It may be missing, late, or older than one that was read before, so a reader takes the maximum
of what it has read, and checks every object that the pointer leads to.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from dataclasses import asdict, dataclass, replace

import xxhash
from msgspec import convert

from delta_tracker.errors import MalformedError
from delta_tracker.forking import Forkable, protect
from delta_tracker.stream.entry_names import MAX_ENTRY_BYTES, entry_name
from delta_tracker.stream.format.field_types import Count, Hex, Time
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.format.parse import load_json
from delta_tracker.stream.storage.storage import Storage

_logger = logging.getLogger(__name__)

POINTER_NAME = "control/head.json"
MAX_POINTER_BYTES = 64 << 10
MAX_POINTED_MERGED = 64
_MAX_TEXT = 1000
_DOUBT_SECONDS = 10.0  # between two checks of a pointer to another stream
_reported: set[str] = set()  # reasons of malformed pointers that were logged
_MAX_REPORTED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PointedSnapshot:
    """Newest snapshot to start from.

    Args:
        version: version of the snapshot.
        merged: True if it is a merged snapshot, False if it is an entry of the log.
    """

    version: Count
    merged: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPointer:
    """Contents of the pointer object.

    Args:
        stream: id of the stream.
        generation: generation of the newest entry.
        version: version of the newest entry.
        xxh3: hash of the newest entry.
        oldest: lowest version from which the log has all entries up to ``version``.
        snapshot: newest snapshot to start from; None if there is none.
        merged: first and last version of each merged delta that no other one covers, ascending by the last.
        time: Unix time of the writer's host, in seconds; informative.
    """

    stream: Hex
    generation: Count
    version: Count
    xxh3: Hex
    oldest: Count
    snapshot: PointedSnapshot | None
    merged: tuple[tuple[Count, Count], ...]
    time: Time

    def to_json(self) -> bytes:
        """Return the bytes of the object."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @property
    def problem(self) -> str | None:
        """Reason why the fields contradict each other; None if they do not."""
        if self.oldest > self.version:
            return f"oldest {self.oldest} is above version {self.version}"
        if self.snapshot is not None and self.snapshot.version > self.version:
            return f"snapshot {self.snapshot.version} is above version {self.version}"
        if len(self.merged) > MAX_POINTED_MERGED:
            return f"it has {len(self.merged)} merged deltas, more than {MAX_POINTED_MERGED}"
        lasts = [last for _, last in self.merged]
        if any(first > last or last > self.version for first, last in self.merged) or lasts != sorted(lasts):
            return f"its merged deltas are not ascending ranges up to version {self.version}"
        return None


def read_pointer(storage: Storage) -> HeadPointer | None:
    """Return the pointer object, None if it is missing or malformed. A malformed one is logged once.

    Raises:
        StorageError: if the store cannot be read.
    """
    try:
        data = storage.read(POINTER_NAME, max_bytes=MAX_POINTER_BYTES)
        if data is None:
            return None
        pointer = convert(load_json(data.tobytes()), HeadPointer)
        reason = pointer.problem
    except (ValueError, RecursionError, MalformedError) as error:
        pointer, reason = None, str(error)[:_MAX_TEXT]
    if reason is None:
        return pointer
    if reason not in _reported and len(_reported) < _MAX_REPORTED:
        _reported.add(reason)
        _logger.warning("ignored malformed pointer: url=%s name=%s error=%s", storage.url, POINTER_NAME, reason)
    return None


class PointerView(Forkable):
    """Maximum of the pointers that one reader has read. Thread-safe.

    Of the pointers of one stream, each field has its greatest value. The pointer of another stream is believed only
    after it and its entry were read past all caches. It is not believed if it has a lower generation while the entry
    of the present stream is still there: it may be from a publisher that was fenced.

    Args:
        storage: store of the stream.
        seconds: minimum time between two reads.
    """

    def __init__(self, storage: Storage, *, seconds: float = 1.0) -> None:
        self._storage = storage
        self._seconds = seconds
        self._newest: HeadPointer | None = None
        self._read_at: float | None = None  # monotonic time of the last successful read
        self._doubted_at: float | None = None  # monotonic time of the last check of another stream's pointer
        self._lock = threading.Lock()  # for the fields
        self._reading = threading.Lock()  # one request at a time
        protect(self)

    def after_fork_in_child(self) -> None:
        """Replace the locks, which another thread may have held during the fork."""
        self._lock, self._reading = threading.Lock(), threading.Lock()

    def newest(self, *, is_due: bool = True, past_cache: bool = False) -> HeadPointer | None:
        """Return the maximum of the pointers read so far; None if there was none.

        Args:
            is_due: True to read the object if the last read is at least ``seconds`` ago; False to send no request.
            past_cache: True to read the object now, past all caches.

        Raises:
            StorageError: if the store cannot be read.
        """
        if not past_cache and not (is_due and self._is_due()):
            return self._newest
        if not self._reading.acquire(blocking=past_cache or self._newest is None):
            return self._newest  # another thread is reading
        try:
            if past_cache or self._is_due():
                now = time.monotonic()
                pointer = read_pointer(self._storage.uncached if past_cache else self._storage)
                self._read_at = now
                if pointer is not None:
                    self._take(pointer, is_uncached=past_cache)
            return self._newest
        finally:
            self._reading.release()

    def saw(self, entry: Manifest) -> None:
        """Raise the newest version to that of an entry that was read."""
        known = self._newest
        if known is None or entry.stream != known.stream or entry.merges is not None:
            return
        if (entry.generation, entry.version) <= (known.generation, known.version) or entry.version < known.version:
            return
        with self._lock:
            if self._newest is known:  # otherwise, the next entry or pointer raises it
                snapshot = (
                    PointedSnapshot(version=entry.version, merged=False) if entry.kind == "snapshot" else known.snapshot
                )
                self._newest = replace(
                    known, generation=entry.generation, version=entry.version, xxh3=entry.xxh3, snapshot=snapshot
                )

    def _is_due(self) -> bool:
        return self._read_at is None or time.monotonic() - self._read_at >= self._seconds

    def _take(self, pointer: HeadPointer, *, is_uncached: bool) -> None:
        """Take a pointer into account that was read."""
        known = self._newest
        is_other = known is not None and known.stream != pointer.stream
        if known is not None and is_other and not self._replaces(known, pointer, is_uncached=is_uncached):
            return
        with self._lock:
            known = self._newest
            is_first = known is None or is_other
            self._newest = pointer if known is None or is_first else _maximum(known, pointer)

    def _replaces(self, known: HeadPointer, pointer: HeadPointer, *, is_uncached: bool) -> bool:
        """Return True if the log now has the stream of ``pointer`` instead of that of ``known``."""
        now = time.monotonic()
        if self._doubted_at is not None and now - self._doubted_at < _DOUBT_SECONDS:
            return False
        self._doubted_at = now
        if not is_uncached and self._storage.uncached is not self._storage:
            again = read_pointer(self._storage.uncached)
            if again is None or again.stream != pointer.stream:
                return False
            pointer = again
        if not self._has_entry(pointer):
            return False
        return pointer.generation > known.generation or not self._has_entry(known)

    def _has_entry(self, pointer: HeadPointer) -> bool:
        """Return True if the log has the entry of a pointer, read past all caches."""
        try:
            data = self._storage.uncached.read(entry_name(pointer.version), max_bytes=MAX_ENTRY_BYTES)
        except MalformedError:
            return False
        return data is not None and xxhash.xxh3_128_hexdigest(data.data) == pointer.xxh3


def _maximum(known: HeadPointer, pointer: HeadPointer) -> HeadPointer:
    """Return the maximum of two pointers of one stream, of which ``pointer`` was read last."""
    is_newer = (pointer.generation, pointer.version) >= (known.generation, known.version)
    head, other = (pointer, known) if is_newer else (known, pointer)
    if other.version > head.version:
        return head  # the log was restored from a copy and has continued; the fields of ``other`` are from before
    snapshots = [each.snapshot for each in (head, other) if each.snapshot is not None]
    return replace(
        head,
        oldest=max(head.oldest, other.oldest),
        snapshot=max(snapshots, key=lambda each: each.version, default=None),
    )
