"""Clean end of a command at SIGTERM."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_ANSWER_TO_TERMINATE = 128 + signal.SIGTERM


@contextmanager
def terminated() -> Iterator[None]:
    """Context manager in which SIGTERM raises ``SystemExit`` with code 143, so that ``finally`` blocks run."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(_ANSWER_TO_TERMINATE))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
