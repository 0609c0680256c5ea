"""Synchronization of lookups in many threads with the thread that writes rows.

:class:`TableLock` orders lookups and writes on the host. Work that a thread launches on CUDA while it holds the lock
may run after the lock is released. :class:`TableFence` orders this work on the devices: work on one stream runs in
launch order, but work on different streams is ordered only by events.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.live_objects import Forkable, protect
from delta_tracker.stream.interruption import check

_FORK_SECONDS = 1.0
_SLICE_SECONDS = 0.1  # interval at which a waiting writer checks its stop flag
# Writes that may be queued on the devices. Each occupies pinned and device memory of the size of a chunk.
_NUM_QUEUED = 4


class TableLock(Forkable):
    """Phase-fair reader-writer lock: readers and writers alternate, so that neither starves.

    A waiting writer precedes readers that arrive later. Readers that are waiting when a write ends precede the next
    writer. A reader therefore waits for the current readers and at most one write. See B. Brandenburg, J. Anderson,
    "Spin-Based Reader-Writer Synchronization for Multiprocessor Real-Time Systems", 2010.

    :meth:`reading` is reentrant. A thread that enters :meth:`writing` inside :meth:`reading` deadlocks.

    Attributes:
        is_torn: True if this process was forked during a write in another thread. Rows may then be partly written.
    """

    def __init__(self) -> None:
        self._readers: Counter[int] = Counter()  # thread id to depth of reading()
        self._writer: int | None = None  # id of the thread inside writing()
        self.is_torn = False
        self._reset()
        protect(self)

    def _reset(self) -> None:
        self._mutex = threading.Lock()
        self._may_read = threading.Condition(self._mutex)
        self._may_write = threading.Condition(self._mutex)
        self._forking: set[int] = set()  # ids of threads that are forking; no write starts until they have forked
        self._num_queued = 0  # readers that wait until a write ends
        self._num_invited = 0  # readers that were woken and have not entered yet
        self._num_writes = 0
        self._num_waiting = 0  # writers that wait for the lock

    @property
    def is_reading(self) -> bool:
        """True if the calling thread is inside :meth:`reading`."""
        return threading.get_ident() in self._readers

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Context manager that acquires the lock for reading."""
        thread = threading.get_ident()
        with self._mutex:
            if thread not in self._readers and (self._writer is not None or self._num_waiting):
                self._await_turn()
            self._readers[thread] += 1
        try:
            yield
        finally:
            with self._mutex:
                self._readers[thread] -= 1
                if not self._readers[thread]:
                    del self._readers[thread]
                    self._may_write.notify()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Context manager that acquires the lock for writing. Setting the thread's stop flag interrupts the wait."""
        with self._mutex:
            self._num_waiting += 1
            is_in = False
            try:
                while self._writer is not None or self._readers or self._num_invited or self._forking:
                    self._may_write.wait(_SLICE_SECONDS)
                    check()
                self._writer = threading.get_ident()
                is_in = True
            finally:
                self._num_waiting -= 1
                if not is_in:  # interrupted
                    self._may_write.notify()
                    self._may_read.notify_all()
        try:
            yield
        finally:
            with self._mutex:
                self._writer = None
                self._num_writes += 1
                self._num_invited, self._num_queued = self._num_queued, 0
                self._may_read.notify_all()
                self._may_write.notify()

    # Forks

    def before_fork(self) -> None:
        """Wait at most one second for the end of a write in another thread, and block new writes during the fork."""
        thread = threading.get_ident()
        if not self._mutex.acquire(timeout=_FORK_SECONDS):
            return  # a signal handler forks while its own thread holds the mutex
        try:
            self._forking.add(thread)
            self._may_read.wait_for(lambda: self._writer in (None, thread), _FORK_SECONDS)
        finally:
            self._mutex.release()

    def after_fork_in_parent(self) -> None:
        """Allow writes again after :meth:`before_fork`."""
        if threading.get_ident() in self._forking:
            with self._mutex:
                self._forking.discard(threading.get_ident())
                self._may_write.notify()

    def after_fork_in_child(self) -> None:
        """Release locks of threads that do not exist in the child. Set :attr:`is_torn` if one of them was writing."""
        thread = threading.get_ident()
        if self._writer not in (None, thread):
            self._writer, self.is_torn = None, True
        for other in self._readers.keys() - {thread}:
            del self._readers[other]
        self._reset()

    def _await_turn(self) -> None:
        """Wait until a write ends, or until no writer is active or waiting. The caller must hold the mutex."""
        writes = self._num_writes
        self._num_queued += 1
        try:
            while self._num_writes == writes and (self._writer is not None or self._num_waiting):
                self._may_read.wait()
        except BaseException:
            self._may_write.notify()
            raise
        finally:
            if self._num_writes == writes:
                self._num_queued -= 1
            else:
                self._num_invited -= 1


class TableFence:
    """Fence that orders lookups and writes on CUDA devices, as :class:`TableLock` does on the host.

    Each lookup waits for the last write. Each write waits for the previous write and for all lookups after it. Only the
    devices wait; the threads do not.

    Attributes:
        devices: CUDA devices of the tables; empty if all tables are on the CPU. Changes only while no thread reads.
        writing: function that returns a context manager for launching one write. Requires the lock for writing.
    """

    def __init__(self) -> None:
        self.devices: tuple[torch.device, ...] = ()
        self.writing: Callable[[], AbstractContextManager[None]] = nullcontext  # avoids the cost of a generator
        self._mutex = threading.Lock()  # held while an event of a lookup is recorded
        self._read: dict[Any, Any] = {}  # stream to an event after its lookups since the last write
        self._written: dict[torch.device, Any] = {}  # device to an event after its last write
        self._queued: deque[list[Any]] = deque()  # events of the writes that may not have run

    def cover(self, devices: Iterable[torch.device]) -> None:
        """Add the CUDA devices in ``devices``. The caller must hold the lock for writing.

        Waits for each new device, which may still run lookups that were launched earlier.
        """
        for device in dict.fromkeys(devices):
            if device.type == "cuda" and device not in self.devices:
                torch.cuda.synchronize(device)
                self.devices, self.writing = (*self.devices, device), self._writing

    def enter_reading(self, streams: Sequence[Any] = ()) -> list[Any]:
        """Make the current streams and ``streams`` wait for the last write. Return all of these streams.

        Pass the result to :meth:`leave_reading`. Raises InvalidArgumentError if a stream is not on one of the devices.
        """
        for stream in streams:
            if getattr(stream, "device", None) not in self.devices:
                known = ", ".join(map(str, self.devices)) or "none"
                remedy = f"Pass CUDA streams of the devices of the tables: {known}"
                raise InvalidArgumentError("streams", stream, remedy)
        used = [*(torch.cuda.current_stream(device) for device in self.devices), *streams]
        for stream in used:
            if stream.device in self._written:
                stream.wait_event(self._written[stream.device])
        return used

    def leave_reading(self, streams: Sequence[Any]) -> None:
        """Make the next write wait for the work on ``streams``. Call this before releasing the lock for reading."""
        with self._mutex:  # threads may share a stream, and the last record of an event counts
            for stream in streams:
                if stream not in self._read:
                    self._read[stream] = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._read[stream].record(stream)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        for device in self.devices:
            stream = torch.cuda.current_stream(device)
            if device in self._written:
                stream.wait_event(self._written[device])
            for other, event in self._read.items():
                if other.device == device:
                    stream.wait_event(event)
        self._read.clear()
        try:
            yield
        finally:
            self._written = {device: torch.cuda.current_stream(device).record_event() for device in self.devices}
            self._queued.append(list(self._written.values()))

    def throttle(self) -> None:
        """Wait until at most four writes are queued on the devices. This limits the memory of queued writes."""
        while len(self._queued) > _NUM_QUEUED:
            for event in self._queued.popleft():
                event.synchronize()
