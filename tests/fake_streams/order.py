"""Order of the operations that streams, events and waits of the host guarantee, checked by torch's CUDA sanitizer.

A random order shows a race only if it gives wrong numbers. The sanitizer finds two uses of the same memory that nothing
orders in any run, whatever the order was.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch.cuda._sanitizer import Access, EventHandler
from torch.cuda._sanitizer import UnsynchronizedAccessError as Race

_HOST, _FREED = -1, -2  # streams of the host's own uses of memory, and of the allocator
_INSIDE = re.compile("fake_streams|site-packages")
_NOW = -1  # event for the order of one call


@dataclass(frozen=True)
class Use:
    """What an operation reads and writes, by number of the storage."""

    operator: str
    read: Collection[int] = ()
    written: Collection[int] = ()


def passes(use: Access, path: str, function: str | None = None) -> bool:
    """Return True if a use was launched inside a function of a file, or inside any function of a folder."""
    return any(path in each.filename and function in (None, each.name) for each in use.stack_trace)


def described(race: Race) -> str:
    """Return what the two uses are, and the places in the program."""
    return " and ".join(map(_described, (race.previous_access, race.current_access)))


def _described(access: Access) -> str:
    outside = [frame for frame in access.stack_trace if not _INSIDE.search(frame.filename)]
    places = ", ".join(f"{frame.name}:{frame.lineno}" for frame in outside[-3:])
    return f"{access.operator} {access.type} memory on stream {access.stream} ({places})"


class Order:
    """Vector clocks of streams, and the last uses of each storage. Numbers name streams and operations.

    All threads of the host count as one: what a thread launches is ordered after each wait of another thread before.

    Attributes:
        races: pairs of uses that nothing orders.
    """

    def __init__(self) -> None:
        self.races: list[Race] = []
        self._handler = EventHandler()
        self._syncs = self._handler.syncs
        self._handler._handle_stream_creation(_HOST)
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_busy = False

    def launched(self, stream: int, operation: int, after: Collection[int], use: Use | None) -> None:
        """Append an operation to a stream, after earlier operations of other streams."""

        def handle() -> None:
            self._join(stream, _HOST)
            for each in after:
                self._syncs.stream_wait_for_event(stream, each)
            self._check(stream, use)
            self._syncs.record_state(operation, stream)

        self._handle(handle)

    def host_waited(self, operation: int) -> None:
        """Let the host wait for an operation."""
        self._handle(lambda: self._syncs.all_streams_wait_for_event(operation))

    def host_used(self, use: Use) -> None:
        """Let the host itself use pinned memory or, after a wait, memory of a device."""
        self._handle(lambda: self._check(_HOST, use))

    def freed(self, storage: Any, streams: Collection[int]) -> None:
        """Free a storage, which later operations may reuse once the operations of ``streams`` have run."""

        def handle() -> None:
            self._syncs.current_sync_states[_FREED] = {}
            for each in (_HOST, *streams):
                self._join(_FREED, each)
            self._check(_FREED, Use("free", written=[storage._cdata]))
            self._handler._handle_memory_deallocation(storage._cdata)

        self._handle(handle)

    def _join(self, stream: int, other: int) -> None:
        self._syncs.record_state(_NOW, other)
        self._syncs.stream_wait_for_event(stream, _NOW)

    def _check(self, stream: int, use: Use | None) -> None:
        if use is not None:
            written, read = set(use.written), set(use.read) - set(use.written)
            found = self._handler._handle_kernel_launch(stream, read, written, set(), use.operator, defaultdict(list))
            self.races += found

    def _handle(self, handle: Callable[[], None]) -> None:
        """Run ``handle``, after the current one: the garbage collector frees memory at any time."""
        self._waiting.append(handle)
        if not self._is_busy:
            self._is_busy = True
            try:
                while self._waiting:
                    self._waiting.popleft()()
            finally:
                self._is_busy = False
