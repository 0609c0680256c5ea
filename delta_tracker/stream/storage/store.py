"""Interface of a kind of store. A new kind implements it in one file; see ``guide/extend.md``."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from delta_tracker.errors import MalformedError, StorageError

T = TypeVar("T")
# Large enough for a negligible cost per chunk, small enough to stay in the cache while it is copied.
CHUNK_BYTES = 4 << 20


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


@dataclass(slots=True, eq=False)
class ByteRange:
    """Bytes ``[begin, end)`` of an object to read. If ``end`` is None, the whole object, at most ``max_bytes``."""

    url: str
    name: str
    max_bytes: int
    out: NDArray[np.uint8] | None = None
    begin: int = 0
    end: int | None = None

    def memory(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return a buffer for this range of an object whose size is ``num_bytes``.

        Raises MalformedError if the object has more than ``max_bytes``, and StorageError if it ends before ``end``.
        """
        if self.end is not None:
            if num_bytes < self.end:
                raise self.too_short(num_bytes, self.end)
            num_bytes = self.end - self.begin
        elif num_bytes > self.max_bytes:
            raise MalformedError(self.name, f"it has {num_bytes} bytes, more than {self.max_bytes}")
        return np.empty(num_bytes, dtype=np.uint8) if self.out is None else self.out[:num_bytes]

    def of(self, data: bytes) -> NDArray[np.uint8]:
        """Return the bytes of this range. ``data`` contains the whole object."""
        memory = self.memory(len(data))
        memory.data[:] = memoryview(data)[self.begin : self.begin + len(memory)]
        return memory

    def too_short(self, num_bytes: int, expected: int) -> StorageError:
        """Return the error for an object that ends after ``num_bytes`` of ``expected`` bytes."""
        return StorageError(self.url, f"{self.name} ended after {num_bytes} of {expected} bytes")


@dataclass(frozen=True, slots=True, eq=False)
class Repeatable(Iterable[T]):
    """Iterable that calls ``make`` to get a new iterator for each iteration."""

    make: Callable[[], Iterator[T]]

    def __iter__(self) -> Iterator[T]:
        return self.make()


def pieces(buffers: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yield the bytes of ``buffers`` as views that end at multiples of ``CHUNK_BYTES`` and at the end of each buffer.

    The alignment lets a file system use large pages.
    """
    position = 0
    for buffer in buffers:
        rest = memoryview(buffer).cast("B")
        while rest:
            piece = rest[: CHUNK_BYTES - position % CHUNK_BYTES]
            yield piece
            position += len(piece)
            rest = rest[len(piece) :]


class Store(ABC):
    """Interface to the objects of one kind of store. Thread-safe.

    :class:`~delta_tracker.stream.storage.storage.Storage` checks an object's name, calls these methods, and converts
    OSError and obstore's errors to :class:`StorageError`. A write must not be visible before it is complete, and must
    be durable when the call returns, but deletions may become durable only at :meth:`sync`. A read-only store
    (``is_read_only``) implements only :meth:`read` and :meth:`stat`. Raise OSError for the errors of another client.
    The attributes are those of :class:`~delta_tracker.stream.storage.storage.Storage`.
    """

    url: str
    is_remote = True
    is_read_only = False
    lists_from = True

    @abstractmethod
    def read(self, span: ByteRange, transfer: Transfer) -> NDArray[np.uint8] | None:
        """Return the bytes ``span``, stored in ``span.memory(size)``; None if the object does not exist.

        Sets ``transfer.modified`` to the modification time. A store may continue an interrupted transfer.
        """

    @abstractmethod
    def stat(self, name: str) -> StoredObject | None:
        """Return the size and the modification time of an object; None if it does not exist."""

    def has_any(self, names: Sequence[str]) -> bool:
        """Return True if any of the objects ``names`` exists. All names must be in the same directory."""
        return any(map(self.stat, names))

    def put(self, name: str, buffers: Iterable[memoryview]) -> None:
        """Write or replace an object. Each buffer is written or copied before the next one is requested.

        Iterate over ``checked(buffers)`` of :mod:`delta_tracker.stream.interruption`, so that a background thread can
        be stopped between two buffers.
        """
        raise NotImplementedError

    def create(self, name: str, data: bytes) -> bool:
        """Write an object atomically if no object with this name exists.

        Returns False if an object with this name exists or may exist. The caller then calls :meth:`stat`, and retries
        if no such object exists.
        """
        raise NotImplementedError

    def replace(self, name: str, data: bytes) -> None:
        """Write or replace a small object atomically: readers see the old or the new bytes."""
        raise NotImplementedError

    def delete(self, name: str) -> None:
        """Delete an object; no-op if it does not exist."""
        raise NotImplementedError

    def objects(self, prefix: str, after: str) -> list[StoredObject]:
        """Return the objects in the directory ``prefix`` whose names are after ``after``, in any order.

        Objects in subdirectories may be omitted, because this library does not write any.
        """
        raise NotImplementedError

    def names(self, prefix: str, after: str) -> list[str]:
        """Return the names of the objects that :meth:`objects` returns, in any order."""
        return [each.name for each in self.objects(prefix, after)]

    def sync(self, prefix: str) -> None:  # noqa: B027  most stores have nothing to do
        """Make all creations and deletions of objects in ``prefix`` durable."""

    def delete_draft(self, name: str) -> bool:
        """Delete the draft ``name`` of an interrupted write. Return False if the draft is still being written."""
        self.delete(name)
        return True

    def has_directory(self, prefix: str) -> bool:  # noqa: ARG002  most stores have no volumes
        """Return False if the directory ``prefix`` is missing, for example because its volume is not mounted."""
        return True

    def is_same(self, other: "Store") -> bool:
        """Return True if ``other`` accesses the same objects."""
        return self.url.rstrip("/") == other.url.rstrip("/")

    def reopened(self) -> "Store":
        """Return the store that is now at the URL; ``self`` if the store has not been replaced."""
        return self

    def past_caches(self) -> "Store":
        """Return a store whose reads bypass all caches; ``self`` if there are no caches."""
        return self
