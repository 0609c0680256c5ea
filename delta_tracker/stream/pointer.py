"""Pointer object ``control/head.json``: a hint that names the newest entry of a log, for readers that cannot list it.

No writer depends on the pointer. It may be missing, late, forged, or older than a previously read pointer. A reader
that cannot list therefore takes all fields from the newest pointer whose entry it has read, and checks every object.
"""

import json
import logging
import threading
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Annotated, Self

import xxhash
from msgspec import Meta, convert

from delta_tracker.errors import MalformedError, StaleCacheError, UnreadablePointerError, without_traceback
from delta_tracker.live_objects import Forkable, protect
from delta_tracker.stream.format.field_types import Count, Hex, Time
from delta_tracker.stream.format.manifest import MAX_ENTRY_BYTES, Manifest, entry_name
from delta_tracker.stream.format.parse import load_json, parse_manifest
from delta_tracker.stream.reading.runtime import REAL, Runtime
from delta_tracker.stream.storage.storage import Storage

_logger = logging.getLogger(__name__)
POINTER_NAME = "control/head.json"
MAX_POINTER_BYTES = 64 << 10
MAX_POINTED = 64  # merged deltas, older versions and merged snapshots
_MAX_TEXT = 1000
_REREAD_SECONDS = 10.0  # between two checks of a pointer that contradicts the entries
_MAX_SHOWN_BYTES = 60
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_reported: set[str] = set()  # reasons of malformed pointers that were logged
_MAX_REPORTED = 64
_NEVER = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class PointedSnapshot:
    """Newest snapshot from which a reader can start. ``merged`` is True for a merged entry."""

    version: Count
    merged: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPointer:
    """Contents of the pointer object: the newest entry of the log, and older entries from which readers reach it."""

    stream: Hex
    generation: Count
    version: Count
    xxh3: Hex
    oldest: Count
    """Lowest version such that the log contains all entries from this version to ``version``."""
    snapshot: PointedSnapshot | None
    merged: Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=MAX_POINTED)]
    """First and last version of each merged delta that no other merged delta covers, sorted by last version."""
    time: Time
    """Unix time of the writer's host, in seconds, for information only."""
    older: Annotated[tuple[Count, ...], Meta(max_length=MAX_POINTED)] = ()
    """Versions in the log below ``oldest``, ascending: claims that a reader needs to follow a promotion."""
    snapshots: Annotated[tuple[Count, ...], Meta(max_length=MAX_POINTED)] = ()
    """Versions of the merged snapshots, ascending. A pinned reader or a canary may need an older snapshot."""

    def to_json(self) -> bytes:
        """Return the pointer, encoded as JSON."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    def check(self) -> None:
        """Raise ValueError if the fields contradict each other."""
        lasts = [last for _, last in self.merged]
        fits = {
            "oldest": self.oldest <= self.version,
            "snapshot": self.snapshot is None or self.snapshot.version <= self.version,
            "merged": lasts == sorted(lasts) and all(first <= last <= self.version for first, last in self.merged),
            "older": all(version < after for version, after in pairwise((*self.older, self.oldest))),
            "snapshots": all(version < after for version, after in pairwise((*self.snapshots, self.version + 1))),
        }
        if wrong := [name for name, is_right in fits.items() if not is_right]:
            raise ValueError(f"{', '.join(wrong)}: out of order, or not possible for version {self.version}")

    def may_have(self, version: int) -> bool:
        """Return False if, according to this pointer, ``version`` was deleted from the log."""
        return version >= self.oldest or version in self.older

    def names(self, entry: Manifest) -> bool:
        """Return True if this pointer names ``entry``, with the same stream, generation, version and hash."""
        return entry.merges is None and _link(self) == (entry.stream, entry.generation, entry.version, entry.xxh3)

    def with_head(self, head: Manifest) -> Self:
        """Return a copy of this pointer that names ``head``, a newer entry of the same log."""
        newest = self.snapshot if head.stream == self.stream else None
        if head.snapshot is not None and (newest is None or head.snapshot > newest.version):
            newest = PointedSnapshot(version=head.snapshot, merged=False)
        return replace(
            self, stream=head.stream, generation=head.generation, version=head.version, xxh3=head.xxh3, snapshot=newest
        )


def read_pointer(storage: Storage) -> HeadPointer | None:
    """Read and return the pointer; None if the object is missing or malformed. Logs a malformed object once."""
    try:
        return load_pointer(storage)
    except UnreadablePointerError as error:
        _report(error)
        return None


def load_pointer(storage: Storage) -> HeadPointer | None:
    """Read and return the pointer; None if the object is missing. Raise UnreadablePointerError if it is malformed."""
    data = b""
    try:
        found = storage.read(POINTER_NAME, max_bytes=MAX_POINTER_BYTES)
        if found is None:
            return None
        data = found.tobytes()
        pointer = convert(load_json(data), HeadPointer)
        pointer.check()
    except (ValueError, RecursionError) as error:
        received = error.reason if isinstance(error, MalformedError) else _described(data)  # too large: not read
        raise UnreadablePointerError(storage.url, POINTER_NAME, received, str(error)[:_MAX_TEXT]) from None
    return pointer


def _described(data: bytes) -> str:
    """Return a description of ``data``, which was received instead of a pointer: size, kind and first bytes."""
    if not data:
        return "an empty answer"
    kind = next((f", compressed with {name}" for magic, name in _MAGIC.items() if data.startswith(magic)), "")
    if data.lstrip()[:1] == b"<":
        kind = ", an HTML or XML page"
    shown = repr(data[:_MAX_SHOWN_BYTES])[1:]
    return f"{len(data)} bytes{kind}: {shown}{'...' if len(data) > _MAX_SHOWN_BYTES else ''}"


def _report(error: UnreadablePointerError) -> None:
    if error.why not in _reported and len(_reported) < _MAX_REPORTED:
        _reported.add(error.why)
        _logger.warning("ignored malformed pointer: url=%s name=%s error=%s", error.url, error.name, error.reason)


class PointerReader(Forkable):
    """Reader that polls the pointer object and stores the newest valid pointer. Thread-safe.

    A pointer is **claimed** until the entry that it names has been read, and then **confirmed**. Fields of several
    pointers are never combined. A pointer with a lower (generation, version) is outdated and ignored. It is accepted
    only if its entry exists and the confirmed pointer's entry is missing, because the log was restored from a copy. A
    pointer of another stream is accepted only after the pointer and its entry were read again, bypassing caches. Unless
    its generation is higher, the confirmed pointer's entry must also be missing.

    Args:
        seconds: minimum time between two reads.

    Attributes:
        confirmed: newest pointer whose entry has been read; None if there is none.
        trouble: error of the last read if the object was invalid or its entry was missing; None otherwise.
    """

    def __init__(self, storage: Storage, *, seconds: float = 1.0, runtime: Runtime = REAL) -> None:
        self._storage = storage
        self._seconds = seconds
        self._runtime = runtime
        self.confirmed: HeadPointer | None = None
        self.trouble: UnreadablePointerError | StaleCacheError | None = None
        self._claimed: HeadPointer | None = None
        self._base: HeadPointer | None = None  # the confirmed pointer as it was read, before entries raised it
        # A pointer without its entry, the monotonic time of the last check, and the error to report.
        self._refused: tuple[HeadPointer, float, StaleCacheError] | None = None
        self._read_at = _NEVER  # monotonic time of the last read
        self._checked_at = _NEVER  # monotonic time of the last check of a pointer against the entries
        self._lock = threading.Lock()  # for the fields
        self._reading = threading.Lock()  # one request at a time
        protect(self)

    def after_fork_in_child(self) -> None:
        """Replace the locks, which another thread may have held at the fork."""
        self._lock, self._reading = threading.Lock(), threading.Lock()

    def newest(self, *, is_due: bool = True, past_cache: bool = False) -> HeadPointer | None:
        """Return the claimed pointer, or the confirmed pointer if no pointer is claimed; None if there is neither.

        With ``past_cache``, always reads the object and bypasses all caches. Otherwise, reads the object only if
        ``is_due`` is True and the last read was at least ``seconds`` ago.
        """
        is_awaited = past_cache or (self._claimed or self.confirmed) is None  # or for a read of another thread
        if (past_cache or (is_due and self._is_due())) and self._reading.acquire(blocking=is_awaited):
            try:
                if past_cache or self._is_due():
                    self._read(past_cache=past_cache)
            finally:
                self._reading.release()
        return self._claimed or self.confirmed

    def note_entry(self, entry: Manifest) -> None:
        """Confirm the claimed pointer if it names ``entry``, or advance the confirmed pointer if ``entry`` is newer."""
        claimed, known = self._claimed, self.confirmed
        if claimed is not None and claimed.names(entry):
            self.confirm(claimed)
            return
        if known is None or entry.stream != known.stream or entry.merges is not None:
            return
        if (entry.generation, entry.version) <= _order(known) or entry.version < known.version:
            return
        with self._lock:
            if self.confirmed is known:  # otherwise, the next entry or pointer raises it
                raised = self.confirmed = known.with_head(entry)
                if self._claimed is not None and _order(self._claimed) <= _order(raised):
                    self._claimed = None

    def confirm(self, pointer: HeadPointer) -> None:
        """Confirm ``pointer``. Call this method after its entry was read and matched the hash in the pointer."""
        with self._lock:
            known, claimed = self.confirmed, self._claimed
            if claimed is not None and _link(claimed) == _link(pointer):  # otherwise, another thread was faster
                self._claimed = None
                if known is None or (known.stream == claimed.stream and _order(known) <= _order(claimed)):
                    self.confirmed = self._base = claimed

    def refuse(self, pointer: HeadPointer, trouble: StaleCacheError) -> None:
        """Ignore ``pointer`` for at least 10 s, because a read that bypassed caches did not find the expected entry."""
        with self._lock:
            self.trouble = self.trouble or trouble
            self._refused = pointer, self._runtime.monotonic(), trouble
            if self._claimed is not None and _link(self._claimed) == _link(pointer):
                self._claimed = None

    def _is_due(self) -> bool:
        return self._runtime.monotonic() - self._read_at >= self._seconds

    def _read(self, *, past_cache: bool) -> None:
        now = self._runtime.monotonic()
        try:
            pointer = load_pointer(self._storage.uncached if past_cache else self._storage)
        except UnreadablePointerError as error:
            _report(error)
            self._read_at, self.trouble = now, without_traceback(error)
            return
        self._read_at = now
        self.trouble = trouble = None if pointer is None else self._refusal(pointer)
        if pointer is not None and trouble is None:
            self._take(pointer, is_uncached=past_cache)

    def _refusal(self, pointer: HeadPointer) -> StaleCacheError | None:
        """Return the error of a refused pointer whose entry is still missing. Requests the entry every 10 s."""
        refused = self._refused
        if refused is None or _link(refused[0]) != _link(pointer):
            return None
        now = self._runtime.monotonic()
        if now - refused[1] >= _REREAD_SECONDS:
            self._refused = pointer, now, refused[2]
            if self._has_entry(pointer):
                self._refused = None
                return None
        return refused[2]

    def _take(self, pointer: HeadPointer, *, is_uncached: bool) -> None:
        known = self.confirmed
        if known is not None and _link(known) == _link(pointer):
            self._move_to(pointer)
        elif known is None or (known.stream == pointer.stream and _order(known) <= _order(pointer)):
            with self._lock:
                self._claimed = pointer
        elif (other := self._replacement(known, pointer, is_uncached=is_uncached)) is not None:
            self._move_to(other)

    def _move_to(self, pointer: HeadPointer) -> None:
        """Replace the confirmed pointer, and drop the claimed pointer, which is older."""
        with self._lock:
            self.confirmed = self._base = pointer
            self._claimed = None

    def _replacement(self, known: HeadPointer, pointer: HeadPointer, *, is_uncached: bool) -> HeadPointer | None:
        """Return the pointer that has replaced ``known`` in the log, or None. Reads of entries bypass caches."""
        is_other = pointer.stream != known.stream
        base = self._base  # a pointer that was read before entries raised it is not lower than itself
        is_late = not is_other and base is not None and _order(pointer) >= _order(base)
        now = self._runtime.monotonic()
        if is_late or now - self._checked_at < _REREAD_SECONDS:
            return None
        self._checked_at = now
        if is_other and not is_uncached and self._storage.uncached is not self._storage:
            again = read_pointer(self._storage.uncached)
            if again is None or again.stream != pointer.stream:
                return None
            pointer = again
        is_newer = is_other and pointer.generation > known.generation
        return pointer if self._has_entry(pointer) and (is_newer or not self._has_entry(known)) else None

    def _has_entry(self, pointer: HeadPointer) -> bool:
        name = entry_name(pointer.version)
        try:
            data = self._storage.uncached.read(name, max_bytes=MAX_ENTRY_BYTES)
        except MalformedError:
            return False
        if data is None or xxhash.xxh3_128_hexdigest(data.data) != pointer.xxh3:
            return False
        try:
            return pointer.names(parse_manifest(name, data.tobytes()))
        except MalformedError:  # altered on the way to the store: the log continues after it
            return True


def _link(pointer: HeadPointer) -> tuple[str, int, int, str]:
    return pointer.stream, pointer.generation, pointer.version, pointer.xxh3


def _order(pointer: HeadPointer) -> tuple[int, int]:
    return pointer.generation, pointer.version
