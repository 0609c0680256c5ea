"""Locks that measure how long threads wait for them: ``install()`` before the library is imported.

Replaces ``threading.Lock`` and ``threading.RLock``, and so the locks inside conditions, events, queues and pools that
are made later. Time that a thread spends in ``Condition.wait`` does not count as a wait for a lock.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  holds a lock while the process forks: not to be watched
import itertools
import math
import os
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

_PLUMBING = ("/threading.py", "/queue.py", "/concurrent/futures/", "/watched_locks.py")


@dataclass
class Waits:
    """Measured waits for locks.

    Args:
        limit_seconds: the longest allowed wait.
        longest: seconds of the longest wait, and where its lock was made.
        too_long: for each longer wait: where the lock was made, and the stacks of its holder and of the waiting thread,
            both taken when the limit was exceeded.
    """

    limit_seconds: float
    longest: tuple[float, str] = (0.0, "")
    too_long: list[str] = field(default_factory=list)
    num_contended: int = 0
    forking_seconds: float = 0.0
    _acquired: Any = field(default_factory=itertools.count)

    @property
    def num_acquired(self) -> int:
        """Number of lock acquisitions."""
        return int(repr(self._acquired)[len("count(") : -1])


class _Timer:
    """Timer that excludes the time in which this process forks, which stops all threads."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._begin = time.monotonic() - waits.forking_seconds

    def seconds(self) -> float:
        return time.monotonic() - self._waits.forking_seconds - self._begin


class _Watched:
    """A lock of either kind, with the interface that :class:`threading.Condition` needs."""

    def __init__(self, lock: Any, waits: Waits) -> None:
        self._lock = lock
        self._waits = waits
        self._place = _place(sys._getframe(2))
        self._holder: int | None = None
        for name in ("_is_owned", "_release_save", "_recursion_count"):  # a condition checks for these attributes
            if hasattr(lock, name):
                setattr(self, name, getattr(lock, name))
        if hasattr(lock, "_acquire_restore"):
            self._acquire_restore = self._restore

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not self._lock.acquire(blocking=False) and (not blocking or not self._wait(timeout)):
            return False
        self._holder = threading.get_ident()
        next(self._waits._acquired)
        return True

    def release(self) -> None:
        self._lock.release()

    def locked(self) -> bool:
        return self._lock.locked()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()

    def _restore(self, state: Any) -> None:
        """Acquire again at the end of ``Condition.wait``."""
        timer = _Timer(self._waits)
        self._lock._acquire_restore(state)
        self._note(timer.seconds())
        self._holder = threading.get_ident()
        next(self._waits._acquired)

    def _at_fork_reinit(self) -> None:
        self._lock._at_fork_reinit()
        self._holder = None

    def _wait(self, timeout: float) -> bool:
        waits, timer = self._waits, _Timer(self._waits)
        deadline = math.inf if timeout < 0 else time.monotonic() + timeout
        is_reported = False
        while True:
            left = deadline - time.monotonic()
            more = left if is_reported else min(left, max(waits.limit_seconds - timer.seconds(), 0.01))
            is_acquired = self._lock.acquire(True, -1 if more == math.inf else max(more, 0.0))
            if is_acquired or more == left:
                break
            if timer.seconds() > waits.limit_seconds:
                waits.too_long.append(f"{self._place}\nheld by:\n{self._stack()}\nwaited for by:\n{_stack_here()}")
                is_reported = True
        self._note(timer.seconds())
        return is_acquired

    def _note(self, seconds: float) -> None:
        self._waits.num_contended += 1  # two concurrent waits may count as one
        if seconds > self._waits.longest[0]:
            self._waits.longest = seconds, self._place
        if seconds > self._waits.limit_seconds:
            self._waits.too_long.append(f"{self._place}: {seconds:.1f} s")

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._holder or 0)
        return "".join(traceback.format_stack(frame)) if frame else "a thread that has ended"


def install(limit_seconds: float) -> Waits:
    """Watch every lock that is made later in this process."""
    waits = Waits(limit_seconds)
    begins = threading.local()

    def begin() -> None:
        begins.time = time.monotonic()

    def end() -> None:
        waits.forking_seconds += time.monotonic() - begins.time

    os.register_at_fork(before=begin, after_in_parent=end)
    lock, reentrant_lock = threading.Lock, threading.RLock
    threading.Lock = lambda: _Watched(lock(), waits)  # type: ignore[misc,assignment]
    threading.RLock = lambda: _Watched(reentrant_lock(), waits)  # type: ignore[misc,assignment]
    return waits


def _stack_here() -> str:
    return "".join(traceback.format_stack(sys._getframe(3)))


def _place(frame: FrameType | None) -> str:
    """Return where a lock was made, skipping frames of the standard library."""
    while frame is not None and any(each in frame.f_code.co_filename for each in _PLUMBING):
        frame = frame.f_back
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
