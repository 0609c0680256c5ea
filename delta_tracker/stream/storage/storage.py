"""An object store, which is a directory or bucket (through obstore).

Objects are written whole, created once and never visible in half.
"""

from __future__ import annotations

import itertools
import logging
import operator
import os
import random
import secrets
import stat
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotSupportedError, UnknownConfigurationKeyError
from obstore.store import LocalStore, from_url

from delta_tracker.errors import (
    InvalidArgumentError,
    MalformedError,
    NameConflictError,
    StorageError,
    UnsafeStoreError,
    is_panic,
)
from delta_tracker.stream.interruption import answer, check, checked
from delta_tracker.stream.storage.local import CHUNK_BYTES, make_directory, pieces, write_file
from delta_tracker.stream.storage.url import check_name, connection, is_remote, local_directory

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from obstore import BytesStream, GetOptions, GetResult, ListStream, ObjectMeta
    from obstore.store import ObjectStore

T = TypeVar("T")
_logger = logging.getLogger(__name__)

# A multipart upload has at most 10,000 parts, so this bounds an object at 80 GB. Parts under way are held in memory.
_UPLOAD_BYTES = 8 << 20
_UPLOADS = 4
# What an interrupted download loses at most. Smaller chunks cost time, larger ones save none.
_DOWNLOAD_BYTES = 256 << 10
_CREATE_ATTEMPTS = 8
_PAUSE_SECONDS = 0.01
# The process in which obstore's threads run, once there is one.
_processes: list[int] = []
_PAGE_OBJECTS = 1000  # what a remote store returns per request


@dataclass(frozen=True, slots=True)
class StoredObject:
    """What a listing says of an object: its name, its size, and when it was written in Unix seconds."""

    name: str
    num_bytes: int
    modified: float


@dataclass(slots=True, eq=False)
class Transfer:
    """What has arrived of an object that is read from a remote store.

    Attributes:
        out: memory for all bytes that are read, once the object's size is known.
        num_bytes: how many of them have arrived, from the first one on.
        source: size, ETag and time of the object that they are from.
    """

    out: NDArray[np.uint8] | None = None
    num_bytes: int = 0
    source: tuple[int, str | None, datetime] | None = None


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
            ``secret_access_key``, ``allow_http`` or ``read_timeout``; all values are strings. A request fails after
            ``read_timeout`` without a byte, 30s by default. ``timeout`` limits its whole time; there is no such limit
            by default.

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
        self._is_remote = is_remote(url)
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
                self._upload(name, checked(_chunks(buffers)))
            else:
                self._write_file(name, checked(buffers), overwrite=True)

    def create(self, name: str, data: bytes) -> bool:
        """Write an object unless one of that name exists; False if it does. Of racing writers exactly one wins.

        A store may also refuse because another request for the name is under way: AWS answers 409. So a refusal counts
        only if the object is there. Otherwise the write is tried again with growing pauses, 1 to 2 seconds in all.

        Raises:
            NameConflictError: if the store still refuses then, and no object of that name is there.
            StorageError: if it cannot be written; it may be there all the same when the answer was lost.
        """
        check_name("name", name)
        for attempt in range(_CREATE_ATTEMPTS):
            if attempt:
                back_off(attempt)
            if self._create_once(name, data):
                return True
            if self.size(name) is not None:
                return False
        raise NameConflictError(self.url, name, _CREATE_ATTEMPTS)

    def _create_once(self, name: str, data: bytes) -> bool:
        """Write an object; False if the store refuses because of its name."""
        with self._translated():
            if self._directory is not None:
                return self._write_file(name, [memoryview(data)], overwrite=False)
            try:
                self._put(name, data, mode="create")
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
                self._put(name, data, use_multipart=False)
            else:
                self._write_file(name, [memoryview(data)], overwrite=True)

    def read(
        self,
        name: str,
        *,
        max_bytes: int,
        out: NDArray[np.uint8] | None = None,
        transfer: Transfer | None = None,
    ) -> NDArray[np.uint8] | None:
        """The bytes of an object, None if there is none.

        Args:
            name: its name.
            max_bytes: how many bytes it may have.
            out: memory for so many bytes, whose beginning is then returned; without it the memory is new.
            transfer: keeps what arrives before a :class:`StorageError`. A call with the transfer of a call that failed
                asks for the rest only. Local files are read from their beginning.

        Raises:
            MalformedError: if it has more than ``max_bytes``; nothing was allocated for them.
            StorageError: if it cannot be read, or has changed since the call that failed; the next call begins anew
                then.
        """
        check_name("name", name)
        if out is not None and len(out) < max_bytes:
            raise InvalidArgumentError("out", len(out), f"Pass an array of {max_bytes} bytes")
        with self._translated():
            if self._directory is None:
                return self._download(name, max_bytes=max_bytes, out=out, transfer=transfer)
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
                    store = self._open_store()
                    return self._ask(lambda: obstore.head(store, name), lambda: obstore.head_async(store, name))["size"]
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
                    store = self._open_store()
                    self._ask(lambda: obstore.delete(store, name), lambda: obstore.delete_async(store, name))
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
            self._refuse_after_fork()
            store = self._find_store()
            if store is None:
                return []
            pages = obstore.list(store, prefix, offset=after, chunk_size=_PAGE_OBJECTS)
            found = self._ask(lambda: list(itertools.chain.from_iterable(pages)), lambda: _collected(pages))
            metas = sorted(found, key=operator.itemgetter("path"))
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
        self._refuse_after_fork()
        store = self._find_store()
        if store is None:
            raise StorageError(self.url, "the directory does not exist")
        return store

    def _refuse_after_fork(self) -> None:
        """Note the process that uses obstore first; a remote request would hang or crash in a child of it."""
        if not _processes:
            _processes.append(os.getpid())
        if self._is_remote and os.getpid() not in _processes:
            reason = "this process was forked after obstore was used, and lacks its threads; start it with spawn, or"
            raise StorageError(self.url, f"{reason} use no store before the fork")

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

    def _put(self, name: str, data: bytes, **options: Any) -> None:  # noqa: ANN401  obstore's
        """Write a small object to a remote store."""
        store = self._open_store()
        self._ask(
            lambda: obstore.put(store, name, data, **options),
            lambda: obstore.put_async(store, name, data, **options),
        )

    def _ask(self, blocking: Callable[[], T], request: Callable[[], Awaitable[T]]) -> T:
        """The answer to a request; one that leaves this machine may be abandoned."""
        return answer(blocking, request) if self._is_remote else blocking()

    def _download(
        self,
        name: str,
        begin: int = 0,
        end: int | None = None,
        *,
        max_bytes: int | None = None,
        out: NDArray[np.uint8] | None = None,
        transfer: Transfer | None = None,
    ) -> NDArray[np.uint8] | None:
        """Read from a remote store, in several requests if one ends early.

        A request for the rest follows as long as each brings some bytes, so that a slow store is no failure.
        """
        transfer = Transfer() if transfer is None else transfer
        while transfer.out is None or transfer.num_bytes < len(transfer.out):
            before = transfer.num_bytes
            try:
                result = self._request(name, begin + transfer.num_bytes, end)
                found = result.meta["size"], result.meta["e_tag"], result.meta["last_modified"]
                if transfer.source not in (None, found):
                    transfer.out, transfer.num_bytes, transfer.source = None, 0, None
                    raise StorageError(self.url, f"{name} changed while it was read")
                if transfer.out is None:
                    transfer.out = self._allocate(name, found[0], begin, end, max_bytes, out)
                    transfer.source = found
                self._fill(name, result, transfer, begin)
            except FileNotFoundError:
                return None
            except (BaseError, OSError) as error:
                if transfer.num_bytes <= before:
                    raise
                _logger.info("resuming %s at byte %d: %s", name, begin + transfer.num_bytes, type(error).__name__)
        return transfer.out

    def _request(self, name: str, begin: int, end: int | None) -> GetResult:
        """Ask for an object from a byte on."""
        store = self._open_store()
        options: GetOptions = {}
        if end is not None:
            options = {"range": (begin, end)}
        elif begin:
            options = {"range": {"offset": begin}}
        return self._ask(
            lambda: obstore.get(store, name, options=options),
            lambda: obstore.get_async(store, name, options=options),
        )

    def _fill(self, name: str, result: GetResult, transfer: Transfer, begin: int) -> None:
        """Copy an answer to where the bytes before it end."""
        out = transfer.out
        assert out is not None, "allocated"
        stream = result.stream(min_chunk_size=_DOWNLOAD_BYTES)
        while (chunk := self._ask(lambda: next(stream, None), lambda: _next(stream))) is not None:
            filled = transfer.num_bytes + len(chunk)
            if filled > len(out):
                raise StorageError(self.url, f"{name} sent more than the {len(out)} bytes that it announced")
            out[transfer.num_bytes : filled] = np.frombuffer(chunk, dtype=np.uint8)
            transfer.num_bytes = filled
        if transfer.num_bytes != len(out):
            raise self._too_short(name, begin + transfer.num_bytes, begin + len(out))

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
                check()
                count = os.preadv(descriptor, [view[filled : filled + CHUNK_BYTES]], begin + filled)
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
        except BaseException as error:
            if not is_panic(error):
                raise
            raise StorageError(self.url, f"{type(error).__name__}: {error}") from error


def back_off(attempt: int) -> None:
    """Pause before an attempt; 1 is the second one. Twice as long each time, at random by half."""
    time.sleep(_PAUSE_SECONDS * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))  # noqa: S311  no secret


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


async def _next(stream: BytesStream) -> bytes | None:
    """The next chunk of an object, None at its end."""
    try:
        return await anext(stream)
    except StopAsyncIteration:
        return None


async def _collected(pages: ListStream[Sequence[ObjectMeta]]) -> list[ObjectMeta]:
    """The objects of all pages of a listing."""
    return [meta async for page in pages for meta in page]
