"""Order of lookups and row writes that run on CUDA streams.

A lookup or a write that a thread launched on CUDA while it held the lock may run after the thread has released the
lock. Work on one stream runs in the order of its launch, work on different streams is ordered by events only.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

# Writes that may be queued on the devices. Each occupies pinned and device memory of the size of a chunk.
_NUM_QUEUED = 4
_ON_CPU = nullcontext()


class TableFence:
    """Order, on the devices, between lookups and writes that a lock orders on the host.

    Each lookup waits for the last write, and each write for it and all lookups since. The devices wait, not the
    threads.

    Attributes:
        devices: the CUDA devices of the tables, none on the CPU. Changes only while no thread reads.
    """

    def __init__(self) -> None:
        self.devices: tuple[torch.device, ...] = ()
        self._mutex = threading.Lock()  # held while an event of a lookup is recorded
        self._read: dict[Any, Any] = {}  # stream to an event after its lookups since the last write
        self._written: dict[torch.device, Any] = {}  # device to an event after its last write
        self._queued: deque[list[Any]] = deque()  # events of the writes that may not have run

    def cover(self, devices: Iterable[torch.device]) -> None:
        """Add the CUDA devices among ``devices``. The caller must hold the lock for writing.

        Waits for a new device, which may run lookups that were launched before it was added.
        """
        for device in dict.fromkeys(devices):
            if device.type == "cuda" and device not in self.devices:
                torch.cuda.synchronize(device)
                self.devices = (*self.devices, device)

    def enter_reading(self) -> list[Any]:
        """Let the current streams wait for the last write, and return them. The lock must be held for reading."""
        streams = [torch.cuda.current_stream(device) for device in self.devices]
        for device, stream in zip(self.devices, streams, strict=True):
            if device in self._written:
                stream.wait_event(self._written[device])
        return streams

    def leave_reading(self, streams: Sequence[Any]) -> None:
        """Let the next write wait for the work on ``streams``. The caller must still hold the lock for reading."""
        with self._mutex:  # threads may share a stream, and the last record of an event counts
            for stream in streams:
                if stream not in self._read:
                    self._read[stream] = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._read[stream].record(stream)

    def writing(self) -> AbstractContextManager[None]:
        """Return a context manager for the launches of one write. The caller must hold the lock for writing."""
        return self._writing() if self.devices else _ON_CPU  # avoids the cost of a generator

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
        """Wait until at most four writes are queued on the devices, which bounds the memory that they occupy."""
        while len(self._queued) > _NUM_QUEUED:
            for event in self._queued.popleft():
                event.synchronize()
