"""Functions for time, random numbers and threads: :class:`Runtime`."""

import random
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from delta_tracker.stream.interruption import sleep

T = TypeVar("T")


class OneThread:
    """Executor that runs actions in one thread, in the order of submission. The thread exits with this object.

    Unlike with ThreadPoolExecutor, an exception such as KeyboardInterrupt in :meth:`submit` never leaves a lock held.
    ``name`` is the prefix of the thread's name.
    """

    def __init__(self, name: str) -> None:
        self._actions: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_run, args=(self._actions,), name=f"{name}_0")
        self._thread.start()
        self._is_ended = False
        weakref.finalize(self, self._actions.put, None).atexit = False
        # The actions complete before the interpreter ends. The last thread ends first: it may submit to the others.
        threading._register_atexit(_end, self._actions, self._thread)  # type: ignore[attr-defined]  # noqa: SLF001

    def submit(self, action: Callable[..., T], *args: object) -> Future[T]:
        """Schedule ``action`` after all earlier actions. Return its future. Raise RuntimeError after a shutdown."""
        if self._is_ended:
            raise RuntimeError("the thread has ended: build a new object")
        future: Future[T] = Future()
        self._actions.put(partial(_complete, future, partial(action, *args)))
        return future

    def shutdown(self) -> None:
        """Wait until all submitted actions are complete, then end the thread."""
        self._is_ended = True
        _end(self._actions, self._thread)


def _end(actions: SimpleQueue[Callable[[], None] | None], thread: threading.Thread) -> None:
    actions.put(None)
    thread.join()


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
    """Functions for time, random numbers and threads that a reader or publisher calls. Simulations replace them.

    Args:
        sleep: waits for a number of seconds. The wait can be interrupted in a reader's thread.
        wait: waits until an event is set or a number of seconds has passed. Returns True if the event is set.
        clock: returns the Unix time of this host in seconds.
        executor: takes a thread name prefix, and returns an executor that runs actions in one thread.
    """

    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = sleep
    uniform: Callable[[float, float], float] = random.uniform  # no secret
    wait: Callable[[threading.Event, float], bool] = threading.Event.wait
    thread: Callable[..., threading.Thread] = threading.Thread
    clock: Callable[[], float] = time.time
    executor: Callable[[str], OneThread] = OneThread


REAL = Runtime()
