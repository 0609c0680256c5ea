"""Access to the objects of a stream in a directory or bucket, with atomic writes and exclusive creation."""

from __future__ import annotations

import copy
import itertools
import logging
import operator
import os
import random
import re
import secrets
import stat
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeAlias, TypeVar

import numpy as np
import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotSupportedError, UnknownConfigurationKeyError
from obstore.store import from_url

from delta_tracker.errors import (
    InvalidArgumentError,
    MalformedError,
    StorageError,
    UnknownOutcomeError,
    UnsupportedStoreError,
    WriteRefusedError,
    is_panic,
)
from delta_tracker.stream.interruption import answer, check, checked
from delta_tracker.stream.storage.local import (
    CHUNK_BYTES,
    delete_draft,
    list_files,
    make_directory,
    pieces,
    sync_names,
    write_file,
)
from delta_tracker.stream.storage.url import (
    check_name,
    connection,
    is_http,
    is_name,
    is_remote,
    local_directory,
    store_url,
)

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import NDArray
    from obstore import BytesStream, GetOptions, GetResult, ListStream, ObjectMeta
    from obstore.store import ObjectStore

    # Function that checks the size of an object in bytes, and returns memory for the bytes that are read.
    _Allocate: TypeAlias = Callable[[int], NDArray[np.uint8]]

T = TypeVar("T")
P = ParamSpec("P")
# Hosts that obstore asks for credentials if none are configured.
_METADATA_HOSTS = ("169.254.169.254", "metadata.google.internal")
_logger = logging.getLogger(__name__)

# A multipart upload has at most 10,000 parts, which limits an object to 80 GB. Memory holds the parts in flight.
UPLOAD_BYTES = 8 << 20
_UPLOADS = 4
# Maximum number of bytes lost by an interrupted download. Smaller chunks are slower, larger ones are not faster.
_DOWNLOAD_BYTES = 256 << 10
_CREATE_ATTEMPTS = 8
_PAUSE_SECONDS = 0.01
# Id of the process in which obstore's threads run; empty before the first use.
_processes: list[int] = []
PAGE_OBJECTS = 1000  # objects that a remote store returns per request
_PLAIN_NAME = re.compile(r"[a-z]+/[0-9a-z_-]+(\.[a-z]+)?")
_SHORT_NAME_LENGTH = 200  # of a plain name, which is not checked further


@dataclass(frozen=True, slots=True)
class StoredObject:
    """Listing entry of an object: its name, its size in bytes, and its modification time in Unix seconds."""

    name: str
    num_bytes: int
    modified: float


@dataclass(slots=True, eq=False)
class Transfer:
    """Progress of a download from a remote store."""

    out: NDArray[np.uint8] | None = None  # memory for all requested bytes; None until the object's size is known
    num_bytes: int = 0  # number of bytes received so far
    # size, ETag and modification time of the object; None before the first response
    source: tuple[int, str | None, datetime] | None = None
    # modification time of the object in Unix seconds, by the store's clock; None before the first response, and if a
    # web server sends none
    modified: float | None = None


class Storage:
    """Store of the objects below one URL. Thread-safe.

    Names of objects are relative to the URL and use forward slashes. A name is invalid if it has an empty, ``.`` or
    ``..`` component, a backslash, a ``#`` or a control character, or more than 1,024 bytes. All methods reject an
    invalid name with :class:`InvalidArgumentError`, and raise :class:`StorageError` if the store fails. A local object
    is on disk (fsync) before the call that wrote it returns; :class:`UnknownOutcomeError` says that it was written, but
    its name cannot be flushed. Remote stores guarantee durability.

    A web server or a cache at an http URL serves single objects: all methods that write, delete or list raise
    :class:`UnsupportedStoreError`.

    Args:
        url: ``file:///absolute/directory``, ``s3://bucket/prefix``, ``gs://...``, ``az://...``, ``memory://`` (a
            separate store for each object), ``http://host/path`` or ``https://host/path``; or the path of a directory.
        create: True to create a missing local directory. If False, it is read as an empty store until it exists. Once
            it was found, this object writes only to this directory: if another one or none has its path, or if it is
            empty although this object has written to it, writes, deletions and syncs raise
            :class:`WriteRefusedError`. Reads use the directory that is there.
        fsync: if False, the system decides when local objects reach the disk, and a machine failure may lose them.
        options: options of a remote store as obstore names them, such as ``endpoint``, ``region``, ``access_key_id``,
            ``secret_access_key``, ``allow_http``, ``read_timeout`` (time without any byte, 30s by default) or
            ``timeout`` (of a whole request, no limit by default); all values are strings.

    Attributes:
        url: URL of the store.
        is_remote: True if the store is accessed over a network, which may alter what is sent.
        is_read_only: True if nothing can be written to the store, as at an http URL.
        lists: True if the store can list its objects; False at an http URL.
        lists_from: True if a listing after a name takes no time for the names before it, as in an object store.
        requests: number of operations so far, by kind: ``read``, ``size``, ``list``, ``write`` and ``delete``. One that
            takes several requests counts once.

    Raises:
        InvalidArgumentError: for an unsupported scheme, or options that the store does not support.
        StorageError: if the store cannot be opened.

    Example:
        >>> storage = Storage("memory://")  # or "/directory", "s3://bucket/prefix"
        >>> storage.create("log/1", b"text")
        True
        >>> storage.names("log")
        ['log/1']
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        create: bool = False,
        fsync: bool = True,
        options: Mapping[str, str] | None = None,
    ) -> None:
        url = store_url(url)
        self._directory = local_directory(url)
        if not fsync and self._directory is None:
            raise InvalidArgumentError("fsync", fsync, "Omit it: only a local directory is synced")
        self.url = url
        self._fsync = fsync
        self.requests = dict.fromkeys(("read", "size", "list", "write", "delete"), 0)
        self.is_remote = is_remote(url)
        self.is_read_only = is_http(url)
        self.lists = not self.is_read_only
        self.lists_from = self.lists and self._directory is None
        self._uncached: Storage | None = None
        self._options = options
        self._translated = _Translation(url)
        self._found: os.stat_result | None = None  # status of the local directory, None until it is found
        self._has_written = False
        self._store: ObjectStore  # unless the store is a local directory
        settings = connection(url, options)
        with self._translated:
            if self._directory is not None:
                if create:
                    make_directory(self._directory, fsync=fsync)
                self._find_directory()
                return
            try:
                self._store = from_url(url, **settings)
            except UnknownConfigurationKeyError as error:
                remedy = f"Use options of the store: {str(error).partition(chr(10))[0]}"
                raise InvalidArgumentError("options", sorted(options or ()), remedy) from error

    def is_same(self, other: Storage) -> bool:
        """Return True if both objects access the same directory, or have the same url; options are not compared."""
        if self is other:
            return True
        if self._directory is not None and other._directory is not None:
            with self._translated:
                try:
                    return self._directory.samefile(other._directory)
                except (FileNotFoundError, NotADirectoryError):
                    return self._directory.resolve() == other._directory.resolve()
        mine, others = self.url.rstrip("/"), other.url.rstrip("/")
        return mine == others and not mine.startswith("memory:")

    @property
    def uncached(self) -> Storage:
        """The same store, read past all caches, which may ignore that; this object if it is not at an http URL."""
        if not self.is_read_only:
            return self
        if self._uncached is None:
            past = copy.copy(self)  # keeps the class and shares the counts
            with self._translated:
                store = from_url(self.url, **connection(self.url, self._options, past_cache=True))
            vars(past).update(_store=store, _uncached=past)
            self._uncached = past
        return self._uncached

    def reopened(self) -> Storage:
        """Return a store for the directory that is at the URL now; this object if it is still the same or missing.

        A publisher must not use this method: its claim is in the directory that it opened.
        """
        with self._translated:
            if self._directory is not None and self._directory.is_dir():
                try:
                    self._check_directory()
                except WriteRefusedError:
                    return Storage(self.url, fsync=self._fsync)
        return self

    def put(self, name: str, buffers: Iterable[memoryview]) -> None:
        """Write the concatenated ``buffers`` as an object, replacing one of the same name.

        Each buffer is written or copied before the next one is requested, so the caller may then reuse its memory. For
        a remote store, the call needs up to 100 MB of memory, and an object may have up to 80 GB. No partial object is
        visible after a failure.

        If a remote store refuses a request because of a concurrent one (409 on AWS), the object is written again for
        about a second. Unless it has at most 8 MiB, ``buffers`` must be iterable again for this, such as a
        :class:`Repeatable`.
        """
        self._begin("write", name, "put()")
        with self._translated:
            if self._directory is None:
                self._upload(name, buffers)
            else:
                self._write_file(name, checked(buffers), overwrite=True)

    def create(self, name: str, data: bytes) -> bool:
        """Write an object; return False if one of that name exists. If several writers race, only one succeeds.

        If the response of a failed call was lost, the object may exist. Raises :class:`WriteRefusedError` if the store
        refused each attempt for a second (409 on AWS), and no such object exists.
        """
        self._begin("write", name, "create()")
        for attempt in range(_CREATE_ATTEMPTS):
            if attempt:
                back_off(attempt)
            if self._create_once(name, data):
                return True
            if self.size(name) is not None:
                return False
        raise WriteRefusedError(self.url, name, _CREATE_ATTEMPTS)

    def _create_once(self, name: str, data: bytes) -> bool:
        """Try once to create an object. False does not prove that it exists, see :meth:`create`."""
        with self._translated:
            if self._directory is not None:
                return self._write_file(name, [memoryview(data)], overwrite=False)
            try:
                self._ask(obstore.put, obstore.put_async, self._object_store(), name, data, mode="create")
            except AlreadyExistsError:
                return False
            return True

    def replace(self, name: str, data: bytes) -> None:
        """Write or replace a small object atomically: readers see the old or the new bytes, even after a power loss.

        If the response of a failed call was lost, the object may have been written.
        """
        self._begin("write", name, "replace()")
        with self._translated:
            if self._directory is None:
                store = self._object_store()
                _repeated(lambda: self._ask(obstore.put, obstore.put_async, store, name, data, use_multipart=False))
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
        """Return the bytes of an object, None if it does not exist.

        Args:
            name: name of the object.
            max_bytes: maximum size of the object.
            out: memory of at least ``max_bytes``; the result is its beginning. None allocates new memory.
            transfer: object that receives the modification time, and keeps the bytes received before a
                :class:`StorageError`. A later call with it requests only the rest of a remote object.

        Raises:
            MalformedError: if the object has more than ``max_bytes`` bytes; no memory was allocated.
            StorageError: if the object cannot be read, or has changed since the failed call. After a change, the next
                call starts from the beginning.
        """
        self._begin("read", name)
        if out is not None and len(out) < max_bytes:
            raise InvalidArgumentError("out", len(out), f"Pass an array of {max_bytes} bytes")

        def allocate(num_bytes: int) -> NDArray[np.uint8]:
            if num_bytes > max_bytes:
                raise MalformedError(name, f"it has {num_bytes} bytes, more than {max_bytes}")
            return np.empty(num_bytes, dtype=np.uint8) if out is None else out[:num_bytes]

        with self._translated:
            if self._directory is None:
                return self._download(name, allocate, transfer=transfer)
            return self._read_file(name, allocate, transfer=transfer)

    def read_range(self, name: str, begin: int, end: int) -> NDArray[np.uint8] | None:
        """Return the bytes ``[begin, end)`` of an object, None if it does not exist.

        Raises :class:`StorageError` if the object is too short, before memory is allocated.
        """
        self._begin("read", name)
        if not 0 <= begin <= end:
            raise InvalidArgumentError("begin, end", (begin, end), "Pass 0 <= begin <= end")

        def allocate(num_bytes: int) -> NDArray[np.uint8]:
            if num_bytes < end:
                raise self._too_short(name, num_bytes, end)
            return np.empty(end - begin, dtype=np.uint8)

        with self._translated:
            if self._directory is not None:
                return self._read_file(name, allocate, begin)
            if begin < end:
                return self._download(name, allocate, begin, end)
            num_bytes = self.size(name)  # stores reject a request for an empty range
            return None if num_bytes is None else allocate(num_bytes)

    def size(self, name: str) -> int | None:
        """Return the size of an object in bytes, None if it does not exist."""
        found = self.stat(name)
        return None if found is None else found.num_bytes

    def stat(self, name: str) -> StoredObject | None:
        """Return the size and the modification time of an object, None if it does not exist.

        A web server that sends no modification time is given the time 0.
        """
        self._begin("size", name)
        with self._translated:
            try:
                if self._directory is None:
                    store = self._object_store()
                    meta = self._ask(obstore.head, obstore.head_async, store, name)
                    return StoredObject(name, meta["size"], meta["last_modified"].timestamp())
                if self._found is None:
                    self._find_directory()
                status = (self._directory / name).stat()
            except FileNotFoundError:
                return None
            except NotADirectoryError:
                self._find_directory()  # raises an error if the store itself is a file
                return None
            return StoredObject(name, status.st_size, status.st_mtime) if stat.S_ISREG(status.st_mode) else None

    def delete(self, name: str) -> None:
        """Delete an object; no-op if it does not exist.

        A local object may be there again after a power loss, unless :meth:`sync` is called afterwards.
        """
        self._begin("delete", name, "delete()")
        with self._translated, suppress(FileNotFoundError, NotADirectoryError):
            if self._directory is None:
                store = self._object_store()
                _repeated(lambda: self._ask(obstore.delete, obstore.delete_async, store, name))
            elif self._find_directory():
                self._check_directory()
                (self._directory / name).unlink()

    def sync(self, prefix: str) -> None:
        """Flush all creations and deletions of objects in ``prefix`` to disk, or raise :class:`UnknownOutcomeError`.

        Of the methods, only :meth:`delete` does not wait for its own change. No-op for remote stores, which guarantee
        durability, with ``fsync=False``, and if the directory does not exist.
        """
        self._begin(None, prefix, "sync()", argument="prefix")
        with self._translated:
            self._check_directory()
        self._sync(prefix, f"what was created or deleted in {prefix}/")

    def delete_draft(self, name: str) -> bool:
        """Delete an interrupted write's temporary file, which has a name in ``drafts/``.

        Returns False if it is still being written, or does not exist.
        """
        self._begin(None, name, "delete_draft()")
        if self._directory is None:
            self.delete(name)  # another program's object: remote stores have no temporary files
            return True
        with self._translated:
            self._check_directory()
            return delete_draft(self._directory / name)

    def has_directory(self, prefix: str) -> bool:
        """Return False if the store is local and lacks the directory ``prefix``, as if its volume is not mounted."""
        check_name("prefix", prefix)
        with self._translated:
            return self._directory is None or (self._directory / prefix).is_dir()

    def objects(self, prefix: str, *, after: str | None = None) -> list[StoredObject]:
        """Return the objects in the directory ``prefix`` and below, sorted by name, or only those after ``after``.

        A local listing skips files whose names no method accepts, see also :func:`list_files`.
        """
        if self._directory is not None:
            files = self._list_files(self._directory, prefix, after, needs_status=True)
            return [StoredObject(name, each.st_size, each.st_mtime) for name, each in files if each is not None]
        self._begin_listing(prefix, after)
        with self._translated:
            store = self._object_store()
            pages = obstore.list(store, prefix, offset=after, chunk_size=PAGE_OBJECTS)
            found = self._ask(lambda: list(itertools.chain.from_iterable(pages)), lambda: _collected(pages))
            metas = sorted(found, key=operator.itemgetter("path"))
            return [StoredObject(meta["path"], meta["size"], meta["last_modified"].timestamp()) for meta in metas]

    def names(self, prefix: str, *, after: str | None = None) -> list[str]:
        """Return the sorted names of the objects that :meth:`objects` returns. Faster than it in a local directory."""
        if self._directory is None:
            return [stored.name for stored in self.objects(prefix, after=after)]
        return [name for name, _ in self._list_files(self._directory, prefix, after, needs_status=False)]

    def _list_files(
        self, directory: Path, prefix: str, after: str | None, *, needs_status: bool
    ) -> list[tuple[str, os.stat_result | None]]:
        self._begin_listing(prefix, after)
        with self._translated:
            if not self._find_directory():
                return []
            # obstore is not used here: it fails at a strange name or link, and takes longer.
            files = list_files(directory, prefix, after or "", needs_status=needs_status)
        # A listing may have many names of this library, for which is_name() is not called.
        return sorted(each for each in files if _PLAIN_NAME.fullmatch(each[0]) or is_name(each[0]))

    def _begin_listing(self, prefix: str, after: str | None) -> None:
        self._begin("list", prefix, "a listing", argument="prefix")
        if after is not None:
            check_name("after", after)

    def _begin(self, kind: str | None, name: object, call: str = "", *, argument: str = "name") -> None:
        """Check a name, reject a ``call`` that an http url does not support, and count the operation."""
        if not isinstance(name, str) or len(name) > _SHORT_NAME_LENGTH or _PLAIN_NAME.fullmatch(name) is None:
            check_name(argument, name)
        if call and self.is_read_only:
            raise UnsupportedStoreError(self.url, f"{call} of {name}")
        if kind is not None:
            self.requests[kind] += 1

    def probe(self) -> None:
        """Check that the store rejects the second of two requests to create the same object, which is then deleted.

        Raises :class:`UnsupportedStoreError` if it accepts both, or does not support exclusive creation.
        """
        name = f"probe/{secrets.token_hex(16)}"
        try:
            # May also return False: after a lost response, the store's client repeats a request that succeeded.
            self.create(name, b"first")
            second = self.create(name, b"second")
            there = self.read(name, max_bytes=len(b"second"))
        except BaseException as error:
            with suppress(StorageError):  # the first error is more useful
                self.delete(name)
            if isinstance(error.__cause__, NotSupportedError | NotImplementedError):
                raise UnsupportedStoreError(self.url) from error
            raise
        self.delete(name)
        if second or there is None or there.tobytes() != b"first":
            raise UnsupportedStoreError(self.url)

    def _find_directory(self) -> bool:
        """Return True if the local directory exists, or existed before."""
        assert self._directory is not None
        try:
            status = self._directory.stat()
        except (FileNotFoundError, NotADirectoryError):
            return self._found is not None
        if not stat.S_ISDIR(status.st_mode):
            raise StorageError(self.url, "it is a file instead of a directory")
        self._found = self._found or status
        return True

    def _object_store(self) -> ObjectStore:
        """Return the store. Refuse a remote one in a forked child: it lacks obstore's threads, so requests may hang."""
        if not _processes:
            _processes.append(os.getpid())
        if self.is_remote and os.getpid() not in _processes:
            reason = "this process was forked after obstore was used, and lacks its threads"
            raise StorageError(self.url, reason, "Start this process with spawn, or use no store before the fork")
        return self._store

    def _upload(self, name: str, buffers: Iterable[memoryview]) -> None:
        """Write an object to a remote store: a single chunk with one request, several with a multipart upload."""
        store = self._object_store()
        chunks = checked(_chunks(buffers))
        first, second = next(chunks, b""), next(chunks, None)
        if second is None:
            _repeated(lambda: obstore.put(store, name, first, use_multipart=False))
            return
        parts: Iterator[bytes] = itertools.chain((first, second), chunks)

        def upload() -> None:
            nonlocal parts
            sent, parts = parts, checked(_chunks(buffers))
            obstore.put(store, name, sent, chunk_size=UPLOAD_BYTES, max_concurrency=_UPLOADS)

        if iter(buffers) is buffers:
            upload()
        else:
            _repeated(upload)

    def _ask(
        self, blocking: Callable[P, T], request: Callable[P, Awaitable[T]], *args: P.args, **options: P.kwargs
    ) -> T:
        """Send a request and return the response. Only requests to a remote store can be interrupted."""
        if not self.is_remote:
            return blocking(*args, **options)
        return answer(partial(blocking, *args, **options), partial(request, *args, **options))

    def _download(
        self, name: str, allocate: _Allocate, begin: int = 0, end: int | None = None, transfer: Transfer | None = None
    ) -> NDArray[np.uint8] | None:
        """Return the bytes ``[begin, end)`` of a remote object, None if it does not exist.

        If a request ends before all bytes arrived, the remaining bytes are requested, as long as each brings some.
        """
        transfer = Transfer() if transfer is None else transfer
        while transfer.out is None or transfer.num_bytes < len(transfer.out):
            before = transfer.num_bytes
            try:
                result = self._request(name, begin + transfer.num_bytes, end)
                found = result.meta["size"], result.meta["e_tag"], result.meta["last_modified"]
                if self.is_read_only and transfer.source is not None:
                    # Two caches of one object may differ in its ETag and date; its hash is checked in the end.
                    found = found[0], *transfer.source[1:]
                if transfer.source not in (None, found):
                    transfer.out, transfer.num_bytes, transfer.source = None, 0, None
                    raise StorageError(self.url, f"{name} changed while it was read")
                if transfer.out is None:
                    transfer.out = allocate(found[0])
                    seconds = found[2].timestamp()  # 0 if the server sent none
                    transfer.source = found
                    transfer.modified = None if self.is_read_only and seconds <= 0 else seconds
                self._fill(name, result, transfer, begin)
            except FileNotFoundError:
                return None
            except NotSupportedError as error:
                if not self.is_read_only:
                    raise
                reason = f"{name}: the server answers a range with the whole object"
                raise StorageError(self.url, reason, "Make it pass ranges on, or cache slices") from error
            except (BaseError, OSError) as error:
                if transfer.num_bytes <= before:
                    raise
                _logger.info("resuming %s at byte %d: %s", name, begin + transfer.num_bytes, type(error).__name__)
        return transfer.out

    def _request(self, name: str, begin: int, end: int | None) -> GetResult:
        """Request the bytes ``[begin, end)`` of a remote object. An ``end`` of None means the end of the object."""
        store = self._object_store()
        options: GetOptions = {}
        if end is not None:
            options = {"range": (begin, end)}
        elif begin:
            options = {"range": {"offset": begin}}
        return self._ask(obstore.get, obstore.get_async, store, name, options=options)

    def _fill(self, name: str, result: GetResult, transfer: Transfer, begin: int) -> None:
        """Append the bytes of a response to ``transfer``, which holds the object's bytes from ``begin`` on."""
        out = transfer.out
        assert out is not None, "allocated"
        stream = result.stream(min_chunk_size=_DOWNLOAD_BYTES)
        while (chunk := self._ask(lambda: next(stream, None), lambda: _next(stream))) is not None:
            filled = transfer.num_bytes + len(chunk)
            if filled > len(out):
                raise StorageError(self.url, f"{name} has more than the announced {len(out)} bytes")
            out[transfer.num_bytes : filled] = np.frombuffer(chunk, dtype=np.uint8)
            transfer.num_bytes = filled
        if transfer.num_bytes != len(out):
            raise self._too_short(name, begin + transfer.num_bytes, begin + len(out))

    def _read_file(
        self, name: str, allocate: _Allocate, begin: int = 0, transfer: Transfer | None = None
    ) -> NDArray[np.uint8] | None:
        """Return the bytes of a local file from ``begin`` on, None if it does not exist."""
        # obstore is not used here: its stream of a local file takes 30 times as long.
        assert self._directory is not None
        try:
            # Non-blocking, because a named pipe must not block the reader.
            descriptor = os.open(self._directory / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            self._find_directory()
            return None
        try:
            status = os.fstat(descriptor)
            if stat.S_ISDIR(status.st_mode):
                return None
            if not stat.S_ISREG(status.st_mode):
                raise StorageError(self.url, f"{name} is not a regular file", "Delete it: no publisher has written it")
            if transfer is not None:
                transfer.modified = status.st_mtime
            data = allocate(status.st_size)
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

    def _too_short(self, name: str, num_bytes: int, expected: int) -> StorageError:
        return StorageError(self.url, f"{name} ended after {num_bytes} of {expected} bytes")

    def _write_file(self, name: str, buffers: Iterable[memoryview], *, overwrite: bool) -> bool:
        assert self._directory is not None
        if not self._find_directory():
            raise StorageError(self.url, "the directory does not exist")
        is_new = write_file(
            self._directory, name, buffers, overwrite=overwrite, fsync=self._fsync, check=self._check_directory
        )
        self._has_written = True
        if is_new:
            self._sync(name.rpartition("/")[0], name)
        return is_new

    def _check_directory(self) -> None:
        """Check that the local directory is the one that was found before, if any, and has not lost its objects."""
        if self._found is None:
            return
        assert self._directory is not None
        with suppress(FileNotFoundError, NotADirectoryError):
            if os.path.samestat(self._directory.stat(), self._found) and (
                # A new directory may have the inode number of a deleted one, but is empty.
                not self._has_written
                or (self._directory / "drafts").is_dir()  # cheaper than a listing
                or any(self._directory.iterdir())
            ):
                return
        raise WriteRefusedError(self.url)

    def _sync(self, prefix: str, name: str) -> None:
        """Flush the names in the directory ``prefix`` of a local store to disk; ``name`` is for the error."""
        if self._directory is None or not self._fsync:
            return
        try:
            sync_names(self._directory, prefix)
        except OSError as error:
            raise UnknownOutcomeError(self.url, name, f"{type(error).__name__}: {error}", prefix or ".") from error


@dataclass(frozen=True, slots=True)
class _Translation(AbstractContextManager[None]):
    """Context manager that converts errors of obstore and of the file system to :class:`StorageError`."""

    url: str

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, StorageError):
            return
        if isinstance(error, BaseError | OSError | NotImplementedError) or is_panic(error):
            reason = str(error).split("\n", maxsplit=1)[0]
            raise StorageError(self.url, f"{type(error).__name__}: {reason}", _remedy_of(reason)) from error


def _remedy_of(reason: str) -> str | None:
    """Return what to do about an error of obstore whose own text does not say it; None for the general advice."""
    if any(host in reason for host in _METADATA_HOSTS):
        return (
            "No credentials were found. Pass them with Storage(url, options={'access_key_id': ..., "
            "'secret_access_key': ...}), or set the provider's variables, such as AWS_ACCESS_KEY_ID"
        )
    if reason.endswith("builder error"):
        return "If the endpoint is an http url, pass Storage(url, options={'allow_http': 'true', ...})"
    return None


@dataclass(frozen=True, slots=True, eq=False)
class Repeatable(Iterable[T]):
    """Iterable that calls ``make`` for each iteration."""

    make: Callable[[], Iterator[T]]

    def __iter__(self) -> Iterator[T]:
        return self.make()


def _repeated(request: Callable[[], T]) -> T:
    """Send a request, and send it again while the store refuses it because of a concurrent one (409 on AWS)."""
    for attempt in range(1, _CREATE_ATTEMPTS):
        try:
            return request()
        except AlreadyExistsError:
            back_off(attempt)
    return request()


def back_off(attempt: int) -> None:
    """Sleep before a retry: 10 ms for ``attempt`` 1, then doubled each time, times a random factor of 0.5 to 1.5."""
    time.sleep(_PAUSE_SECONDS * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))  # noqa: S311  no secret


Location = str | os.PathLike[str] | Storage
"""URL or path of a stream, or its opened store."""


def open_storage(url: Location, *, create: bool = False) -> Storage:
    """Open the storage at ``url``; return ``url`` itself if it is a :class:`Storage`."""
    return url if isinstance(url, Storage) else Storage(url, create=create)


def _chunks(buffers: Iterable[memoryview]) -> Iterator[bytes]:
    """Yield copies of ``buffers`` in chunks of 8 MiB: obstore still uses a chunk while it requests the next one."""
    chunk = bytearray()
    for piece in pieces(buffers):  # no piece has bytes of two chunks
        chunk += piece
        if len(chunk) == UPLOAD_BYTES:
            yield bytes(chunk)
            chunk.clear()
    if chunk:
        yield bytes(chunk)


async def _next(stream: BytesStream) -> bytes | None:
    try:
        return await anext(stream)
    except StopAsyncIteration:
        return None


async def _collected(pages: ListStream[Sequence[ObjectMeta]]) -> list[ObjectMeta]:
    return [meta async for page in pages for meta in page]
