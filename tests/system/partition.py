"""A store that can be cut off: :class:`CutStorage`, with a switch in memory that processes share."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any, TypeVar

from delta_tracker.errors import StorageError
from delta_tracker.stream.storage.storage import Storage, StoredObject

T = TypeVar("T")
_POLL_SECONDS = 0.002


class Cut(IntEnum):
    """What happens to the requests of a store."""

    NONE = 0
    """They are performed."""
    REFUSED = 1
    """They fail at once."""
    LATE = 2
    """They wait until the cut ends, and are then performed: the worst case for fencing."""
    LOST = 3
    """They wait until the cut ends, and then fail."""
    UNANSWERED = 4
    """The next entry of the log is created, but the request fails, as all requests of this process after it."""


class Switch:
    """Kind of the cut, in memory that is allocated before the fork of the processes that share it."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 1)

    @property
    def cut(self) -> Cut:
        """The current cut."""
        return Cut(self._memory[0])

    def turn(self, cut: Cut) -> None:
        """Start a cut, or end it with ``Cut.NONE``."""
        self._memory[0] = cut


class CutStorage(Storage):
    """Store whose requests fail or wait while it is cut off.

    Args:
        url: url of the store.
        switch: the current cut.
        create: True to create a missing local directory.
    """

    def __init__(self, url: str, switch: Switch, *, create: bool = False) -> None:
        super().__init__(url, create=create)
        self._switch = switch
        self._has_lost_an_answer = False

    def reopened(self) -> Storage:
        """Return this object: its directory is never replaced."""
        return self

    def put(self, name: str, buffers: Iterable[memoryview]) -> None:
        """Write an object, see :class:`Storage`."""
        self._ask_cut(name, lambda: super(CutStorage, self).put(name, buffers))

    def create(self, name: str, data: bytes) -> bool:
        """Create an object, see :class:`Storage`."""
        return self._ask_cut(name, lambda: super(CutStorage, self).create(name, data), is_entry=name.startswith("log/"))

    def replace(self, name: str, data: bytes) -> None:
        """Replace an object, see :class:`Storage`."""
        self._ask_cut(name, lambda: super(CutStorage, self).replace(name, data))

    def read(self, name: str, **options: Any) -> Any:
        """Read an object, see :class:`Storage`."""
        return self._ask_cut(name, lambda: super(CutStorage, self).read(name, **options))

    def read_range(self, name: str, begin: int, end: int) -> Any:
        """Read a part of an object, see :class:`Storage`."""
        return self._ask_cut(name, lambda: super(CutStorage, self).read_range(name, begin, end))

    def size(self, name: str) -> int | None:
        """Return the size of an object, see :class:`Storage`."""
        return self._ask_cut(name, lambda: super(CutStorage, self).size(name))

    def delete(self, name: str) -> None:
        """Delete an object, see :class:`Storage`."""
        self._ask_cut(name, lambda: super(CutStorage, self).delete(name))

    def sync(self, prefix: str) -> None:
        """Wait until names are on disk, see :class:`Storage`."""
        self._ask_cut(prefix, lambda: super(CutStorage, self).sync(prefix))

    def has_directory(self, prefix: str) -> bool:
        """Return True if there is a directory, see :class:`Storage`."""
        return self._ask_cut(prefix, lambda: super(CutStorage, self).has_directory(prefix))

    def objects(self, prefix: str, *, after: str | None = None) -> list[StoredObject]:
        """List objects, see :class:`Storage`."""
        return self._ask_cut(prefix, lambda: super(CutStorage, self).objects(prefix, after=after))

    def names(self, prefix: str, *, after: str | None = None) -> list[str]:
        """List the names of objects, see :class:`Storage`."""
        return self._ask_cut(prefix, lambda: super(CutStorage, self).names(prefix, after=after))

    def _ask_cut(self, name: str, request: Callable[[], T], *, is_entry: bool = False) -> T:
        cut = self._switch.cut
        if cut is Cut.REFUSED or (cut is Cut.UNANSWERED and self._has_lost_an_answer):
            raise StorageError(self.url, f"{name}: the store is cut off")
        if cut is Cut.UNANSWERED and is_entry:
            request()
            self._has_lost_an_answer = True
            raise StorageError(self.url, f"{name}: the answer was lost")
        if cut in (Cut.LATE, Cut.LOST):
            while self._switch.cut is not Cut.NONE:
                time.sleep(_POLL_SECONDS)
            if cut is Cut.LOST:
                raise StorageError(self.url, f"{name}: the request was lost")
        if cut is Cut.NONE:
            self._has_lost_an_answer = False
        return request()
