"""Keys of the live screen, read while it waits for the next refresh."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Keys:
    """Reader of single keys from the terminal; it reads none if stdin is no terminal. Use :func:`reading_keys`.

    Args:
        descriptor: file descriptor of the terminal; None if there is none.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    @property
    def are_read(self) -> bool:
        """True if there is a terminal to read keys from."""
        return self._descriptor is not None

    def wait(self, seconds: float) -> str:
        """Return the next key in lower case, empty if none is pressed for ``seconds``."""
        if self._descriptor is None:
            time.sleep(max(0.0, seconds))
            return ""
        ready, _, _ = select.select([self._descriptor], [], [], max(0.0, seconds))
        if not ready:
            return ""
        data = os.read(self._descriptor, 1)
        if not data:  # the terminal was closed
            self._descriptor = None
        return data.decode("ascii", "replace").lower()


@contextmanager
def reading_keys() -> Iterator[Keys]:
    """Yield a :class:`Keys`. During the ``with`` statement, the terminal passes keys on at once and does not show them.

    Ctrl-C still interrupts. The settings of the terminal are restored at the end.
    """
    if not sys.stdin.isatty():
        yield Keys(None)
        return
    import termios  # noqa: PLC0415  only where there is a terminal
    import tty  # noqa: PLC0415

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield Keys(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
