"""Store in a local directory, at ``file://``."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from delta_tracker.errors import StorageError, UnknownOutcomeError, WriteRefusedError
from delta_tracker.stream.interruption import checked
from delta_tracker.stream.storage.local import (
    delete_draft,
    list_files,
    make_directory,
    make_folder,
    read_into,
    sync_names,
    write_file,
)
from delta_tracker.stream.storage.store import Span, Store, StoredObject, Transfer
from delta_tracker.stream.storage.url import PLAIN_NAME, is_name

T = TypeVar("T")
# Non-blocking, because a named pipe must not block the reader.
_open = partial(os.open, flags=os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


class DirectoryStore(Store):
    """Files below a directory. obstore is not used: its stream of a local file takes 30 times as long.

    Once the directory was found, only this directory is written to: it is identified by its device and inode numbers.
    It may be a link, but the folders in it may not: what a link leads to can be missing or on another disk, where its
    objects look deleted and a file cannot be renamed to. ``create`` creates the directory if it is missing, and
    ``fsync`` flushes all writes to disk.
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

    def read(self, span: Span, transfer: Transfer | None) -> NDArray[np.uint8] | None:
        name = span.name
        if (descriptor := self._at(name, _open)) is None:
            return None
        try:
            status = os.fstat(descriptor)
            if stat.S_ISDIR(status.st_mode):
                return None
            if not stat.S_ISREG(status.st_mode):
                raise StorageError(self.url, f"{name} is not a regular file", "Delete it: no publisher has written it")
            if transfer is not None:
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

    def put(self, name: str, buffers: Iterable[memoryview]) -> None:
        self._write(name, checked(buffers), overwrite=True)

    def create(self, name: str, data: bytes) -> bool:
        return self._write(name, [memoryview(data)], overwrite=False)

    def replace(self, name: str, data: bytes) -> None:
        self._write(name, [memoryview(data)], overwrite=True)

    def delete(self, name: str) -> None:
        if self._find():
            self._check()
            self._at(name, os.unlink)

    def objects(self, prefix: str, after: str) -> list[StoredObject]:
        """Skips files whose names no method accepts, see also :func:`list_files`."""
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
        return self._has_folder(prefix)

    def is_same(self, other: Store) -> bool:
        if not isinstance(other, DirectoryStore):
            return False
        try:
            return self.directory.samefile(other.directory)
        except (FileNotFoundError, NotADirectoryError):
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
        if self._found is None and not self._find():
            raise StorageError(self.url, "the directory does not exist")
        self._check()
        folder = name.rpartition("/")[0]
        for each in ("drafts", folder):
            if not self._has_folder(each, writes=True):
                make_folder(self.directory, each)
        is_new = write_file(self.directory, name, buffers, overwrite=overwrite, fsync=self._fsync, check=self._check)
        self._has_written = True
        if is_new:
            self._sync(folder, name)
        return is_new

    def _at(self, name: str, call: Callable[[str], T]) -> T | None:
        """Return what ``call`` returns for the path of an object; None if the object does not exist."""
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
        """Return True if a folder of the store exists. Raise StorageError if it, or one above it, is no directory."""
        if self._found is None and not self._find():
            return False
        end = 0
        while end >= 0:
            end = folder.find("/", end + 1)
            name = folder if end < 0 else folder[:end]
            path = f"{self.directory}/{name}"
            try:
                status = os.lstat(path)
            except FileNotFoundError:
                return False
            except NotADirectoryError:
                self._find()  # raises an error if the store itself is a file
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

    def _check(self) -> None:
        """Check that the directory is the one that was found before, if any, and has not lost its objects."""
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
        raise WriteRefusedError(
            self.url,
            "its directory was unmounted, deleted or replaced since it was opened",
            "Mount its volume and try again; if the directory is the right one, build a new Publisher from the url",
        )

    def _sync(self, prefix: str, name: str) -> None:
        """Flush the names in the directory ``prefix`` to disk; ``name`` is for the error."""
        if not self._fsync:
            return
        try:
            sync_names(self.directory, prefix)
        except OSError as error:
            raise UnknownOutcomeError(self.url, name, f"{type(error).__name__}: {error}", prefix or ".") from error


def _no_directory(name: str, path: str, status: os.stat_result) -> tuple[str, str]:
    """Return reason and remedy for a folder ``name`` of a store that is not a directory."""
    if stat.S_ISLNK(status.st_mode):
        reason = f"{name} is a link to {os.readlink(path)!r} instead of a directory"  # noqa: PTH115  keeps the text
        return reason, "Replace it by the directory itself; only the directory of the whole stream may be a link"
    what = f"file of {status.st_size} bytes" if stat.S_ISREG(status.st_mode) else "special file"
    reason = f"{name} is a {what} instead of a directory"
    return reason, "Move it away and restore the directory, for example from a mirror; or correct the url"
