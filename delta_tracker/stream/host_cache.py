"""Cache of parts in a directory that the predictors of one host share.

The directory contains complete files ``objects/{key}``, and files ``drafts/{key}`` that are being fetched. The key
consists of the hash, size and body in the part's record, so that streams can share equal parts. A file in ``objects``
never changes: it is renamed into place after it was verified, and unlinked when it is evicted or damaged.
"""

import errno
import fcntl
import logging
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from delta_tracker.arguments import check_count, check_path, is_number
from delta_tracker.errors import CorruptPartError, InvalidArgumentError, StorageError
from delta_tracker.stream.format.digests import PIECE_BYTES
from delta_tracker.stream.format.manifest import Manifest, Part
from delta_tracker.stream.format.object_reader import check_size, checked_pieces
from delta_tracker.stream.format.parse import reason_of
from delta_tracker.stream.interruption import check
from delta_tracker.stream.storage.directory import delete_draft, list_files, lock, read_into
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.stream.storage.store import ByteRange, Store, StoredObject, Transfer

_logger = logging.getLogger(__name__)
_WAIT_SECONDS = 0.01  # between two looks at the file that another process fetches
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class HostCache:
    """Directory in which the processes of one host share parts. Each part is fetched from the store only once.

    Each process verifies every part before use. Thread-safe.

    Args:
        directory: directory of the cache on a local file system; created with mode 0700 if it is missing.
        max_bytes: maximum size of the cache in bytes. The least recently used parts are deleted first. Parts that are
            larger than ``max_bytes`` bypass the cache.
        patience_seconds: time to wait for a process that fetches a part without progress, before bypassing the cache.

    Attributes:
        counts: numbers of parts: ``hits`` were read from the cache, ``misses`` were fetched into the cache, and
            ``bypasses`` were read without the cache.

    Raises:
        InvalidArgumentError: if ``max_bytes`` is below 1, if ``patience_seconds`` is not positive and finite, or if the
            directory cannot be created, belongs to another user, can be written by others, or is on a file system
            without locks.
    """

    def __init__(self, directory: str | Path, *, max_bytes: int = 32 << 30, patience_seconds: float = 10.0) -> None:
        check_count("max_bytes", max_bytes)
        if not (is_number(patience_seconds) and patience_seconds > 0):
            raise InvalidArgumentError("patience_seconds", patience_seconds, "Pass a positive number of seconds")
        self._directory = check_path("cache", directory).absolute()
        self._max_bytes = max_bytes
        self._patience_seconds = patience_seconds
        self.counts = {"hits": 0, "misses": 0, "bypasses": 0}
        self._is_broken = False
        try:
            self._prepare()
        except OSError as error:
            remedy = f"Pass a directory on a local file system that only this user can write to: {reason_of(error)}"
            raise InvalidArgumentError("cache", str(directory), remedy) from error

    def over(self, storage: Storage, manifest: Manifest) -> Storage:
        """Return a read-only view of ``storage`` that reads the parts of one version through the cache.

        The view keeps the files of its parts open, so that an eviction does not affect a version being applied.
        """
        return Storage.over(CachedStore(storage, self, manifest.parts), storage)

    def open(self, storage: Storage, part: Part) -> int | None:
        """Return a file descriptor of a verified copy of a part. Fetches the part from ``storage`` if it is not cached.

        The caller must close the descriptor. Returns None if the part does not fit, the disk is full, the directory
        cannot be accessed, or the fetching process makes no progress. Then read the part from ``storage``. Raises
        CorruptPartError, and caches nothing, if the part in ``storage`` does not match its record.
        """
        if part.num_bytes > self._max_bytes:
            self.counts["bypasses"] += 1
            return None
        try:
            descriptor = self._found(storage, part)
        except StorageError:
            raise
        except OSError as error:
            # The cache saves requests; without it, the predictor still gets its versions.
            if not self._is_broken:
                _logger.warning("read past the host cache: directory=%s error=%s", self._directory, reason_of(error))
            self._is_broken = True
            self.counts["bypasses"] += 1
            return None
        self._is_broken = False
        return descriptor

    def _found(self, storage: Storage, part: Part) -> int | None:
        seen: tuple[int, float] | None = None  # modification time of the draft, and when it was seen first
        while True:
            check()
            if (descriptor := self._hit(part)) is not None:
                self.counts["hits"] += 1
                return descriptor
            if (draft := self._lock_draft(part)) is not None:
                return self._fetch(storage, part, draft)
            progress, now = self._progress(part), time.monotonic()
            if seen is None or seen[0] != progress:
                seen = progress, now
            elif now - seen[1] > self._patience_seconds:
                self.counts["bypasses"] += 1
                return None
            time.sleep(_WAIT_SECONDS)

    def _fetch(self, storage: Storage, part: Part, draft: int) -> int | None:
        """Fetch a part into its locked draft, verify the draft, and rename it. Return the result of :meth:`open`."""
        with ExitStack() as stack:
            stack.callback(os.close, draft)
            stack.callback(self._drop, part)
            # Another process may have completed the file between the look for it and the lock.
            descriptor = self._hit(part)
            if descriptor is not None or not self._make_room(part, draft):
                self.counts["bypasses" if descriptor is None else "hits"] += 1
                return descriptor
            self._download(storage, part, draft)
            self._draft(part).rename(self._object(part))
            stack.pop_all()
        self.counts["misses"] += 1
        return draft

    def _download(self, storage: Storage, part: Part, draft: int) -> None:
        def read(begin: int, end: int) -> NDArray[np.uint8] | None:
            check()
            try:
                data = storage.read_range(part.name, begin, end)
            except StorageError:
                # A reader over http reads a part that is short in a cache past the cache.
                check_size(part, storage.size(part.name), storage)
                raise
            if data is None:
                check_size(part, None, storage)
            return data

        with os.fdopen(draft, "wb", closefd=False) as file:
            for piece in checked_pieces(read, part):
                file.write(piece.data)

    def _drop(self, part: Part) -> None:
        with suppress(OSError):
            self._draft(part).unlink(missing_ok=True)

    def _hit(self, part: Part) -> int | None:
        """Return a descriptor of the complete file of a part; None if the file is missing. Unlinks a damaged file."""
        path = self._object(part)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        with ExitStack() as stack:
            stack.callback(os.close, descriptor)
            if _is_right(descriptor, part):
                os.utime(descriptor)
                stack.pop_all()
                return descriptor
            with suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(descriptor)):  # not a newer file of that name
                    path.unlink()
        return None

    def _lock_draft(self, part: Part) -> int | None:
        """Return a descriptor of the locked draft of a part; None if another process has locked it."""
        path = self._draft(part)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with ExitStack() as stack, suppress(FileNotFoundError):
            stack.callback(os.close, descriptor)
            # The process that held the lock may have renamed or deleted the file in the meantime.
            if lock(descriptor) and os.path.samestat(path.stat(), os.fstat(descriptor)):
                stack.pop_all()
                return descriptor
        return None

    def _progress(self, part: Part) -> int:
        """Return the time of the last write to a part's draft in nanoseconds; 0 if there is no draft."""
        with suppress(FileNotFoundError):
            return self._draft(part).stat().st_mtime_ns
        return 0

    def _make_room(self, part: Part, draft: int) -> bool:
        """Reserve the size and the disk space of a part within ``max_bytes``. Return False if the part does not fit."""
        with self._locked() as is_locked:
            if not is_locked or not self._evict(part):
                return False
            os.ftruncate(draft, part.num_bytes)  # counts for other processes once the lock is released
        if _is_allocated(draft, part.num_bytes):
            return True
        with self._locked() as is_locked:
            for name, _ in self._files("objects") if is_locked else ():
                (self._directory / name).unlink(missing_ok=True)
        return _is_allocated(draft, part.num_bytes)

    def _evict(self, part: Part) -> bool:
        """Delete drafts of dead processes, and the least recently used files until ``part`` fits into ``max_bytes``.

        Returns False if the drafts of other parts leave too little space. The directory must be locked.
        """
        num_bytes = self._max_bytes - part.num_bytes
        for name, status in self._files("drafts"):
            if name != f"drafts/{_key(part)}" and not delete_draft(self._directory / name):  # it is being written
                num_bytes -= status.st_size
        if num_bytes < 0:
            return False
        objects = sorted(self._files("objects"), key=lambda item: item[1].st_mtime)
        total = sum(status.st_size for _, status in objects)
        for name, status in objects:
            if total <= num_bytes:
                break
            (self._directory / name).unlink(missing_ok=True)
            total -= status.st_size
        return True

    def _files(self, folder: str) -> list[tuple[str, os.stat_result]]:
        found = list_files(self._directory, folder, "", needs_status=True)
        return [(name, status) for name, status in found if status is not None]

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        """Context manager that locks the directory. Yields False if another process does not release the lock."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._directory / "lock", flags, 0o600)
        deadline = time.monotonic() + self._patience_seconds
        try:
            while not (is_locked := lock(descriptor)) and time.monotonic() < deadline:
                check()
                time.sleep(_WAIT_SECONDS)
            yield is_locked
        finally:
            # A process that was forked meanwhile has the descriptor too, so that closing it does not release the lock.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _object(self, part: Part) -> Path:
        return self._directory / "objects" / _key(part)

    def _draft(self, part: Part) -> Path:
        return self._directory / "drafts" / _key(part)

    def _prepare(self) -> None:
        for path in (self._directory, self._directory / "objects", self._directory / "drafts"):
            path.mkdir(mode=0o700, parents=path == self._directory, exist_ok=True)
            status = path.stat()
            if status.st_uid != os.geteuid() or status.st_mode & _OTHERS:
                raise PermissionError(f"{path} belongs to another user, or others can write to it")
        path = self._directory / "lock"
        with path.open("a") as first, path.open("a") as second:
            has_locks = not (lock(first) and lock(second))  # another process may hold the lock
            fcntl.flock(first, fcntl.LOCK_UN)
        if not has_locks:
            raise OSError("its file system has no locks")


class CachedStore(Store):
    """Read-only store that reads the parts of one version from a host cache, and all other objects from ``origin``."""

    is_read_only = True

    def __init__(self, origin: Storage, cache: HostCache, parts: Sequence[Part]) -> None:
        self.url = origin.url
        self._origin = origin
        self._cache = cache
        self._parts = {part.name: part for part in parts}
        self._opened: dict[str, int | None] = {}
        self._files = ExitStack()
        finalize(self, self._files.close)

    def read(self, span: ByteRange, transfer: Transfer) -> NDArray[np.uint8] | None:
        """Read from the cached copy of a part, or from ``origin`` without one; see :meth:`Store.read`."""
        descriptor = self._descriptor(span.name)
        if descriptor is None or (span.end or 0) > self._parts[span.name].num_bytes:
            return self._origin.read_span(span, transfer)
        try:
            return _read(descriptor, span.memory(self._parts[span.name].num_bytes), span.begin)
        except OSError as error:
            reason = f"{span.name} cannot be read from the host cache: {reason_of(error)}"
            raise StorageError(self.url, reason) from error

    def stat(self, name: str) -> StoredObject | None:
        """Return the size and modification time (0 for a cached part) of an object; None if it does not exist."""
        if self._descriptor(name) is None:
            return self._origin.stat(name)
        return StoredObject(name, self._parts[name].num_bytes, 0.0)

    def _descriptor(self, name: str) -> int | None:
        if name not in self._parts:
            return None
        if name not in self._opened:
            self._opened[name] = descriptor = self._cache.open(self._origin, self._parts[name])
            if descriptor is not None:
                self._files.callback(os.close, descriptor)
        return self._opened[name]


def _key(part: Part) -> str:
    return f"{part.xxh3}-{part.num_bytes}-{part.body}"


def _is_allocated(descriptor: int, num_bytes: int) -> bool:
    """Allocate the disk space of a file; return False if the disk or the user's quota is full."""
    try:
        if num_bytes:
            os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return False
    return True


def _read(descriptor: int, memory: NDArray[np.uint8], begin: int) -> NDArray[np.uint8]:
    if (filled := read_into(descriptor, memory.data, begin)) < len(memory):
        raise OSError(f"the file ended after {begin + filled} bytes")
    return memory


def _is_right(descriptor: int, part: Part) -> bool:
    if os.fstat(descriptor).st_size != part.num_bytes:
        return False
    buffer = np.empty(min(PIECE_BYTES, part.num_bytes), dtype=np.uint8)
    try:
        for _ in checked_pieces(lambda begin, end: _read(descriptor, buffer[: end - begin], begin), part):
            pass
    except CorruptPartError:
        return False
    return True
