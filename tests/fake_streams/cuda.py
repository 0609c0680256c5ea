"""Streams and events of the simulated devices, with the interface of ``torch.cuda``."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.fake_streams.order import Race, Use
from tests.fake_streams.queues import Operation, Scheduler

_CUDA = 1  # torch's number of the device type


class FakeStream(torch.Stream):
    """Stream of a simulated device."""

    devices: FakeDevices

    @staticmethod
    def of(devices: FakeDevices, index: int, number: int) -> FakeStream:
        stream = FakeStream(stream_id=number, device_index=index, device_type=_CUDA)
        stream.devices = devices
        stream.queue = devices.scheduler.queue()
        stream.cuda_stream = number
        stream._entered = []
        return stream

    def wait_event(self, event: FakeEvent) -> None:
        if event.recorded is not None:
            self.devices.scheduler.append(self.queue, None, [event.recorded])

    def wait_stream(self, stream: FakeStream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = self.devices.event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.devices.wait(self.queue.last)

    def query(self) -> bool:
        return not self.queue.pending and self.devices.scheduler.is_done(self.queue.last)

    def __enter__(self) -> Any:
        self._entered.append(self.devices.entered(self))
        self._entered[-1].__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.pop().__exit__(*error)


class FakeEvent:
    """Event of a simulated device."""

    def __init__(self, devices: FakeDevices) -> None:
        self._devices = devices
        self._is_recorded = False
        self.recorded: Operation | None = None  # newest operation before the last record()

    def record(self, stream: FakeStream | None = None) -> None:
        stream = self._devices.current_stream() if stream is None else stream
        self.recorded = stream.queue.last

    def wait(self, stream: FakeStream | None = None) -> None:
        (self._devices.current_stream() if stream is None else stream).wait_event(self)

    def query(self) -> bool:
        return self._devices.scheduler.is_done(self.recorded)

    def synchronize(self) -> None:
        self._devices.wait(self.recorded)

    def elapsed_time(self, end: FakeEvent) -> float:
        """Return the number of operations since this event, as milliseconds."""
        assert self.recorded is not None
        assert end.recorded is not None
        return float(end.recorded.number - self.recorded.number)


class PinnedMemory:
    """Host memory of which the simulated devices know that it is pinned."""

    def __init__(self) -> None:
        self._storages: dict[int, Any] = {}

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage
        return tensor

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._storages


class FakeDevices:
    """Simulated CUDA devices: their streams, and the current device and streams of each thread.

    Args:
        scheduler: order of the operations.
        count: number of devices.
        pool: number of streams of a device with the same priority, and number of priorities. As in torch
            (``c10/cuda/CUDAStream.cpp``), streams with the same priority are returned in turn, and then again.

    Attributes:
        num_waits: number of times the host waited for a device.
        num_operations: number of operations that the host launched, without waits of streams.
        num_pageable: number of copies between a device and host memory that is not pinned.
    """

    def __init__(self, scheduler: Scheduler, count: int, pool: tuple[int, int] = (32, 4)) -> None:
        self.scheduler = scheduler
        self._pool = pool
        self._pooled: dict[tuple[int, int], list[FakeStream]] = {}
        self._num_returned: Counter[tuple[int, int]] = Counter()
        self.count = count
        self.num_waits = self.num_operations = self.num_pageable = 0
        self.pinned = PinnedMemory()
        self._numbers = itertools.count(1)
        self._all = [[FakeStream.of(self, index, 0)] for index in range(count)]  # default stream first
        self._chosen = threading.local()

    @property
    def races(self) -> list[Race]:
        """Pairs of uses of the same memory that nothing orders."""
        return self.scheduler.order.races

    # Functions of ``torch.cuda``

    def stream(self, device: Any = None, priority: int = 0) -> FakeStream:
        """Return a stream of the pool of a priority."""
        num_streams, num_priorities = self._pool
        index = self.index(device)
        key = index, min(-priority, num_priorities - 1)
        pooled = self._pooled.setdefault(key, [])
        if len(pooled) < num_streams:
            pooled.append(FakeStream.of(self, index, next(self._numbers)))
            self._all[index].append(pooled[-1])
        self._num_returned[key] += 1
        return pooled[(self._num_returned[key] - 1) % num_streams]

    def event(self, *_: Any, **__: Any) -> FakeEvent:
        """Return a new event."""
        return FakeEvent(self)

    def current_device(self) -> int:
        return getattr(self._chosen, "device", 0)

    def default_stream(self, device: Any = None) -> FakeStream:
        return self._all[self.index(device)][0]

    def current_stream(self, device: Any = None) -> FakeStream:
        index = self.index(device)
        return self._streams().get(index, self._all[index][0])

    def set_stream(self, stream: FakeStream | None) -> None:
        if stream is not None:
            self._streams()[stream.device_index] = stream
            self._chosen.device = stream.device_index

    def set_device(self, device: Any) -> None:
        self._chosen.device = self.index(device)

    @contextmanager
    def entered(self, stream: FakeStream | None) -> Iterator[None]:
        """Context manager ``torch.cuda.stream``."""
        if stream is None:
            yield
            return
        before, inner = self.current_device(), self.current_stream(stream.device_index)
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(inner)
            self._chosen.device = before

    @contextmanager
    def on(self, device: Any) -> Iterator[None]:
        """Context manager ``torch.cuda.device``."""
        before = self.current_device()
        self.set_device(before if device is None or device == -1 else device)
        try:
            yield
        finally:
            self._chosen.device = before

    def synchronize(self, device: Any = None) -> None:
        self.num_waits += 1
        for stream in self._all[self.index(device)]:
            self.scheduler.wait(stream.queue.last)

    def sleep(self, cycles: int) -> None:
        """Append an operation without a result to the queue of the current stream."""
        self.scheduler.append(self.current_stream().queue, lambda: None)

    # For tensors

    def wait(self, operation: Operation | None) -> None:
        """Let the host wait for an operation."""
        self.num_waits += 1
        self.scheduler.wait(operation)

    def storages(self, tensors: Iterable[Any]) -> list[int]:
        """Return the numbers of the storages that a device or the host may use at the same time."""
        found = [each for each in tensors if isinstance(each, torch.Tensor)]
        return [each.untyped_storage()._cdata for each in found if each.is_cuda or each in self.pinned]

    def use_on_host(self, use: Use) -> None:
        """Let the host read or write memory of :meth:`storages`."""
        if use.read or use.written:
            with self.scheduler.lock:
                self.scheduler.order.host_used(use)

    def index(self, device: Any) -> int:
        """Return the number of a device."""
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return self.current_device() if index is None else index

    def _streams(self) -> dict[int, FakeStream]:
        if not hasattr(self._chosen, "streams"):
            self._chosen.streams = {}
        return self._chosen.streams
