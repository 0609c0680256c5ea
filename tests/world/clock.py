"""Time and random ids of a world: both are set by the run, and no wait takes time.

``install()`` must run before anything imports the library, because default arguments keep ``time.monotonic``.
"""

from __future__ import annotations

import random
import secrets
import sys
import time

_EPOCH = 4e9  # later than any real time, so that a file with a real modification time is recognised
_real_sleep = time.sleep


def wait_for_threads() -> None:
    """Let other threads run for a millisecond of real time."""
    _real_sleep(0.001)


class Clock:
    """Time in seconds, which only ``advance`` and calls of ``time.sleep`` change."""

    def __init__(self) -> None:
        self.now = _EPOCH
        self._ids = random.Random(0)

    def restart(self, seed: int) -> None:
        """Begin a run."""
        self.now = _EPOCH
        self._ids = random.Random(seed)
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
        return f"{self._ids.getrandbits(8 * count):0{2 * count}x}"


CLOCK = Clock()


def install() -> None:
    """Replace the clocks and the random ids of this process."""
    if any(name.partition(".")[0] == "delta_tracker" for name in sys.modules):
        raise RuntimeError("the library was imported before the clock was installed")
    time.monotonic = time.time = CLOCK._time
    time.sleep = CLOCK._sleep
    secrets.token_hex = CLOCK._token
