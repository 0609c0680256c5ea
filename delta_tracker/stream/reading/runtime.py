"""Clock, waits, random numbers and threads: :class:`Runtime`."""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from delta_tracker.stream.interruption import sleep

T = TypeVar("T")


class OneThread(Executor):
    """Executor with one thread, which ends when the executor is deleted.

    Other than in torch's or Python's pools, an exception such as KeyboardInterrupt leaves no lock held in
    :meth:`submit`: the queue's methods are atomic.
    """

    def __init__(self, name: str) -> None:
        self._actions: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_run, args=(self._actions,), name=f"{name}_0")
        self._thread.start()
        weakref.finalize(self, self._actions.put, None).atexit = False
        # As of Python's pools: what was submitted completes before the interpreter ends.
        threading._register_atexit(self._actions.put, None)  # type: ignore[attr-defined]  # noqa: SLF001

    def submit(self, action: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:  # noqa: ANN401  of any action
        """Run an action after those that were submitted before, and return the future of its result."""
        future: Future[T] = Future()
        self._actions.put(partial(_complete, future, partial(action, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002
        """End the thread after the actions that were submitted."""
        self._actions.put(None)
        if wait:
            self._thread.join()


def _run(actions: SimpleQueue[Callable[[], None] | None]) -> None:
    while (action := actions.get()) is not None:
        action()
        del action  # it may hold the rows of a version


def _complete(future: Future[T], action: Callable[[], T]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(action())
        except BaseException as error:  # noqa: BLE001  who waits for the future raises it
            future.set_exception(error)


@dataclass(frozen=True, slots=True)
class Runtime:
    """Functions of a reader or a publisher that depend on time and chance. A simulation replaces them.

    Args:
        sleep: waits for a number of seconds. A thread of a reader is interruptible meanwhile.
        wait: waits for an event, or for a number of seconds. Returns True if the event is set.
        clock: returns the Unix time of this host in seconds.
        executor: returns an executor that runs one action at a time, from the prefix of its thread's name.
    """

    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = sleep
    uniform: Callable[[float, float], float] = random.uniform  # no secret
    wait: Callable[[threading.Event, float], bool] = threading.Event.wait
    thread: Callable[..., threading.Thread] = threading.Thread
    clock: Callable[[], float] = time.time
    executor: Callable[[str], Executor] = OneThread


REAL = Runtime()
