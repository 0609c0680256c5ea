"""Atomic and durable writes to local files.

This module does not use obstore, which is no faster. obstore also keeps a reference to the previous buffer while it
requests the next one, so the buffers would have to be copied.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

from delta_tracker.stream import interruption

# Large enough for a negligible cost per chunk, small enough to stay in the cache while it is copied.
CHUNK_BYTES = 4 << 20
# Start writeback to the disk after this many bytes, which shortens the fsync at the end.
_EARLY_BYTES = 16 << 20
# Errors of a deleted file, and of a link that leads to no file, such as a circle.
_NOWHERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


def write_file(
    directory: Path,
    name: str,
    buffers: Iterable[memoryview],
    *,
    overwrite: bool,
    fsync: bool,
    check: Callable[[], None] = lambda: None,
) -> bool:
    """Write a file under a temporary name and rename it once it is complete, so that no partial file is visible.

    A process that is killed may leave its temporary file in the subdirectory ``drafts``, see :func:`delete_draft`.

    Args:
        directory: directory of the store, with a subdirectory ``drafts``.
        name: path of the file, relative to ``directory``; its folder must exist.
        buffers: contents of the file.
        overwrite: True to replace an existing file of this name; if False and it exists, the result is False.
        fsync: True to flush the bytes to disk before the file is renamed. :func:`sync_names` flushes the new name.
        check: called before the file is renamed; raises an error if ``directory`` was replaced. If it is replaced
            later, the renaming fails, because the new directory lacks the temporary file.
    """
    target = directory / name
    draft = directory / "drafts" / secrets.token_hex(8)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            lock(descriptor)
            begin = end = 0
            for buffer in buffers:
                rest = memoryview(buffer).cast("B")
                while rest:
                    # Writes that end at multiples of this size let a file system use large pages.
                    written = os.write(descriptor, rest[: CHUNK_BYTES - end % CHUNK_BYTES])
                    rest = rest[written:]
                    end += written
                    if fsync and end - begin >= _EARLY_BYTES:
                        # Linux then starts to write the dirty pages without waiting. It drops only clean pages.
                        os.posix_fadvise(descriptor, begin, end - begin, os.POSIX_FADV_DONTNEED)
                        begin = end
            if fsync:
                os.fsync(descriptor)
                # Date the file after a long flush: a reader that saw no such file looked before its modification time.
                # If a power loss undoes the date, which is not flushed, only ages are wrong.
                os.utime(descriptor)
        finally:
            os.close(descriptor)
        check()
        if overwrite:
            draft.replace(target)
            return True
        try:
            target.hardlink_to(draft)
        except FileExistsError:
            if target.is_dir():
                raise
            return False
        return True
    finally:
        draft.unlink(missing_ok=True)


def sync_names(directory: Path, name: str) -> None:
    """Flush the names in the directory ``name`` of the store, and those above it, to disk; also deletions."""
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
    """Delete a temporary file of :func:`write_file`, unless a running process of any host is writing it.

    On a file system without locks, the file is deleted even if it is being written; the write then fails. Returns False
    if it is being written, does not exist or cannot be opened for reading.
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
    """Fill ``memory`` with the bytes of a file from ``begin`` on. Return the number of bytes, less if the file ends."""
    filled = 0
    while filled < len(memory):
        interruption.check()
        count = os.preadv(descriptor, [memory[filled : filled + CHUNK_BYTES]], begin + filled)
        if count == 0:
            break
        filled += count
    return filled


def make_directory(directory: Path, *, fsync: bool) -> None:
    """Create a directory and its parents if they do not exist. With ``fsync``, their names are on disk then."""
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
    """Return the regular files below the directory ``prefix`` of a store, in no order, and only paths after ``after``.

    The paths are relative to ``directory``. Unless ``needs_status``, the status may be None, which is faster, because
    most systems return none with a name.

    Reads each directory at most once. Follows links to files. Skips links to directories, links that lead nowhere,
    pipes, unreadable subdirectories, and files that are deleted meanwhile. The result is empty if ``prefix`` does not
    exist. Other failures raise OSError: if an entry of the log was missing from the result, the one before it would
    look like the head.
    """
    root = os.fspath(directory)
    found: list[tuple[str, os.stat_result | None]] = []
    seen: set[tuple[int, int]] = set()  # a bind mount may repeat a directory
    with suppress(FileNotFoundError, NotADirectoryError):
        seen.add(identity((directory / prefix).stat()))
    waiting = [prefix]
    while waiting:
        folder = waiting.pop()
        may_fail = folder != prefix
        for entry in _entries(f"{root}/{folder}", may_fail=may_fail):
            name = f"{folder}/{entry.name}"
            if (name <= after or not needs_status) and entry.is_file(follow_symlinks=False):
                if name > after:
                    found.append((name, None))
            elif (status := _status(entry, may_fail=may_fail)) is None:
                continue
            elif stat.S_ISREG(status.st_mode):
                if name > after:
                    found.append((name, status))
            elif stat.S_ISDIR(status.st_mode) and not entry.is_symlink() and identity(status) not in seen:
                seen.add(identity(status))
                waiting.append(name)
    return found


def _entries(folder: str, *, may_fail: bool) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of a directory; none if it is missing or, with ``may_fail``, if it must not be read."""
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except (FileNotFoundError, NotADirectoryError):
        return
    except PermissionError:
        if not may_fail:
            raise


def _status(entry: os.DirEntry[str], *, may_fail: bool) -> os.stat_result | None:
    """Return an entry's status; None if deleted, a link to nowhere, or unreadable and a link or ``may_fail``."""
    try:
        return entry.stat()
    except PermissionError:
        if may_fail or entry.is_symlink():
            return None
        raise
    except OSError as error:
        if error.errno in _NOWHERE:
            return None
        raise


def identity(status: os.stat_result) -> tuple[int, int]:
    """Return the device and inode numbers of a file or directory, which identify it while it exists."""
    return status.st_dev, status.st_ino


def pieces(buffers: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yield the bytes of ``buffers`` as views that end at multiples of ``CHUNK_BYTES`` and at the end of each buffer.

    This alignment to the start of the first buffer lets a file system use large pages.
    """
    position = 0
    for buffer in buffers:
        rest = memoryview(buffer).cast("B")
        while rest:
            piece = rest[: CHUNK_BYTES - position % CHUNK_BYTES]
            yield piece
            position += len(piece)
            rest = rest[len(piece) :]


def make_folder(directory: Path, folder: str) -> None:
    """Create a missing folder in the directory of a store, which must exist."""
    # Not parents=True: if a volume is not mounted, that would create the store on another disk.
    path = Path(folder)
    for each in (*reversed(list(path.parents)[:-1]), path):
        (directory / each).mkdir(exist_ok=True)


def lock(file: int | IO[str], kind: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file until it is closed. Return False if another descriptor has a conflicting lock."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:  # other errors: the file system has no locks
        return not isinstance(error, BlockingIOError)
    return True


def _sync_name(path: Path) -> None:
    """Flush the name of a directory to disk. If its parent is not readable, flush everything, which may be slow."""
    try:
        sync_names(path.parent, ".")
    except PermissionError:
        os.sync()
