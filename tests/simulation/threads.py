"""Threads of which one runs at a time, in an order that a seed decides, and time that passes while all of them wait.

``install()`` replaces the locks, threads, queues, clocks and sleeps of Python. It must run before anything imports the
library or ``concurrent.futures``, which keep references. The threads of a simulation are real threads, but each waits
for its turn. A turn may end wherever a thread takes a lock, waits, sleeps or calls :meth:`Scheduler.pause`. The clock
stands still while a thread can run; when all wait, it moves to the first end of a wait.
"""

from __future__ import annotations

import _thread
import gc
import math
import queue
import random
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")
EPOCH = 4e9  # later than any real time, so that a file with a real modification time is recognised
_PAUSES = 8  # of which one ends a turn
_MOST_TURNS = 200_000  # without a step of the main thread


class DeadlockError(Exception):
    """Raised in the main thread if all threads wait for each other, or run without an end."""


class Killed(BaseException):
    """Raised in the threads of a process that was killed. ``except Exception`` does not catch it."""


@dataclass(eq=False)
class Clock:
    """Wall clock of a host.

    Attributes:
        offset: its time minus that of the stores, in seconds.
    """

    offset: float = 0.0


@dataclass(eq=False)
class Process:
    """Threads that are killed together.

    Attributes:
        name: name for messages.
        is_mortal: True if a fault may kill it.
        is_killed: True if each of its threads ends at its next turn.
    """

    name: str
    is_mortal: bool = False
    is_killed: bool = False


@dataclass(eq=False)
class _Task:
    """Thread of the simulation, and what it waits for."""

    name: str
    process: Process
    clock: Clock
    gate: Any = field(default_factory=_thread.allocate_lock)
    is_ready: Callable[[], bool] | None = None  # None if it can run
    deadline: float = math.inf

    def __post_init__(self) -> None:
        self.gate.acquire()


class Scheduler:
    """Order of the threads of a simulation.

    Attributes:
        now: time in Unix seconds, by the clock of the stores.
        turns: number of turns so far.
        failures: exceptions that ended a thread.
    """

    def __init__(self) -> None:
        self.now, self.turns = EPOCH, 0
        self.failures: list[BaseException] = []
        self._main = self._current = _Task("main", Process("main"), Clock())
        self._tasks = [self._main]
        self._chance = random.Random(0)
        self._ids = random.Random(0)
        self._deadlock = ""
        self._is_choosing = False  # while it asks what threads wait for, which may read files
        self._alone: _Task | None = None

    def restart(self, seed: int) -> None:
        """Begin a run. All threads of the previous one must have ended."""
        if len(self._tasks) > 1:
            raise DeadlockError(f"threads of the previous run have not ended: {self.names()}")
        gc.collect()  # a finalizer may wake a thread: none may run at a time that the run does not decide
        gc.disable()
        self.now, self.turns, self._deadlock = EPOCH, 0, ""
        self.failures.clear()
        self._chance, self._ids = random.Random(seed), random.Random(~seed)
        random.seed(seed)

    def names(self) -> list[str]:
        """Return the names of all threads but the main one."""
        return [task.name for task in self._tasks if task is not self._main]

    @property
    def thread(self) -> object:
        """Running thread."""
        return self._current

    @property
    def process(self) -> Process:
        """Process of the running thread. A new thread is in the process of the one that starts it."""
        return self._current.process

    @contextmanager
    def inside(self, process: Process) -> Iterator[None]:
        """Context manager in which the running thread belongs to a process."""
        task = self._current
        before, task.process = task.process, process
        try:
            yield
        finally:
            task.process = before

    @property
    def clock(self) -> Clock:
        """Wall clock of the running thread. A new thread has that of the one that starts it."""
        return self._current.clock

    @contextmanager
    def by(self, clock: Clock) -> Iterator[None]:
        """Context manager in which the running thread has a wall clock."""
        task = self._current
        before, task.clock = task.clock, clock
        try:
            yield
        finally:
            task.clock = before

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Context manager in which other threads run only while this one waits for them."""
        before, self._alone = self._alone, self._current
        try:
            yield
        finally:
            self._alone = before

    @property
    def is_alone(self) -> bool:
        """True inside :meth:`alone` of the running thread."""
        return self._alone is self._current

    def kill(self, process: Process) -> None:
        """End all threads of a process, and wait until they have ended. Call it from another process."""
        process.is_killed = True
        self.wait(lambda: not self.has_threads(process), None)

    def has_threads(self, process: Process) -> bool:
        return any(task.process is process for task in self._tasks)

    def pause(self) -> None:
        """Let another thread run, perhaps."""
        if self._is_choosing:
            return
        if len(self._tasks) > 1 and self._alone is not self._current and self._chance.randrange(_PAUSES) == 0:
            self._take_turns()
        elif self._current.process.is_killed:
            raise Killed

    def wait(self, is_ready: Callable[[], bool], seconds: float | None) -> bool:
        """Let other threads run until ``is_ready()`` is True, or for a number of seconds. Return its result."""
        task = self._current
        task.is_ready, task.deadline = is_ready, math.inf if seconds is None else self.now + max(0.0, seconds)
        try:
            self._take_turns()
        finally:
            task.is_ready, task.deadline = None, math.inf
        return is_ready()

    def sleep(self, seconds: float) -> None:
        """Let other threads run for a number of seconds."""
        self.wait(_never, seconds)

    def start(self, name: str, run: Callable[[], None]) -> None:
        """Start a thread."""
        task = _Task(name, self._current.process, self._current.clock)
        self._tasks.append(task)
        _thread.start_new_thread(self._run, (task, run))

    def _run(self, task: _Task, run: Callable[[], None]) -> None:
        task.gate.acquire()
        try:
            if not task.process.is_killed:
                run()
        except (Killed, SystemExit):
            pass
        except BaseException as error:  # noqa: BLE001  the run reports it
            self.failures.append(error)
        self._tasks.remove(task)
        following = self._following()
        self._current = following
        following.gate.release()

    def _take_turns(self) -> None:
        task, following = self._current, self._following()
        if following is not task:
            self._current = following
            following.gate.release()
            task.gate.acquire()
        if task is self._main and self._deadlock:
            text, self._deadlock = self._deadlock, ""
            raise DeadlockError(text)
        if task.process.is_killed:
            raise Killed

    def _following(self) -> _Task:
        """Return the thread that runs next, and let time pass if all wait."""
        self.turns += 1
        self._is_choosing = True
        try:
            return self._chosen()
        finally:
            self._is_choosing = False

    def _chosen(self) -> _Task:
        ready = [each for each in self._tasks if _can_run(each, self.now)]
        if not ready:
            end = min(each.deadline for each in self._tasks)
            if end == math.inf:
                self._deadlock = f"all threads wait for each other: {['main', *self.names()]}"
                return self._main
            self.now = end
            ready = [each for each in self._tasks if _can_run(each, end)]
        return ready[0] if len(ready) == 1 else self._chance.choice(ready)

    # What takes the place of Python's functions

    def time(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return int(self.now * 1e9)

    def wall_time(self) -> float:
        """Return the time by the wall clock of the running thread."""
        return self.now + self._current.clock.offset

    def wall_time_ns(self) -> int:
        return int(self.wall_time() * 1e9)

    def token(self, num_bytes: int | None = None) -> str:
        """Return a random text as :func:`secrets.token_hex` does."""
        count = 32 if num_bytes is None else num_bytes
        return f"{self._ids.getrandbits(8 * count):0{2 * count}x}"


def _never() -> bool:
    return False


def _can_run(task: _Task, now: float) -> bool:
    return task.is_ready is None or task.deadline <= now or task.process.is_killed or task.is_ready()


SCHEDULER = Scheduler()


class Lock:
    """Lock as that of ``threading``."""

    def __init__(self) -> None:
        self._is_locked = False
        self._holder: object = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        SCHEDULER.pause()
        if self._is_locked and not (blocking and SCHEDULER.wait(self._is_free, None if timeout < 0 else timeout)):
            return False
        self._is_locked, self._holder = True, SCHEDULER.thread
        return True

    def release(self) -> None:
        if SCHEDULER.process.is_killed and self._holder is not SCHEDULER.thread:
            return  # it was killed while it took the lock again, as a condition does after a wait
        if not self._is_locked:
            raise RuntimeError("release unlocked lock")
        self._is_locked, self._holder = False, None

    def locked(self) -> bool:
        return self._is_locked

    def _is_free(self) -> bool:
        return not self._is_locked

    def _at_fork_reinit(self) -> None:
        self._is_locked = False

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimpleQueue(Generic[_T]):
    """Queue as that of ``queue``. Finalizers may call :meth:`put`."""

    def __init__(self) -> None:
        self._items: deque[_T] = deque()

    def put(self, item: _T, block: bool = True, timeout: float | None = None) -> None:
        self._items.append(item)

    put_nowait = put

    def get(self, block: bool = True, timeout: float | None = None) -> _T:
        SCHEDULER.pause()
        if not self._items and not (block and SCHEDULER.wait(self._has_items, timeout)):
            raise queue.Empty
        return self._items.popleft()

    def get_nowait(self) -> _T:
        return self.get(block=False)

    def qsize(self) -> int:
        return len(self._items)

    def empty(self) -> bool:
        return not self._items

    def _has_items(self) -> bool:
        return bool(self._items)


_RealThread = threading.Thread


class Thread(_RealThread):
    """Thread that waits for its turns. The order of the locks of Python's class is that of a real process."""

    _has_ended = False

    def start(self) -> None:
        self._has_begun = False
        SCHEDULER.start(self.name, self._main)
        SCHEDULER.wait(lambda: self._has_begun, None)

    def _main(self) -> None:
        ident = _thread.get_ident()
        self._ident = ident
        threading._active[ident] = self  # type: ignore[attr-defined]
        self._started.set()  # type: ignore[attr-defined]
        self._has_begun = True
        try:
            SCHEDULER.pause()
            self.run()
        finally:
            del threading._active[ident]  # type: ignore[attr-defined]
            self._has_ended = True

    def join(self, timeout: float | None = None) -> None:
        SCHEDULER.wait(lambda: self._has_ended, timeout)

    def is_alive(self) -> bool:
        return self._started.is_set() and not self._has_ended  # type: ignore[attr-defined]


def install() -> None:
    """Replace what the threads of this process share, and its clocks and random ids."""
    if late := {"delta_tracker", "torch"} & sys.modules.keys():
        raise RuntimeError(f"{late} was imported before the threads of the simulation were installed")
    replaced: dict[Any, dict[str, object]] = {
        threading: {"Lock": Lock, "_allocate_lock": Lock, "_CRLock": None, "Thread": Thread},
        queue: {"SimpleQueue": SimpleQueue},
        time: {
            "monotonic": SCHEDULER.time,
            "time": SCHEDULER.wall_time,
            "monotonic_ns": SCHEDULER.time_ns,
            "time_ns": SCHEDULER.wall_time_ns,
            "sleep": SCHEDULER.sleep,
        },
        secrets: {"token_hex": SCHEDULER.token},
    }
    for module, names in replaced.items():
        for name, value in names.items():
            setattr(module, name, value)
    threading.Timer.__bases__ = (Thread,)  # matplotlib starts one where its cache of fonts is missing
    if "concurrent.futures.thread" in sys.modules:
        raise RuntimeError("concurrent.futures was imported before the threads of the simulation were installed")
