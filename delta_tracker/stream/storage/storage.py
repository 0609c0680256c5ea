"""Access to the objects of a stream in any kind of store. Checks names and counts operations."""

from __future__ import annotations

import copy
import operator
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray
from obstore.exceptions import BaseError, NotSupportedError

from delta_tracker.errors import InvalidArgumentError, StorageError, UnsupportedStoreError, WriteRefusedError, is_panic
from delta_tracker.stream.storage.directory import DirectoryStore
from delta_tracker.stream.storage.memory import MemoryStore
from delta_tracker.stream.storage.objects import BucketStore, HttpStore, back_off
from delta_tracker.stream.storage.store import ByteRange, Store, StoredObject, Transfer
from delta_tracker.stream.storage.url import PLAIN_NAME, check_name, is_http, is_remote, local_directory, store_url

# Hosts that obstore asks for credentials if none are configured.
_METADATA_HOSTS = ("169.254.169.254", "metadata.google.internal")
_CREATE_ATTEMPTS = 8
_SHORT_NAME_LENGTH = 200  # of a plain name, which is not checked further


class Storage:
    """Store of the objects below one URL. Thread-safe.

    Names of objects are relative to the URL and use forward slashes. A name is invalid if it contains an empty, ``.``
    or ``..`` component, a backslash, a ``#`` or a control character, or more than 1,024 bytes. All methods raise
    :class:`InvalidArgumentError` for an invalid name, and :class:`StorageError` if the store fails. A local object is
    flushed to disk (fsync) before the call that wrote it returns. If the object was written, but its directory
    entry cannot be flushed, :class:`UnknownOutcomeError` is raised.

    At an http URL, a web server or a cache only serves single objects. For such a URL, all methods that write, delete
    or list raise :class:`UnsupportedStoreError`.

    Args:
        url: ``file:///absolute/directory``, ``s3://bucket/prefix``, ``gs://...``, ``az://...``, ``memory://`` (a
            new store for each instance), ``http://host/path`` or ``https://host/path``; or the path of a directory;
            or a :class:`~delta_tracker.stream.storage.store.Store` of another kind, without the other arguments.
        create: True to create a missing local directory. If False, a missing directory is read as an empty store until
            it exists. If the directory is replaced, deleted or emptied later, writes, deletions and syncs raise
            :class:`WriteRefusedError`.
        fsync: if False, the system decides when local objects are flushed to disk, and a machine failure may lose them.
        options: options of a remote store as obstore names them, such as ``endpoint``, ``region``, ``access_key_id``,
            ``secret_access_key``, ``allow_http``, ``read_timeout`` (maximum time without data, 30s by default; a
            download that takes longer must average 16 KiB per second) or ``timeout`` (of a whole request, no limit by
            default). All values are strings.

    Attributes:
        url: URL of the store.
        is_remote: True if the store is accessed over a network, which may alter data.
        is_read_only: True if the store cannot be written to, for example at an http URL.
        lists: True if the store can list its objects; False at an http URL.
        lists_from: True if a listing that starts after a name skips the earlier names at no cost, as in object stores.
        requests: number of operations so far, by kind: ``read``, ``size``, ``list``, ``write`` and ``delete``. An
            operation that takes several requests counts once.

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
        url: str | os.PathLike[str] | Store,
        *,
        create: bool = False,
        fsync: bool = True,
        options: Mapping[str, str] | None = None,
    ) -> None:
        if isinstance(url, Store):
            store = url
        else:
            with _Translation(url := store_url(url)):
                store = _opened(url, options, create=create, fsync=fsync)
        self.url = store.url
        self.is_remote = store.is_remote
        self.is_read_only = store.is_read_only
        self.lists = not store.is_read_only
        self.lists_from = store.lists_from
        self.requests = dict.fromkeys(("read", "size", "list", "write", "delete"), 0)
        self._store = store
        self._uncached: Storage | None = None
        self._translated = _Translation(store.url)

    @classmethod
    def over(cls, store: Store, origin: Storage) -> Self:
        """Return a storage that accesses ``store``, a wrapper of ``origin``. Both have the same :attr:`uncached`."""
        view = cls(store)
        vars(view).update(_uncached=origin.uncached)
        return view

    def is_same(self, other: Storage) -> bool:
        """Return True if ``other`` accesses the same directory or has the same url. Options are not compared."""
        with self._translated:
            return self is other or self._store.is_same(other._store)

    @property
    def uncached(self) -> Storage:
        """View whose reads bypass HTTP caches, if the caches allow it; ``self`` if the store is not at an http URL."""
        if self._uncached is None:
            store = self._store.past_caches()
            if store is self._store:
                return self
            past = copy.copy(self)  # keeps the class and shares the counts
            vars(past).update(_store=store)
            self._uncached = past
        return self._uncached

    def reopened(self) -> Storage:
        """Return a store for the directory that is now at the URL; ``self`` if the directory is unchanged or missing.

        A publisher must not call this method, because its claim is in the directory that it opened.
        """
        with self._translated:
            store = self._store.reopened()
        return self if store is self._store else Storage(store)

    def put(self, name: str, buffers: Iterable[memoryview]) -> None:
        """Write the concatenated ``buffers`` as an object, replacing an existing object of the same name.

        Each buffer is written or copied before the next one is requested, so that its memory can then be reused. A
        remote object may have up to 80 GB, and its write needs up to 100 MB of memory. No partial object is visible.

        If a remote store refuses a request because of a concurrent request (409 on AWS), the write is retried for about
        a second. To be retried, ``buffers`` of more than 8 MiB must be iterable again, such as a :class:`Repeatable`.
        """
        with self._operation("write", name, "put()"):
            self._store.put(name, buffers)

    def create(self, name: str, data: bytes) -> bool:
        """Create an object. Return False if an object with this name exists. If several writers race, one succeeds.

        If a call fails because the response was lost, the object may exist. Raises :class:`WriteRefusedError` if the
        store refused all attempts within a second (status 409 on AWS), although no object with this name exists.
        """
        with self._operation("write", name, "create()"):
            for attempt in range(_CREATE_ATTEMPTS):
                if attempt:
                    back_off(attempt)
                if self._create_once(name, data):
                    return True
                if self.size(name) is not None:
                    return False
        raise WriteRefusedError.taken(self.url, name, _CREATE_ATTEMPTS)

    def _create_once(self, name: str, data: bytes) -> bool:
        """Try once to create an object. The result False does not prove that the object exists, see :meth:`create`."""
        return self._store.create(name, data)

    def replace(self, name: str, data: bytes) -> None:
        """Write or replace a small object atomically: readers see the old or the new bytes, even after a power loss.

        If a call fails because the response was lost, the object may have been written.
        """
        with self._operation("write", name, "replace()"):
            self._store.replace(name, data)

    def read(
        self, name: str, *, max_bytes: int, out: NDArray[np.uint8] | None = None, transfer: Transfer | None = None
    ) -> NDArray[np.uint8] | None:
        """Return the bytes of an object; None if it does not exist.

        Args:
            name: name of the object.
            max_bytes: maximum size of the object.
            out: memory of at least ``max_bytes``, of which the result is the beginning. None allocates new memory.
            transfer: object that receives the modification time, and keeps the bytes received before a
                :class:`StorageError`. A later call with the same transfer requests only the rest of a remote object.

        Raises:
            MalformedError: if the object has more than ``max_bytes`` bytes; no memory was allocated.
            StorageError: if the object cannot be read, or has changed since the failed call. After a change, the next
                call starts from the beginning.
        """
        if out is not None and len(out) < max_bytes:
            raise InvalidArgumentError("out", len(out), f"Pass an array of {max_bytes} bytes")
        with self._operation("read", name):
            return self._store.read(ByteRange(self.url, name, max_bytes, out), transfer or Transfer())

    def read_range(
        self, name: str, begin: int, end: int, *, transfer: Transfer | None = None
    ) -> NDArray[np.uint8] | None:
        """Return the bytes ``[begin, end)`` of an object; None if it does not exist.

        See :meth:`read` for ``transfer``. Raises :class:`StorageError` if the object is too short; no memory is
        allocated in that case.
        """
        if not 0 <= begin <= end:
            raise InvalidArgumentError("begin, end", (begin, end), "Pass 0 <= begin <= end")
        with self._operation("read", name):
            return self._store.read(ByteRange(self.url, name, end - begin, None, begin, end), transfer or Transfer())

    def read_span(self, span: ByteRange, transfer: Transfer) -> NDArray[np.uint8] | None:
        """Read ``span`` with :meth:`read` or :meth:`read_range`. Stores that wrap this object call this method."""
        if span.end is None:
            return self.read(span.name, max_bytes=span.max_bytes, out=span.out, transfer=transfer)
        return self.read_range(span.name, span.begin, span.end, transfer=transfer)

    def size(self, name: str) -> int | None:
        """Return the size of an object in bytes; None if it does not exist."""
        found = self.stat(name)
        return None if found is None else found.num_bytes

    def stat(self, name: str) -> StoredObject | None:
        """Return an object's size and modification time (0 if a web server sends none); None if it does not exist."""
        with self._operation("size", name):
            return self._store.stat(name)

    def has_any(self, names: Sequence[str]) -> bool:
        """Return True if any of ``names`` exists. The names must differ only in digits; only the first is validated."""
        with self._operation("size", names[0]):
            return self._store.has_any(names)

    def delete(self, name: str) -> None:
        """Delete an object; no-op if it does not exist.

        Call :meth:`sync` after deleting a local object; otherwise, it may reappear after a power loss.
        """
        with self._operation("delete", name, "delete()"):
            self._store.delete(name)

    def sync(self, prefix: str) -> None:
        """Flush all creations and deletions of objects in ``prefix`` to disk, or raise :class:`UnknownOutcomeError`.

        Required only after :meth:`delete`, because other methods flush their own changes. No-op for remote stores, with
        ``fsync=False``, and if the directory does not exist.
        """
        with self._operation(None, prefix, "sync()", argument="prefix"):
            self._store.sync(prefix)

    def delete_draft(self, name: str) -> bool:
        """Delete the file in ``drafts/`` of an interrupted write. Return False if the file is in use or missing."""
        with self._operation(None, name, "delete_draft()"):
            return self._store.delete_draft(name)

    def has_directory(self, prefix: str) -> bool:
        """Return False if the local directory ``prefix`` is missing, for example because its volume is not mounted."""
        check_name("prefix", prefix)
        with self._translated:
            return self._store.has_directory(prefix)

    def objects(self, prefix: str, *, after: str | None = None) -> list[StoredObject]:
        """Return the objects in the directory ``prefix``, sorted by name. Omits names up to and including ``after``.

        A local listing skips directories, and files with invalid object names; see :func:`list_files`.
        """
        with self._operation("list", prefix, "a listing", argument="prefix", after=after):
            return sorted(self._store.objects(prefix, after or ""), key=operator.attrgetter("name"))

    def names(self, prefix: str, *, after: str | None = None) -> list[str]:
        """Return the sorted names of the objects that :meth:`objects` returns. Faster for a local directory."""
        with self._operation("list", prefix, "a listing", argument="prefix", after=after):
            return sorted(self._store.names(prefix, after or ""))

    def _operation(
        self, kind: str | None, name: object, call: str = "", *, argument: str = "name", after: str | None = None
    ) -> _Translation:
        """Count an operation, and return the context manager in which the store must be called.

        Checks the names, and rejects a ``call`` that a read-only store does not support.
        """
        if not isinstance(name, str) or len(name) > _SHORT_NAME_LENGTH or PLAIN_NAME.fullmatch(name) is None:
            check_name(argument, name)
        if after is not None:
            check_name("after", after)
        if call and self.is_read_only:
            raise UnsupportedStoreError(self.url, f"{call} of {name}")
        if kind is not None:
            self.requests[kind] += 1
        return self._translated

    def probe(self) -> None:
        """Check that the store rejects the second of two requests to create an object. Deletes the object afterwards.

        Raises :class:`UnsupportedStoreError` if the store accepts both, or does not support exclusive creation.
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


@dataclass(frozen=True, slots=True)
class _Translation(AbstractContextManager[None]):
    """Context manager that converts errors of obstore and of the file system to :class:`StorageError`."""

    url: str

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, StorageError):
            return
        if isinstance(error, BaseError | OSError | NotImplementedError) or is_panic(error):
            reason = str(error).split("\n", maxsplit=1)[0]
            raise StorageError(self.url, f"{type(error).__name__}: {reason}", _remedy_of(reason)) from error


def _remedy_of(reason: str) -> str | None:
    """Return a specific remedy for an error of obstore; None if the text already contains one, or none is known."""
    if any(host in reason for host in _METADATA_HOSTS):
        return (
            "No credentials were found. Pass them with Storage(url, options={'access_key_id': ..., "
            "'secret_access_key': ...}), or set the provider's variables, such as AWS_ACCESS_KEY_ID"
        )
    if reason.endswith("builder error"):
        return (
            "If the endpoint is an http url, pass Storage(url, options={'allow_http': 'true', ...}), or "
            "--option allow_http=true to a command"
        )
    return None


Location = str | os.PathLike[str] | Storage
"""URL or path of a stream, or its opened store."""


def open_storage(url: Location, *, create: bool = False) -> Storage:
    """Open the storage at ``url``; return ``url`` itself if it is a :class:`Storage`."""
    return url if isinstance(url, Storage) else Storage(url, create=create)


def _opened(url: str, options: Mapping[str, str] | None, *, create: bool, fsync: bool) -> Store:
    directory = local_directory(url)
    if not fsync and directory is None:
        raise InvalidArgumentError("fsync", fsync, "Omit it: only a local directory is synced")
    if is_remote(url):
        return HttpStore(url, options) if is_http(url) else BucketStore(url, options)
    if options is not None:
        raise InvalidArgumentError("options", type(options), "Omit them: only a remote store has options")
    return MemoryStore(url) if directory is None else DirectoryStore(url, directory, create=create, fsync=fsync)
