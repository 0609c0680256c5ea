"""File operations below the directory of a world, of which one can fail in the middle of a call.

They are found by Python's audit events, so that this needs nothing of the library. A hook stays until the process
ends, so there is one for all worlds.
"""

from __future__ import annotations

import errno
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import get_ident
from typing import Any

from tests.simulation.threads import SCHEDULER, Killed

_CHANGES = {"os.link": os.link, "os.rename": os.replace, "os.remove": os.remove}
_EVENTS = {"open", "os.scandir", "os.mkdir", *_CHANGES}
_SLOW_SECONDS = 40.0
_MOST_OPERATIONS = 50_000  # of one call
FAULTS = ("error", "outage", "slow", "lost answer", "death", "conflict")


class EndlessCallError(Exception):
    """Raised in a call that reads on for ever."""


@dataclass
class Fault:
    """What happens at one operation of a call.

    Args:
        kind: one of ``FAULTS``. An ``outage`` lasts until the end of the call, and so does a ``death``, after which
            the process of the call is discarded. With a ``lost answer``, a change is made and raises nevertheless. A
            ``conflict`` is the answer of an object store to a creation while another request creates the object.
        number: number of operations, or of changes for a lost answer, that succeed before it.
        has_begun: True once it has happened.
        has_killed: True if it has killed a process of a job, instead of letting the call fail.
    """

    kind: str
    number: int
    has_begun: bool = False
    has_killed: bool = False


class Disk:
    """Observer of the file operations below a directory. A fault may reach any thread that runs during the call.

    Attributes:
        folder: the directory, None for no world.
        fault: fault of the next call, None for none.
        reached: number of faults that happened, by kind.
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.fault: Fault | None = None
        self.reached: Counter[str] = Counter()
        self._is_armed = False
        self._num_operations = 0  # of the call
        self._inside: set[int] = set()  # threads whose operations are not observed

    @contextmanager
    def call(self) -> Iterator[None]:
        """Context manager for a call of the library, in which the fault happens."""
        self._is_armed, self._num_operations = True, 0
        try:
            yield
        finally:
            self._is_armed = False

    def count(self) -> None:
        """Count an operation or a request. Raise EndlessCallError if the call has too many."""
        self._num_operations += 1
        if self._is_armed and self._num_operations > _MOST_OPERATIONS:
            raise EndlessCallError(f"a call of more than {_MOST_OPERATIONS} operations")

    def has_conflict(self) -> bool:
        """Return True if the creation of an object is answered with a conflict."""
        fault = self.fault
        if not self._is_armed or fault is None or fault.kind != "conflict" or fault.has_begun:
            return False
        fault.has_begun = True
        self.reached["conflict"] += 1
        return True

    def observe(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Let other threads run, date a file that gets its name, and let the operation fail if it is its turn."""
        if event not in _EVENTS or self.folder is None or (thread := get_ident()) in self._inside:
            return
        path = arguments[0]
        if not isinstance(path, str | os.PathLike) or not os.fspath(path).startswith(f"{self.folder}{os.sep}"):
            return
        SCHEDULER.pause()
        self.count()
        self._inside.add(thread)
        try:
            if event in ("os.link", "os.rename"):
                os.utime(path, (SCHEDULER.now, SCHEDULER.now))
            if self._is_armed and self.fault is not None and self.fault.kind != "conflict":
                self._fail(self.fault, event, arguments)
        finally:
            self._inside.remove(thread)

    def _fail(self, fault: Fault, event: str, arguments: tuple[Any, ...]) -> None:
        if fault.kind == "lost answer" and event not in _CHANGES:
            return
        fault.number -= 1
        is_over = fault.has_killed or (fault.has_begun and fault.kind not in ("outage", "death"))
        if fault.number >= 0 or is_over:
            return
        self.reached[fault.kind] += not fault.has_begun
        fault.has_begun = True
        if fault.kind == "death" and SCHEDULER.process.is_mortal:
            fault.has_killed = SCHEDULER.process.is_killed = True
            raise Killed
        if fault.kind == "slow":
            SCHEDULER.sleep(_SLOW_SECONDS)
            return
        if fault.kind == "lost answer":
            _CHANGES[event](*arguments[: 1 if event == "os.remove" else 2])
        raise OSError(errno.EIO, os.strerror(errno.EIO), os.fspath(arguments[0]))


@cache
def disk() -> Disk:
    """Return the observer of this process."""
    found = Disk()
    sys.addaudithook(found.observe)
    return found
