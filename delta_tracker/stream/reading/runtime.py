"""Clock, waits, random numbers and threads: :class:`Runtime`."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass

from delta_tracker.stream.interruption import sleep


def one_thread(name: str) -> Executor:
    """Return an executor with one thread, which ends when the executor is deleted."""
    return ThreadPoolExecutor(1, thread_name_prefix=name)


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
    executor: Callable[[str], Executor] = one_thread


REAL = Runtime()
