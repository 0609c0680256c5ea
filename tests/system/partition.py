"""Rule for a store that can be cut off, with a switch in memory that processes share."""

from __future__ import annotations

import mmap
import time
from enum import IntEnum
from typing import Any

from delta_tracker.errors import StorageError
from tests.stores.wrapped import Operation, Perform

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


class CutOff:
    """Rule that fails requests or lets them wait while the store of a process is cut off.

    Args:
        switch: the current cut.
    """

    def __init__(self, switch: Switch) -> None:
        self._switch = switch
        self._has_lost_an_answer = False

    def __call__(self, operation: Operation, perform: Perform) -> Any:
        """Perform an operation, or fail it."""
        cut, name = self._switch.cut, operation.name
        if cut is Cut.REFUSED or (cut is Cut.UNANSWERED and self._has_lost_an_answer):
            raise StorageError(operation.url, f"{name}: the store is cut off")
        if cut is Cut.UNANSWERED and operation.kind == "create" and name.startswith("log/"):
            perform(operation)
            self._has_lost_an_answer = True
            raise StorageError(operation.url, f"{name}: the answer was lost")
        if cut in (Cut.LATE, Cut.LOST):
            while self._switch.cut is not Cut.NONE:
                time.sleep(_POLL_SECONDS)
            if cut is Cut.LOST:
                raise StorageError(operation.url, f"{name}: the request was lost")
        if cut is Cut.NONE:
            self._has_lost_an_answer = False
        return perform(operation)
