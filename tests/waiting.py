"""Wait for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(
    condition: Callable[[], object],
    said: Callable[[], object] = lambda: "it never came",
    *,
    seconds: float = 60.0,
) -> None:
    """Wait for a condition; fail after a time that a busy machine does not need.

    Args:
        condition: returns true once it is met.
        said: returns what to show if it is not met.
        seconds: patience. Pass more for a process that starts.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, said()
        time.sleep(0.001)
