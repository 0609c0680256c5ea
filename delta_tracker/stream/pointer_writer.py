"""Background writer of the pointer object: :class:`PointerWriter`."""

import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from delta_tracker.errors import MalformedError
from delta_tracker.stream.format.manifest import Manifest, Merged
from delta_tracker.stream.interruption import Interrupted, interruptible
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.pointer import MAX_POINTED, POINTER_NAME, HeadPointer, PointedSnapshot, read_pointer
from delta_tracker.stream.reading.runtime import REAL, Runtime
from delta_tracker.stream.storage.storage import Storage

_logger = logging.getLogger(__name__)
POINTER_SECONDS = 1.0  # between two writes, unless the publisher or mirror sets another time
SCAN_SECONDS = 600.0  # between two listings
_MAX_PAUSE_SECONDS = 30.0  # between two attempts while the store fails
_NEVER = float("-inf")
_CLOSE_SECONDS = 2.0  # for the last write, of which the last quarter is for its interruption


class PointerWriter:
    """Background writer of the pointer object. Failures are logged and retried, but never raised to the publisher.

    The first call of :meth:`after` starts a thread. The thread writes the newest head at most once per ``seconds``, and
    only after a change. At the start, after :meth:`rescan` and every ten minutes, it lists the log first, to find newer
    entries of other publishers.
    """

    def __init__(self, storage: Storage, *, seconds: float = POINTER_SECONDS, runtime: Runtime = REAL) -> None:
        self._log = StreamLog(storage, runtime)
        self._runtime = runtime
        self._seconds = seconds
        self._head: Manifest | None = None
        self._scan: HeadPointer | None = None  # the last listing, for the head at that time
        self._scanned_at = _NEVER  # monotonic time at which it began; to repeat it, never
        self._written: HeadPointer | None = None  # with a time of 0
        self._num_failures = 0  # consecutive ones
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._abort = threading.Event()
        self._writing = threading.Lock()

    def after(self, head: Manifest) -> None:
        """Request a write of the pointer to the committed entry ``head``. Never blocks or raises.

        If ``head`` is the entry of the previous call, the thread lists the log first, to find later entries.
        """
        last = self._head
        if last is not None and (head.generation != last.generation or head.version == last.version):
            self._scanned_at = _NEVER  # an entry before this claim may be missing, or one after this head
        self._head = head
        self._wake.set()
        if self._thread is None:
            # A daemon: a write that hangs must not keep the process from ending. Nothing depends on the pointer.
            thread = self._runtime.thread(target=self._run, name="head-pointer", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the system cannot start a thread, or the interpreter shuts down
                self._failed(error)
            else:
                self._thread = thread

    def rescan(self) -> None:
        """Make the next write list the log first. Call this method after entries were deleted or merged."""
        self._scanned_at = _NEVER
        self._wake.set()

    def write_now(self, head: Manifest | None = None) -> None:
        """Write a pointer to ``head``, by default the last entry passed to :meth:`after`. No-op if it is current."""
        with self._writing:
            self._head = self._head if head is None else head
            if self._head is None:
                return
            now = self._runtime.monotonic()
            if self._scan is None or now - self._scanned_at >= SCAN_SECONDS:
                self._scanned_at = now  # first: a call of rescan() during the listing counts
                try:
                    self._scan = self._scanned()
                except BaseException:
                    self._scanned_at = _NEVER
                    raise
            pointer = self._scan if self._head.version <= self._scan.version else self._scan.with_head(self._head)
            if pointer != self._written:
                self._log.storage.replace(POINTER_NAME, replace(pointer, time=time.time()).to_json())
                self._written = pointer

    def end(self) -> None:
        """Ask the thread to write a pointer to the newest head, and then to exit. Does not wait."""
        self._stop.set()
        self._wake.set()

    def close(self) -> None:
        """Write the newest head, and end the thread. Waits two seconds at most; a longer write is interrupted."""
        self.end()
        if self._thread is not None:
            self._thread.join(0.75 * _CLOSE_SECONDS)
            self._abort.set()
            self._thread.join(0.25 * _CLOSE_SECONDS)

    def _run(self) -> None:
        with suppress(Interrupted), interruptible(self._abort):
            while not self._stop.is_set():
                self._runtime.wait(self._wake, SCAN_SECONDS)
                self._wake.clear()
                self._try_to_write()
                pause = min(self._seconds * 2**self._num_failures, max(self._seconds, _MAX_PAUSE_SECONDS))
                self._runtime.wait(self._stop, pause)
            self._try_to_write()

    def _try_to_write(self) -> None:
        try:
            self.write_now()
        except Exception as error:  # noqa: BLE001  the pointer is a hint: a failure is logged, and retried
            self._failed(error)
            self._wake.set()
        else:
            if self._num_failures:
                _logger.warning("the pointer is written again: url=%s", self._log.storage.url)
            self._num_failures = 0

    def _scanned(self) -> HeadPointer:
        versions, merged = self._log.versions(), self._log.merged()
        head = self._head
        assert head is not None, "checked by write_now()"
        if versions and versions[-1] > head.version:  # by another publisher, which has fenced this one
            try:
                head = self._log.read(versions[-1]) or head
            except MalformedError as error:
                _logger.warning("the pointer stays at version %d: %s", head.version, error)
        found = read_pointer(self._log.storage)
        if found is None or replace(found, time=0.0) != self._written:
            self._written = None  # deleted, or replaced by another publisher
        deltas = uncovered_deltas(each for each in merged if each.last <= head.version)
        snapshots = [each.last for each in merged if each.kind == "snapshot" and each.last <= head.version]
        oldest = _oldest(versions, head.version)
        return HeadPointer(
            stream=head.stream,
            generation=head.generation,
            version=head.version,
            xxh3=head.xxh3,
            oldest=oldest,
            snapshot=self._snapshot(head, versions, merged),
            merged=tuple((each.first, each.last) for each in deltas[-MAX_POINTED:]),
            time=0.0,
            older=tuple(versions[: bisect_left(versions, oldest)][-MAX_POINTED:]),
            snapshots=tuple(snapshots[-MAX_POINTED:]),
        )

    def _snapshot(self, head: Manifest, versions: list[int], merged: list[Merged]) -> PointedSnapshot | None:
        in_log = -1 if head.snapshot is None or head.snapshot < min(versions, default=0) else head.snapshot
        for each in reversed(merged):
            if each.kind != "snapshot" or not in_log < each.last <= head.version:
                continue
            try:
                manifest = self._log.read_merged(each)
            except MalformedError as error:
                _logger.warning("left a malformed merged snapshot out of the pointer: %s", error)
                continue
            if manifest is not None and manifest.stream == head.stream:
                return PointedSnapshot(version=each.last, merged=True)
        return PointedSnapshot(version=in_log, merged=False) if in_log >= 0 else None

    def _failed(self, error: Exception) -> None:
        if not self._num_failures:
            url = self._log.storage.url
            _logger.warning("the pointer was not written, which is repeated: url=%s error=%s", url, error)
        self._num_failures = min(self._num_failures + 1, 10)


def _oldest(versions: list[int], head: int) -> int:
    """Return the lowest version from which on the ascending ``versions`` have no gap up to ``head``."""
    # The publisher may have committed versions without a gap after the listing.
    oldest, present = min([head, *versions[-1:]]), set(versions)
    while oldest - 1 in present:
        oldest -= 1
    return oldest


def uncovered_deltas(merged: Iterable[Merged]) -> list[Merged]:
    """Return the merged deltas that no other merged delta covers, ascending."""
    found: list[Merged] = []
    for each in sorted(merged, key=lambda each: (-each.last, each.first)):
        if each.kind == "delta" and not any(other.first <= each.first for other in found):
            found.append(each)
    return found[::-1]
