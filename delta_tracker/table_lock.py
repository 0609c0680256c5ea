"""Lookups of many threads beside one thread that writes rows."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class TableLock:
    """Many readers at a time, or one writer. A writer that waits goes before readers that come after it.

    A thread that reads may enter :meth:`reading` again. One that reads must not enter :meth:`writing`: it would wait
    for itself.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers: Counter[int] = Counter()  # thread to how often it has entered
        self._num_waiting = 0
        self._is_writing = False

    @property
    def is_reading(self) -> bool:
        """Whether this thread is inside :meth:`reading`."""
        return threading.get_ident() in self._readers

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep writers out."""
        thread = threading.get_ident()
        with self._changed:
            while thread not in self._readers and (self._is_writing or self._num_waiting):
                self._changed.wait()
            self._readers[thread] += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers[thread] -= 1
                if not self._readers[thread]:
                    del self._readers[thread]
                    self._changed.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Keep everybody else out."""
        with self._changed:
            self._num_waiting += 1
            while self._is_writing or self._readers:
                self._changed.wait()
            self._num_waiting -= 1
            self._is_writing = True
        try:
            yield
        finally:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
