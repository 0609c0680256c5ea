"""Store in a local directory (``file://``), and functions for atomic and durable writes to local files."""

import errno
import fcntl
import itertools
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from delta_tracker.errors import StorageError, UnknownOutcomeError, WriteRefusedError
from delta_tracker.stream import interruption
from delta_tracker.stream.storage.store import CHUNK_BYTES, ByteRange, Store, StoredObject, Transfer
from delta_tracker.stream.storage.url import PLAIN_NAME, is_name

T = TypeVar("T")
# Start writeback to the disk after this many bytes, which shortens the fsync at the end.
_EARLY_BYTES = 16 << 20
# Errors of a deleted file, and of a link that leads to no file, such as a circle.
_NOWHERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
_GONE = "was unmounted, deleted or replaced since it was opened"
# Non-blocking, because a named pipe must not block the reader.
_open = partial(os.open, flags=os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


class DirectoryStore(Store):
    """Store of objects as files below a directory.

    obstore is not used, because it takes 30 times as long to stream a local file. It also keeps a reference to the
    previous buffer while it requests the next one, so that the buffers would have to be copied.

    Once the directory has been found, it is identified by its device and inode numbers, and no other directory is
    written to. The directory may be a link, but its folders must not be links. If the target of a link is not mounted,
    its objects look deleted, and no file can be renamed to a target on another disk. ``create`` creates the directory
    if it is missing, and ``fsync`` flushes all writes to disk.
    """

    is_remote = False
    lists_from = False

    def __init__(self, url: str, directory: Path, *, create: bool, fsync: bool) -> None:
        self.url = url
        self.directory = directory
        self._fsync = fsync
        self._found: os.stat_result | None = None  # None until the directory is found
        self._has_written = False
        self._folders: set[str] = set()  # folders that were found to be directories
        if create:
            make_directory(directory, fsync=fsync)
        self._find()

    def read(self, span: ByteRange, transfer: Transfer) -> NDArray[np.uint8] | None:
        name = span.name
        if (descriptor := self._at(name, _open)) is None:
            return None
        try:
            status = os.fstat(descriptor)
            if stat.S_ISDIR(status.st_mode):
                return None
            if not stat.S_ISREG(status.st_mode):
                raise StorageError(self.url, f"{name} is not a regular file", "Delete it: no publisher has written it")
            transfer.modified = status.st_mtime
            data = span.memory(status.st_size)
            filled = read_into(descriptor, data.data, span.begin)
            if filled < len(data):
                raise span.too_short(span.begin + filled, span.begin + len(data))
            return data
        finally:
            os.close(descriptor)

    def stat(self, name: str) -> StoredObject | None:
        status = self._at(name, os.stat)
        if status is None or not stat.S_ISREG(status.st_mode):
            return None
        return StoredObject(name, status.st_size, status.st_mtime)

    def has_any(self, names: Sequence[str]) -> bool:
        if self._has_folder(names[0].rpartition("/")[0]):
            for name in names:
                with suppress(FileNotFoundError):
                    if stat.S_ISREG(os.stat(f"{self.directory}/{name}").st_mode):  # noqa: PTH116  called often
                        return True
        return False

    def put(self, name: str, buffers: Iterable[memoryview]) -> None:
        self._write(name, interruption.checked(buffers), overwrite=True)

    def create(self, name: str, data: bytes) -> bool:
        return self._write(name, [memoryview(data)], overwrite=False)

    def replace(self, name: str, data: bytes) -> None:
        self._write(name, [memoryview(data)], overwrite=True)

    def delete(self, name: str) -> None:
        if self._find():
            self._check()
            self._at(name, os.unlink)

    def objects(self, prefix: str, after: str) -> list[StoredObject]:
        """Return the files in the folder ``prefix``. Skips files with invalid object names; see :func:`list_files`."""
        files = self._list(prefix, after, needs_status=True)
        return [StoredObject(name, each.st_size, each.st_mtime) for name, each in files if each is not None]

    def names(self, prefix: str, after: str) -> list[str]:
        return [name for name, _ in self._list(prefix, after, needs_status=False)]

    def sync(self, prefix: str) -> None:
        self._check()
        self._has_folder(prefix)
        self._sync(prefix, f"what was created or deleted in {prefix}/")

    def delete_draft(self, name: str) -> bool:
        self._check()
        return delete_draft(self.directory / name)

    def has_directory(self, prefix: str) -> bool:
        return not self._is_gone() and self._has_folder(prefix)

    def is_same(self, other: Store) -> bool:
        if not isinstance(other, DirectoryStore):
            return False
        with suppress(FileNotFoundError, NotADirectoryError):
            return self.directory.samefile(other.directory)
        return self.directory.resolve() == other.directory.resolve()

    def reopened(self) -> Store:
        if self.directory.is_dir():
            try:
                self._check()
            except WriteRefusedError:
                return DirectoryStore(self.url, self.directory, create=False, fsync=self._fsync)
        return self

    def _list(self, prefix: str, after: str, *, needs_status: bool) -> list[tuple[str, os.stat_result | None]]:
        if not self._has_folder(prefix):
            return []
        # obstore is not used here: it fails at a strange name or link, and takes longer.
        found = list_files(self.directory, prefix, after, needs_status=needs_status)
        return [each for each in found if PLAIN_NAME.fullmatch(each[0]) or is_name(each[0])]

    def _write(self, name: str, buffers: Iterable[memoryview], *, overwrite: bool) -> bool:
        """Write a file under a temporary name and rename it once it is complete, so that no partial file is visible.

        With ``overwrite=False``, returns False if a file of this name exists. A process that is killed may leave its
        temporary file in ``drafts``, see :func:`delete_draft`.
        """
        if self._found is None and not self._find():
            raise StorageError(self.url, "the directory does not exist")
        self._check()
        folder = name.rpartition("/")[0]
        for each in ("drafts", folder):
            if not self._has_folder(each, writes=True):
                # Not parents=True: if a volume is not mounted, that would create the store on another disk.
                for path in (*reversed(list(Path(each).parents)[:-1]), Path(each)):
                    (self.directory / path).mkdir(exist_ok=True)
        target, draft = self.directory / name, self.directory / "drafts" / secrets.token_hex(8)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            try:
                lock(descriptor)
                self._fill(descriptor, buffers)
            finally:
                os.close(descriptor)
            self._check()
            self._has_written = True
            if overwrite:
                draft.replace(target)
            else:
                target.hardlink_to(draft)
        except FileExistsError:
            if overwrite or target.is_dir():
                raise
            return False
        finally:
            draft.unlink(missing_ok=True)
        self._sync(folder, name)
        return True

    def _fill(self, descriptor: int, buffers: Iterable[memoryview]) -> None:
        """Write a new file. If ``fsync`` is set, flush its bytes to disk; :func:`sync_names` flushes its name."""
        begin = end = 0
        for buffer in buffers:
            rest = memoryview(buffer).cast("B")
            while rest:
                # Writes that end at multiples of this size let a file system use large pages.
                written = os.write(descriptor, rest[: CHUNK_BYTES - end % CHUNK_BYTES])
                rest = rest[written:]
                end += written
                if self._fsync and end - begin >= _EARLY_BYTES:
                    # Linux then starts to write the dirty pages without waiting. It drops only clean pages.
                    os.posix_fadvise(descriptor, begin, end - begin, os.POSIX_FADV_DONTNEED)
                    begin = end
        if self._fsync:
            os.fsync(descriptor)
            # Date the file after a long flush: a reader that saw no such file looked before its modification time. If a
            # power loss undoes the date, which is not flushed, only ages are wrong.
            os.utime(descriptor)

    def _at(self, name: str, call: Callable[[str], T]) -> T | None:
        folder = name.rpartition("/")[0]
        if folder not in self._folders and not self._has_folder(folder):
            return None
        try:
            return call(f"{self.directory}/{name}")
        except OSError as error:
            if self._has_folder(folder) and error.errno not in (errno.ENOENT, errno.ENOTDIR):
                raise
            return None

    def _has_folder(self, folder: str, *, writes: bool = False) -> bool:
        """Return True if a folder of the store exists. Raise StorageError if part of its path is not a directory."""
        if self._found is None and not self._find():
            return False
        end = 0
        while end >= 0:
            end = folder.find("/", end + 1)
            name = folder if end < 0 else folder[:end]
            path = f"{self.directory}/{name}"
            try:
                status = os.lstat(path)
            except (FileNotFoundError, NotADirectoryError):
                if self._find() and self._is_gone():
                    raise StorageError(self.url, f"its directory {_GONE}", "Mount its volume and try again") from None
                return False
            if not stat.S_ISDIR(status.st_mode):
                found = _no_directory(name, path, status)
                if writes:
                    raise WriteRefusedError(self.url, *found)
                raise StorageError(self.url, *found)
        self._folders.add(folder)
        return True

    def _find(self) -> bool:
        """Return True if the directory exists, or existed before."""
        try:
            status = self.directory.stat()
        except (FileNotFoundError, NotADirectoryError):
            return self._found is not None
        if not stat.S_ISDIR(status.st_mode):
            raise StorageError(self.url, "it is a file instead of a directory")
        self._found = self._found or status
        return True

    def _is_gone(self) -> bool:
        """Return True if the directory had folders, and is now missing or replaced by one without these folders."""
        if not self._folders or any(os.path.isdir(f"{self.directory}/{each}") for each in self._folders):  # noqa: PTH112
            return False
        with suppress(FileNotFoundError, NotADirectoryError):
            return not os.path.samestat(self.directory.stat(), cast("os.stat_result", self._found))
        return True

    def _check(self) -> None:
        """Check that the directory was not replaced since it was found, and has not lost its objects."""
        if self._found is None:
            return
        with suppress(FileNotFoundError, NotADirectoryError):
            if os.path.samestat(self.directory.stat(), self._found) and (
                # A new directory may have the inode number of a deleted one, but is empty.
                not self._has_written
                or (self.directory / "drafts").is_dir()  # cheaper than a listing
                or any(self.directory.iterdir())
            ):
                return
        remedy = "Mount its volume and try again; if the directory is the right one, build a new Publisher from the url"
        raise WriteRefusedError(self.url, f"its directory {_GONE}", remedy)

    def _sync(self, prefix: str, name: str) -> None:
        if not self._fsync:
            return
        try:
            sync_names(self.directory, prefix)
        except OSError as error:
            raise UnknownOutcomeError(self.url, name, f"{type(error).__name__}: {error}", prefix or ".") from error


def _no_directory(name: str, path: str, status: os.stat_result) -> tuple[str, str]:
    if stat.S_ISLNK(status.st_mode):
        reason = f"{name} is a link to {os.readlink(path)!r} instead of a directory"  # noqa: PTH115  keeps the text
        return reason, "Replace it by the directory itself; only the directory of the whole stream may be a link"
    what = f"file of {status.st_size} bytes" if stat.S_ISREG(status.st_mode) else "special file"
    reason = f"{name} is a {what} instead of a directory"
    return reason, "Move it away and restore the directory, for example from a mirror; or correct the url"


# Files of a store


def sync_names(directory: Path, name: str) -> None:
    """Flush to disk the creations and deletions of files in the folder ``name`` and in the folders above it."""
    for path in (Path(name), *Path(name).parents):
        try:
            descriptor = os.open(directory / path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def delete_draft(draft: Path) -> bool:
    """Delete a temporary file of a write, unless a process on any host is still writing it.

    On a file system without locks, deletes the file even if it is being written, so that the write fails. Returns False
    if the file is being written, does not exist or cannot be opened for reading.
    """
    try:
        descriptor = os.open(draft, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return False
    try:
        # Shared, because NFS grants an exclusive lock only to a file opened for writing.
        if not lock(descriptor, fcntl.LOCK_SH):
            return False
        draft.unlink(missing_ok=True)
        return True
    finally:
        os.close(descriptor)


def read_into(descriptor: int, memory: memoryview, begin: int) -> int:
    """Fill ``memory`` with the bytes of a file, starting at ``begin``. Return the number of bytes read."""
    filled = 0
    while filled < len(memory):
        interruption.check()
        count = os.preadv(descriptor, [memory[filled : filled + CHUNK_BYTES]], begin + filled)
        if count == 0:
            break
        filled += count
    return filled


def make_directory(directory: Path, *, fsync: bool) -> None:
    """Create a directory and its parents if they do not exist. With ``fsync``, flush their names to disk."""
    missing = list(itertools.takewhile(lambda path: not path.exists(), (directory, *directory.parents)))
    lowest = missing[-1].parent if missing else directory
    # Flush each name before the next directory is created: if a directory exists, the names above it are on disk. Its
    # own name may not be, if the process that created it was killed.
    if fsync and not lowest.is_mount():  # a mount point was not created here
        _sync_name(lowest)
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        if fsync:
            _sync_name(path)


def list_files(
    directory: Path, prefix: str, after: str, *, needs_status: bool
) -> list[tuple[str, os.stat_result | None]]:
    """Return the path and status of each regular file in the folder ``prefix`` of a store, in any order.

    The paths are relative to ``directory``, and greater than ``after``. If ``needs_status`` is False, the status may be
    None. The call is then faster, because most systems list names without a status.

    Follows links to files. Skips directories, pipes, broken links, and files that are deleted during the call. The
    result is empty if ``prefix`` does not exist. Raises OSError if the listing would be incomplete.
    """
    try:
        scanned = os.scandir(f"{directory}/{prefix}")
    except (FileNotFoundError, NotADirectoryError):
        return []
    found: list[tuple[str, os.stat_result | None]] = []
    with scanned as entries:
        for entry in entries:
            name = f"{prefix}/{entry.name}"
            if name <= after:
                continue
            if not needs_status and entry.is_file(follow_symlinks=False):
                found.append((name, None))
            elif (status := _status(entry)) is not None and stat.S_ISREG(status.st_mode):
                found.append((name, status))
    return found


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    """Return the status of a directory entry; None if it was deleted, or is a link that cannot be followed."""
    try:
        return entry.stat()
    except OSError as error:
        if error.errno in _NOWHERE or (isinstance(error, PermissionError) and entry.is_symlink()):
            return None
        raise


def lock(file: int | IO[str], kind: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file until it is closed. Return False if another descriptor holds a conflicting lock."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:  # other errors: the file system has no locks
        return not isinstance(error, BlockingIOError)
    return True


def _sync_name(path: Path) -> None:
    """Flush the name of a directory to disk. If its parent is not readable, flush all disks, which may be slow."""
    try:
        sync_names(path.parent, ".")
    except PermissionError:
        os.sync()
