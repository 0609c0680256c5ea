"""Fault of one rank of a random trainer, at a random moment."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import delta_tracker
from tests.publisher.random_faults import Fault
from tests.servers import Proxy
from tests.stores.rules import fails, on
from tests.stores.wrapped import WrappedStorage
from tests.system.random_models import every

FAULTS = ("exception", "interrupt", "disk", "s3", "hook", "store")
_HOOK_FILES = ("tracker/store", "tracker/row_sets", "tracker/change_log.py", "tracker/log_")


class _HookFault(Fault):
    """Fault in the files that hooks call."""

    def __call__(self, frame: Any, event: str, arg: object) -> Any:
        path = frame.f_code.co_filename
        folder = str(Path(delta_tracker.__file__).parent)
        is_traced = any(path.startswith(f"{folder}/{name}") for name in _HOOK_FILES)
        return super().__call__(frame, event, arg) if is_traced else None


class RankFault:
    """Fault of one rank in one life, and when it begins.

    Args:
        kind: one of ``FAULTS``.
        draw: random generator of the life.
        storage: store of this rank.
        faults: proxy in front of the store; None without one.
        is_victim: whether it is this rank's.
    """

    def __init__(
        self, kind: str, draw: random.Random, storage: WrappedStorage, faults: Proxy | None, *, is_victim: bool
    ) -> None:
        self.kind = kind
        self._storage = storage
        self._faults = faults
        self._is_victim = is_victim
        self.begin = draw.randrange(3, 12)
        # Events in which the store fails, or in which the line is reached.
        self._num_left = draw.randrange(1, 4) if not self.is_traced else 12
        self._num_bytes = int(10 ** draw.uniform(0, 4))
        self._num_errors = draw.choice([1, 3, 8, 30])
        self._operation = draw.choice(["put", "create"])
        exception = KeyboardInterrupt if kind == "interrupt" else draw.choice([MemoryError, RuntimeError])
        self.trace = (_HookFault if kind == "hook" else Fault)(exception, int(10 ** draw.uniform(0, 3.3)))
        self.is_over = self._is_hit = False

    @property
    def is_traced(self) -> bool:
        """Whether an exception is raised at a line."""
        return self.kind in ("exception", "interrupt", "hook")

    @contextlib.contextmanager
    def active(self, kinds: Sequence[str]) -> Iterator[None]:
        """Have the fault in a block of this rank, if it is of these kinds."""
        if self.is_over or self.kind not in kinds:
            yield
            return
        with ExitStack() as stack:
            if self._is_victim:
                self._is_hit = True
                if self.is_traced:
                    sys.settrace(self.trace)
                    stack.callback(sys.settrace, None)
                elif self.kind == "store":
                    stack.enter_context(self._storage.under(fails(on(self._operation), "No space left on device")))
                elif self.kind == "disk":
                    stack.enter_context(_full_disk(self._num_bytes))
                elif self._faults is not None:
                    self._faults.errors = self._num_errors
                    stack.callback(setattr, self._faults, "errors", 0)
            yield

    def ends(self) -> bool:
        """Return whether the fault ends with the event that ends now. A collective."""
        if not any(every(self._is_hit)):
            return False
        self._is_hit = False
        self._num_left -= 1
        is_over = self._num_left == 0 or self.trace.is_raised
        self.is_over = any(every(is_over if self._is_victim else False))
        return self.is_over


@contextlib.contextmanager
def _full_disk(num_bytes: int) -> Iterator[None]:
    """Let this process write a number of bytes to files; further writes report that the disk is full."""
    write, left = os.write, num_bytes

    def limited(descriptor: int, data: Any) -> int:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(descriptor, memoryview(data)[:left])
        left -= written
        return written

    with mock.patch.object(os, "write", limited):
        yield
