"""Time and random ids of a world: both are set by the run, and no wait takes time.

``install()`` must run before anything imports the library, because default arguments keep ``time.monotonic``.
"""

from __future__ import annotations

import random
import secrets
import sys
import threading
import time

_EPOCH = 4e9  # later than any real time, so that a file with a real modification time is recognised
_SHORT_SECONDS = 0.01
_real_sleep = time.sleep
_real_wait = threading.Event.wait


def wait_for_threads() -> None:
    """Let other threads run for a millisecond of real time."""
    _real_sleep(0.001)


def is_background() -> bool:
    """Return True in a thread of a publisher that continues after the call that started it, at its own speed."""
    return threading.current_thread().name in ("upkeep", "head-pointer")


class Clock:
    """Time in seconds, which only ``advance`` and calls of ``time.sleep`` change."""

    def __init__(self) -> None:
        self.now = _EPOCH
        self._ids = self._background_ids = random.Random(0)

    def restart(self, seed: int) -> None:
        """Begin a run."""
        self.now = _EPOCH
        self.draw_again(seed)

    def draw_again(self, seed: int) -> None:
        """Begin the random numbers again, for example after a thread has drawn some."""
        self._ids, self._background_ids = random.Random(seed), random.Random(~seed)
        random.seed(seed)

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def is_real(self, time_of_file: float) -> bool:
        """Return True for a modification time that the system has set."""
        return time_of_file < _EPOCH

    def _time(self) -> float:
        return self.now

    def _sleep(self, seconds: float) -> None:
        self.advance(seconds)
        _real_sleep(0.0001)  # another thread may have to continue

    def _token(self, num_bytes: int | None = None) -> str:
        count = 32 if num_bytes is None else num_bytes
        ids = self._background_ids if is_background() else self._ids
        return f"{ids.getrandbits(8 * count):0{2 * count}x}"


CLOCK = Clock()


def _wait(event: threading.Event, timeout: float | None = None) -> bool:
    """Wait until an event is set, or until the clock has advanced by ``timeout``. Short waits take real time."""
    if timeout is None or timeout <= _SHORT_SECONDS:
        return _real_wait(event, timeout)
    end = CLOCK.now + timeout
    is_main = threading.current_thread() is threading.main_thread()
    while not _real_wait(event, 0.001):
        if is_main:
            CLOCK.now = end  # no other thread advances the clock meanwhile
        if end <= CLOCK.now:
            return False
    return True


def install() -> None:
    """Replace the clocks, the waits for events and the random ids of this process."""
    if any(name.partition(".")[0] == "delta_tracker" for name in sys.modules):
        raise RuntimeError("the library was imported before the clock was installed")
    time.monotonic = time.time = CLOCK._time
    time.sleep = CLOCK._sleep
    secrets.token_hex = CLOCK._token
    setattr(threading.Event, "wait", _wait)  # noqa: B010  a method cannot be assigned to
