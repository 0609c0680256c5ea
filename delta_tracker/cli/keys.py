"""Keys of the live screen, read while it waits for the next refresh."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def reading_keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits some seconds for a key, and returns it in lower case, or an empty text.

    During the ``with`` statement, the terminal passes keys on at once and does not show them. Ctrl-C still interrupts.
    The settings of the terminal are restored at the end. No keys are read if stdin is no terminal.
    """
    if not sys.stdin.isatty():
        yield _sleep
        return
    import termios  # noqa: PLC0415  only where there is a terminal
    import tty  # noqa: PLC0415

    descriptor = sys.stdin.fileno()

    def wait(seconds: float) -> str:
        if not select.select([descriptor], [], [], max(0.0, seconds))[0]:
            return ""
        data = os.read(descriptor, 1)
        return data.decode("ascii", "replace").lower() if data else _sleep(seconds)  # without data, it was closed

    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield wait
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _sleep(seconds: float) -> str:
    time.sleep(max(0.0, seconds))
    return ""
