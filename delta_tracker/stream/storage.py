"""Objects in a directory or bucket (through obstore): written whole, created once, never half visible."""

from __future__ import annotations

import itertools
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotSupportedError, UnknownConfigurationKeyError
from obstore.store import LocalStore, from_url

from delta_tracker.errors import InvalidArgumentError, MalformedError, StorageError, UnsafeStoreError
from delta_tracker.stream.address import check_name, connection, local_directory
from delta_tracker.stream.files import CHUNK_BYTES, make_directory, pieces, write_file

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from obstore.store import ObjectStore

# A multipart upload has at most 10,000 parts, so this bounds an object at 80 GB. Parts under way are held in memory.
_UPLOAD_BYTES = 8 << 20
_UPLOADS = 4
_PAGE_OBJECTS = 1000  # what a remote store returns per request


@dataclass(frozen=True, slots=True)
class StoredObject:
    """What a listing says of an object: its name, its size, and when it was written in Unix seconds."""

    name: str
    num_bytes: int
    modified: float


class Storage:
    """The objects under one url. Safe for several threads.

    Names are relative, with forward slashes, and stay below the root: a name that is absolute, has an empty, ``.`` or
    ``..`` component, a backslash, a ``#`` or a control character is refused with :class:`InvalidArgumentError`. A local
    directory is made durable: an object is on disk (fsync) before the call that wrote it returns. An object store
    promises that by itself.

    Args:
        url: ``file:///absolute/directory``, ``s3://bucket/prefix``, ``gs://...``, ``az://...`` or ``memory://``.
            Every ``memory://`` is a store of its own: share the ``Storage`` object instead of the url.
        create: make a local directory that does not exist. Without it a missing one is an empty store until somebody
            makes it, so that a reader may start before the writer.
        fsync: False leaves it to the system when local objects reach the disk: a lost machine may lose them.
        options: settings of a remote store by obstore's names, such as ``endpoint``, ``region``, ``access_key_id``,
            ``secret_access_key``, ``allow_http`` or ``timeout``; all values are strings.

    Raises:
        InvalidArgumentError: for a url of another scheme, or options that the store does not have.
        StorageError: if the store cannot be opened.
    """

    def __init__(
        self, url: str, *, create: bool = False, fsync: bool = True, options: Mapping[str, str] | None = None
    ) -> None:
        self._directory = local_directory(url)
        if not fsync and self._directory is None:
            raise InvalidArgumentError("fsync", fsync, "Leave it out: only a local directory is synced")
        self.url = url
        self._fsync = fsync
        self._settings = connection(url, options)
        with self._translated():
            if self._directory is not None and create:
                make_directory(self._directory, fsync=fsync)
            self._store: ObjectStore | None = None
            try:
                self._find_store()
            except UnknownConfigurationKeyError as error:
                raise InvalidArgumentError("options", sorted(options or ()), str(error).split("\n")[0]) from error

    def put(self, name: str, buffers: Iterable[memoryview]) -> None:
        """Write an object of the concatenated ``buffers`` of bytes, replacing one of the same name.

        The buffers are streamed, and each is written or copied before the next is asked for, so that the caller may
        use its memory again. It takes no memory for a local directory and up to 100 MB for a remote store, whatever the
        object's size. A remote object may have 80 GB.

        Raises:
            StorageError: if it cannot be written; nothing is visible then.
        """
        check_name("name", name)
        with self._translated():
            if self._directory is None:
                self._upload(name, _chunks(buffers))
            else:
                self._write_file(name, buffers, overwrite=True)

    def create(self, name: str, data: bytes) -> bool:
        """Write an object unless one of that name exists; False if it does. Of racing writers exactly one wins.

        Raises:
            StorageError: if it cannot be written; it may be there all the same when the answer was lost.
        """
        check_name("name", name)
        with self._translated():
            if self._directory is not None:
                return self._write_file(name, [memoryview(data)], overwrite=False)
            try:
                obstore.put(self._open_store(), name, data, mode="create")
            except AlreadyExistsError:
                return False
            return True

    def replace(self, name: str, data: bytes) -> None:
        """Write a small object, or replace it: a reader sees the old bytes or the new ones, also after a lost machine.

        Raises:
            StorageError: if it cannot be written; the old object is still there then.
        """
        check_name("name", name)
        with self._translated():
            if self._directory is None:
                obstore.put(self._open_store(), name, data, use_multipart=False)
            else:
                self._write_file(name, [memoryview(data)], overwrite=True)

    def read(self, name: str, *, max_bytes: int, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8] | None:
        """The bytes of an object, None if there is none.

        Args:
            name: its name.
            max_bytes: how many bytes it may have.
            out: memory for so many bytes, whose beginning is then returned; without it the memory is new.

        Raises:
            MalformedError: if it has more than ``max_bytes``; nothing was allocated for them.
            StorageError: if it cannot be read.
        """
        check_name("name", name)
        if out is not None and len(out) < max_bytes:
            raise InvalidArgumentError("out", len(out), f"Pass an array of {max_bytes} bytes")
        with self._translated():
            if self._directory is None:
                return self._download(name, max_bytes=max_bytes, out=out)
            return self._read_file(name, max_bytes=max_bytes, out=out)

    def read_range(self, name: str, begin: int, end: int) -> NDArray[np.uint8] | None:
        """The bytes ``[begin, end)`` of an object, None if there is none.

        Raises:
            InvalidArgumentError: unless ``0 <= begin <= end``.
            StorageError: if the object is shorter, or cannot be read; nothing was allocated for its bytes then.
        """
        check_name("name", name)
        if not 0 <= begin <= end:
            raise InvalidArgumentError("begin, end", (begin, end), "Pass 0 <= begin <= end")
        with self._translated():
            if self._directory is not None:
                return self._read_file(name, begin, end)
            if begin < end:
                return self._download(name, begin, end)
        num_bytes = self.size(name)  # an empty range cannot be asked for
        if num_bytes is not None and num_bytes < end:
            raise self._too_short(name, num_bytes, end)
        return None if num_bytes is None else np.empty(0, dtype=np.uint8)

    def size(self, name: str) -> int | None:
        """The number of bytes of an object, None if there is none.

        Raises:
            StorageError: if the store cannot be asked.
        """
        check_name("name", name)
        with self._translated():
            try:
                if self._directory is None:
                    return obstore.head(self._open_store(), name)["size"]
                self._find_store()
                status = (self._directory / name).stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
            return status.st_size if stat.S_ISREG(status.st_mode) else None

    def delete(self, name: str) -> None:
        """Remove an object; one that does not exist is no error.

        Raises:
            StorageError: if it cannot be removed.
        """
        check_name("name", name)
        with self._translated():
            try:
                if self._directory is None:
                    obstore.delete(self._open_store(), name)
                elif self._find_store() is not None:
                    (self._directory / name).unlink()
            except (FileNotFoundError, NotADirectoryError):
                return

    def objects(self, prefix: str, *, after: str | None = None) -> list[StoredObject]:
        """The objects below the directory ``prefix``, ascending by name, those above ``after`` only.

        Raises:
            StorageError: if the store cannot be listed.
        """
        check_name("prefix", prefix)
        if after is not None:
            check_name("after", after)
        with self._translated():
            store = self._find_store()
            if store is None:
                return []
            pages = obstore.list(store, prefix, offset=after, chunk_size=_PAGE_OBJECTS)
            metas = sorted(itertools.chain.from_iterable(pages), key=lambda meta: meta["path"])
            return [StoredObject(meta["path"], meta["size"], meta["last_modified"].timestamp()) for meta in metas]

    def names(self, prefix: str, *, after: str | None = None) -> list[str]:
        """Names of the objects below the directory ``prefix``, ascending, those above ``after`` only.

        Raises:
            StorageError: if the store cannot be listed.
        """
        return [stored.name for stored in self.objects(prefix, after=after)]

    def probe(self) -> None:
        """Prove that of two writers who create the same object one is refused, by doing it. Leaves nothing behind.

        Raises:
            UnsafeStoreError: if the store lets both of them write.
            StorageError: if it cannot be written.
        """
        name = f"probe/{secrets.token_hex(16)}"
        try:
            # This may be refused as well: a request whose answer was lost had won, and is repeated.
            self.create(name, b"first")
            second = self.create(name, b"second")
            there = self.read(name, max_bytes=len(b"second"))
        except BaseException as error:
            with suppress(StorageError):  # the first error says more
                self.delete(name)
            if isinstance(error.__cause__, NotSupportedError | NotImplementedError):
                raise UnsafeStoreError(self.url) from error
            raise
        self.delete(name)
        if second or there is None or there.tobytes() != b"first":
            raise UnsafeStoreError(self.url)

    def _find_store(self) -> ObjectStore | None:
        """The store; None while its directory does not exist."""
        if self._directory is not None and self._directory.exists() and not self._directory.is_dir():
            raise StorageError(self.url, "a file stands where its directory should be")
        if self._store is None and (self._directory is None or self._directory.is_dir()):
            # Not from the url: obstore resolves `..`, backslashes and blanks of a path otherwise than the system does.
            local = self._directory
            self._store = from_url(self.url, **self._settings) if local is None else LocalStore(local.resolve())
        return self._store

    def _open_store(self) -> ObjectStore:
        store = self._find_store()
        if store is None:
            raise StorageError(self.url, "the directory does not exist")
        return store

    def _upload(self, name: str, chunks: Iterator[bytes]) -> None:
        """Write to a remote store: one request if it is small, a multipart upload otherwise."""
        store = self._open_store()
        first = next(chunks, b"")
        second = next(chunks, None)
        if second is None:
            obstore.put(store, name, first, use_multipart=False)
        else:
            parts = itertools.chain((first, second), chunks)
            obstore.put(store, name, parts, chunk_size=_UPLOAD_BYTES, max_concurrency=_UPLOADS)

    def _download(
        self,
        name: str,
        begin: int = 0,
        end: int | None = None,
        *,
        max_bytes: int | None = None,
        out: NDArray[np.uint8] | None = None,
    ) -> NDArray[np.uint8] | None:
        store = self._open_store()
        try:
            answer = obstore.get(store, name, options={} if end is None else {"range": (begin, end)})
        except FileNotFoundError:
            return None
        num_bytes = answer.meta["size"]
        data = self._allocate(name, num_bytes, begin, end, max_bytes, out)
        filled = 0
        for chunk in answer.stream(min_chunk_size=CHUNK_BYTES):
            if filled + len(chunk) > len(data):
                raise StorageError(self.url, f"{name} sent more than the {len(data)} bytes that it announced")
            data[filled : filled + len(chunk)] = np.frombuffer(chunk, dtype=np.uint8)
            filled += len(chunk)
        if filled != len(data):
            raise self._too_short(name, begin + filled, begin + len(data))
        return data

    def _read_file(
        self,
        name: str,
        begin: int = 0,
        end: int | None = None,
        *,
        max_bytes: int | None = None,
        out: NDArray[np.uint8] | None = None,
    ) -> NDArray[np.uint8] | None:
        """Read straight into the array, at the cost of a copy; obstore's stream of a file takes 30 times that."""
        assert self._directory is not None
        try:
            # Whatever stands there: a pipe must not hold the reader up.
            descriptor = os.open(self._directory / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            self._find_store()
            return None
        try:
            status = os.fstat(descriptor)
            if stat.S_ISDIR(status.st_mode):
                return None
            if not stat.S_ISREG(status.st_mode):
                raise StorageError(self.url, f"{name} is not a regular file")
            data = self._allocate(name, status.st_size, begin, end, max_bytes, out)
            view = data.data
            filled = 0
            while filled < len(data):
                count = os.preadv(descriptor, [view[filled:]], begin + filled)
                if count == 0:
                    raise self._too_short(name, begin + filled, begin + len(data))
                filled += count
            return data
        finally:
            os.close(descriptor)

    def _allocate(
        self,
        name: str,
        num_bytes: int,
        begin: int,
        end: int | None,
        max_bytes: int | None,
        out: NDArray[np.uint8] | None,
    ) -> NDArray[np.uint8]:
        """Memory for ``[begin, end)`` of an object of ``num_bytes``, once it is known to be there and no larger."""
        if max_bytes is not None and num_bytes > max_bytes:
            raise MalformedError(name, f"it has {num_bytes} bytes, more than {max_bytes}")
        if end is not None and num_bytes < end:
            raise self._too_short(name, num_bytes, end)
        length = (num_bytes if end is None else end) - begin
        return np.empty(length, dtype=np.uint8) if out is None else out[:length]

    def _too_short(self, name: str, num_bytes: int, expected: int) -> StorageError:
        return StorageError(self.url, f"{name} ended after {num_bytes} of {expected} bytes")

    def _write_file(self, name: str, buffers: Iterable[memoryview], *, overwrite: bool) -> bool:
        self._open_store()
        assert self._directory is not None
        return write_file(self._directory, name, buffers, overwrite=overwrite, fsync=self._fsync)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn what obstore and the file system raise into a :class:`StorageError`."""
        try:
            yield
        except (StorageError, MalformedError):
            raise
        except (BaseError, OSError, NotImplementedError) as error:
            reason = str(error).split("\n", maxsplit=1)[0]
            raise StorageError(self.url, f"{type(error).__name__}: {reason}") from error


def open_storage(url: str | Storage, *, create: bool = False) -> Storage:
    """``url`` itself if it is a :class:`Storage`, otherwise the storage it names."""
    return url if isinstance(url, Storage) else Storage(url, create=create)


def _chunks(buffers: Iterable[memoryview]) -> Iterator[bytes]:
    """The bytes of ``buffers``, copied into chunks of one size: obstore still holds them when it asks for the next."""
    chunk = bytearray()
    for piece in pieces(buffers):
        room = _UPLOAD_BYTES - len(chunk)
        chunk += piece[:room]
        if len(chunk) == _UPLOAD_BYTES:
            yield bytes(chunk)
            chunk = bytearray(piece[room:])
    if chunk:
        yield bytes(chunk)
