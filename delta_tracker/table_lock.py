"""Lookups of many threads beside one thread that writes rows."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class TableLock:
    """Many readers at a time, or one writer. Neither starves the other.

    A writer that waits goes before readers that come after it. Readers that came while somebody wrote go before the
    next writer, so that one who writes again and again holds each of them up once.

    A thread that reads may enter :meth:`reading` again. One that reads must not enter :meth:`writing`: it would wait
    for itself.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers: Counter[int] = Counter()  # thread to how often it has entered
        self._waiting: set[int] = set()  # threads of readers
        self._next: set[int] = set()  # those of them that go before any writer
        self._num_writers_waiting = 0
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
            if thread not in self._readers:
                self._wait_to_read(thread)
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
            self._num_writers_waiting += 1
            try:
                while self._is_writing or self._readers or self._next:
                    self._changed.wait()
            finally:
                self._num_writers_waiting -= 1
            self._is_writing = True
        try:
            yield
        finally:
            with self._changed:
                self._is_writing = False
                self._next |= self._waiting
                self._changed.notify_all()

    def _wait_to_read(self, thread: int) -> None:
        self._waiting.add(thread)
        try:
            while self._is_writing or (self._num_writers_waiting and thread not in self._next):
                self._changed.wait()
        except BaseException:
            self._changed.notify_all()  # a writer may wait for this reader's turn
            raise
        finally:
            self._waiting.discard(thread)
            self._next.discard(thread)
