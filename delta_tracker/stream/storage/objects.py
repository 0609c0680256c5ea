"""Stores that are accessed through obstore: buckets of S3, Google Cloud Storage or Azure, and web servers."""

from __future__ import annotations

import itertools
import logging
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import numpy as np
import obstore
from numpy.typing import NDArray
from obstore.exceptions import AlreadyExistsError, BaseError, NotSupportedError, UnknownConfigurationKeyError
from obstore.store import from_url

from delta_tracker.errors import InvalidArgumentError, StorageError
from delta_tracker.stream.interruption import checked, is_interruptible, send_request
from delta_tracker.stream.storage.store import ByteRange, Store, StoredObject, Transfer, pieces
from delta_tracker.stream.storage.url import connection, seconds_of, suggestion

if TYPE_CHECKING:  # obstore has these names only in its stubs
    from obstore import GetOptions, GetResult
    from obstore.store import ObjectStore

T = TypeVar("T")
P = ParamSpec("P")
_logger = logging.getLogger(__name__)

# A multipart upload has at most 10,000 parts, which limits an object to 80 GB. Memory holds the parts in flight.
UPLOAD_BYTES = 8 << 20
_UPLOADS = 4
# Maximum number of bytes lost by an interrupted download. Smaller chunks are slower, larger ones are not faster.
_DOWNLOAD_BYTES = 256 << 10
_BYTES_PER_SECOND = 16 << 10  # least average rate of a download, after the time without any byte that is allowed
_ATTEMPTS = 8
_PAUSE_SECONDS = 0.01
# Id of the process in which obstore's threads run; empty before the first use.
_processes: list[int] = []
PAGE_OBJECTS = 1000  # objects that a remote store returns per request


class BucketStore(Store):
    """Store of objects in a bucket. Requests can be interrupted if the thread has a stop flag.

    Args:
        past_cache: True to send requests that bypass caches.
    """

    # True to compare only the size with that of an earlier response, because two caches of one object may differ in its
    # ETag and date. Its hash is checked in the end.
    _is_cached = False

    def __init__(self, url: str, options: Mapping[str, str] | None, *, past_cache: bool = False) -> None:
        self.url = url
        settings = connection(url, options, past_cache=past_cache)
        try:
            self._store: ObjectStore = from_url(url, **settings)
        except UnknownConfigurationKeyError as error:
            why = str(error).partition("\n")[0].rstrip(".")
            invalid = [name for name in options or () if f"'{name.lower()}'" in why]
            remedy = f"Use options of the store: {why}{suggestion(url, invalid[0]) if invalid else ''}"
            raise InvalidArgumentError("options", sorted(options or ()), remedy) from error

        self._silence_seconds = seconds_of(settings["client_options"]["read_timeout"])

    def read(self, span: ByteRange, transfer: Transfer) -> NDArray[np.uint8] | None:
        """Read ``span`` with as many requests as needed. If a response ends early, the next request covers the rest.

        A call with the ``transfer`` of a failed call requests only the missing bytes. Raises StorageError if the object
        has changed since the first request.
        """
        if span.begin == span.end:  # stores reject a request for an empty range
            found = self.stat(span.name)
            return None if found is None else span.memory(found.num_bytes)
        began = time.monotonic(), transfer.num_bytes
        while transfer.out is None or transfer.num_bytes < len(transfer.out):
            before = transfer.num_bytes
            try:
                result = self._request(span.name, span.begin + transfer.num_bytes, span.end)
                source = result.meta["size"], result.meta["e_tag"], result.meta["last_modified"]
                if self._is_cached and transfer.source is not None:
                    source = source[0], *transfer.source[1:]
                if transfer.source not in (None, source):
                    transfer.out, transfer.num_bytes, transfer.source = None, 0, None
                    raise StorageError(self.url, f"{span.name} changed while it was read")
                if transfer.out is None:
                    transfer.out = span.memory(source[0])
                    transfer.source = source
                    transfer.modified = source[2].timestamp() or None  # 0 if a web server sent none
                self._fill(result, span, transfer, *began)
            except FileNotFoundError:
                return None
            except (BaseError, OSError) as error:
                if transfer.num_bytes <= before or isinstance(error, StorageError):
                    raise
                begin = span.begin + transfer.num_bytes
                _logger.info("resuming %s at byte %d: %s", span.name, begin, type(error).__name__)
        return transfer.out

    def stat(self, name: str) -> StoredObject | None:
        try:
            meta = self._ask(obstore.head, obstore.head_async, self._client(), name)
        except FileNotFoundError:
            return None
        return StoredObject(name, meta["size"], meta["last_modified"].timestamp())

    def put(self, name: str, buffers: Iterable[memoryview]) -> None:
        """Write an object with one request, or with a multipart upload if it has more than 8 MiB."""
        store = self._client()
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

    def create(self, name: str, data: bytes) -> bool:
        try:
            self._ask(obstore.put, obstore.put_async, self._client(), name, data, mode="create")
        except AlreadyExistsError:
            return False
        return True

    def replace(self, name: str, data: bytes) -> None:
        store = self._client()
        _repeated(lambda: self._ask(obstore.put, obstore.put_async, store, name, data, use_multipart=False))

    def delete(self, name: str) -> None:
        store = self._client()
        try:
            _repeated(lambda: self._ask(obstore.delete, obstore.delete_async, store, name))
        except FileNotFoundError:
            return

    def objects(self, prefix: str, after: str) -> list[StoredObject]:
        pages = obstore.list(self._client(), prefix, offset=after or None, chunk_size=PAGE_OBJECTS)
        found: list[StoredObject] = []
        # obstore repeats a request for that time.
        while page := send_request(lambda: next(pages, None), lambda: _next(pages), 2 * self._silence_seconds):
            found += (StoredObject(each["path"], each["size"], each["last_modified"].timestamp()) for each in page)
        return found

    def _client(self) -> ObjectStore:
        """Return obstore's store. Raise an error in a forked child, in which obstore's threads do not exist."""
        if not _processes:
            _processes.append(os.getpid())
        if os.getpid() not in _processes:
            reason = "this process was forked after obstore was used, and lacks its threads"
            raise StorageError(self.url, reason, "Start this process with spawn, or use no store before the fork")
        return self._store

    def _ask(
        self, blocking: Callable[P, T], request: Callable[P, Awaitable[T]], *args: P.args, **options: P.kwargs
    ) -> T:
        return send_request(partial(blocking, *args, **options), partial(request, *args, **options))

    def _request(self, name: str, begin: int, end: int | None) -> GetResult:
        options: GetOptions = {}
        if end is not None:
            options = {"range": (begin, end)}
        elif begin:
            options = {"range": {"offset": begin}}
        return self._ask(obstore.get, obstore.get_async, self._client(), name, options=options)

    def _fill(self, result: GetResult, span: ByteRange, transfer: Transfer, began: float, first: int) -> None:
        """Append the bytes of a response to ``transfer``, which contains the object's bytes from ``span.begin`` on.

        Raises StorageError if the average rate is too low since ``began``, when ``transfer`` contained ``first`` bytes.
        """
        out = transfer.out
        assert out is not None, "allocated"

        def following() -> bytes | None:
            due = min(transfer.num_bytes + _DOWNLOAD_BYTES, len(out)) - first
            seconds = began + self._silence_seconds + due / _BYTES_PER_SECOND - time.monotonic()
            if seconds > 0:
                with suppress(TimeoutError):
                    chunk: bytes | None = send_request(lambda: next(stream, None), lambda: _next(stream), seconds)
                    return chunk
            reason = f"{span.name} arrives too slowly: {transfer.num_bytes - first} bytes"
            raise StorageError(self.url, f"{reason} in {time.monotonic() - began:.0f} s")

        # Without a stop flag, the wait for a chunk has no limit: take what has arrived, and look at the time.
        stream = result.stream(min_chunk_size=_DOWNLOAD_BYTES if is_interruptible() else 1)
        while (chunk := following()) is not None:
            filled = transfer.num_bytes + len(chunk)
            if filled > len(out):
                raise StorageError(self.url, f"{span.name} has more than the announced {len(out)} bytes")
            out[transfer.num_bytes : filled] = np.frombuffer(chunk, dtype=np.uint8)
            transfer.num_bytes = filled
        if transfer.num_bytes != len(out):
            raise span.too_short(span.begin + transfer.num_bytes, span.begin + len(out))


class HttpStore(BucketStore):
    """Read-only store at an http URL: a web server, or a cache that may ignore requests to bypass it."""

    is_read_only = True
    lists_from = False
    _is_cached = True

    def __init__(self, url: str, options: Mapping[str, str] | None, *, past_cache: bool = False) -> None:
        super().__init__(url, options, past_cache=past_cache)
        self._options = options
        self._past_cache = past_cache

    def read(self, span: ByteRange, transfer: Transfer) -> NDArray[np.uint8] | None:
        try:
            return super().read(span, transfer)
        except NotSupportedError as error:
            reason = f"{span.name}: the server answers a range with the whole object"
            raise StorageError(self.url, reason, "Make it pass ranges on, or cache slices") from error

    def past_caches(self) -> Store:
        return self if self._past_cache else HttpStore(self.url, self._options, past_cache=True)


def _repeated(request: Callable[[], T]) -> T:
    """Send a request. Repeat the request while the store refuses it because of a concurrent request (409 on AWS)."""
    for attempt in range(1, _ATTEMPTS):
        try:
            return request()
        except AlreadyExistsError:
            back_off(attempt)
    return request()


def back_off(attempt: int) -> None:
    """Sleep before a retry: 10 ms before the first retry, doubled for each further retry, with a jitter of 50 %."""
    time.sleep(_PAUSE_SECONDS * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))  # noqa: S311  no secret


def _chunks(buffers: Iterable[memoryview]) -> Iterator[bytes]:
    """Yield copies of ``buffers`` in chunks of 8 MiB, because obstore uses a chunk while it requests the next one."""
    chunk = bytearray()
    for piece in pieces(buffers):  # no piece has bytes of two chunks
        chunk += piece
        if len(chunk) == UPLOAD_BYTES:
            yield bytes(chunk)
            chunk.clear()
    if chunk:
        yield bytes(chunk)


async def _next(stream: AsyncIterator[T]) -> T | None:
    return await anext(stream, None)
