"""Wait for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable

_PATIENCE_SECONDS = 120.0


def eventually(condition: Callable[[], object], said: Callable[[], object] = lambda: "it never came") -> None:
    """Wait for a condition; fail after a time that a busy machine does not need.

    Args:
        condition: returns true once it is met.
        said: returns what to show if it is not met.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, said()
        time.sleep(0.001)
