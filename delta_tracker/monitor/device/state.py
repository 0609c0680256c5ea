"""Sums on a device, copied to the host asynchronously.

Shapes: ``K`` numbers of a state.

A state only grows, by addition on the device of its values. A reading is an asynchronous copy, ordered with the other
work on the device. The growth between two readings is their difference, so states are never reset and readings are
consistent.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from delta_tracker.monitor.clock import Progress
from delta_tracker.monitor.polled_stats import Source

EpochEnd = tuple[int | None, int | None]
"""Step and epoch at the end of an epoch."""

_POLL_SECONDS, _NUM_POLLS = 0.001, 50


class DeviceState(ABC):
    """Vector of ``K`` sums on each device that has recorded values.

    Args:
        name: name of the state.
        num_sums: ``K``.
        reader: reads the state.
    """

    def __init__(self, name: str, num_sums: int, reader: DeviceReader) -> None:
        self.name = name
        self.num_sums = num_sums
        self._reader = reader
        self._vectors: dict[torch.device, Tensor] = {}
        self._streams: dict[torch.device, Any] = {}
        self._merged: Tensor | None = None
        reader.add(self)

    @abstractmethod
    def absorb(self, growth: list[float], epoch_end: EpochEnd | None) -> None:
        """Record the growth of the ``K`` sums since the last reading. Called in the collector's threads.

        Args:
            growth: ``[K]``.
            epoch_end: step and epoch if the reading ends an epoch, otherwise None.
        """

    def sums(self, device: torch.device) -> Tensor:
        """Return the ``[K]`` sums over all devices on ``device``. Waits for the devices."""
        with self._reader.lock:
            total = torch.zeros(self.num_sums, dtype=sum_dtype(device), device=device)
            for own, vector in self._vectors.items():
                if own.type == "cuda":
                    self._streams[own].synchronize()
                total += vector.to(device)
            return total

    def merged_until(self, now: Tensor) -> Tensor:
        """Store ``now`` and return the value stored by the previous call, zeros at the first call."""
        before, self._merged = self._merged, now
        return torch.zeros_like(now) if before is None else before

    def forget(self) -> None:
        """Drop the sums of every device. For forked children."""
        self._vectors, self._streams, self._merged = {}, {}, None

    def _add(self, device: torch.device, growth: Tensor, places: Tensor | None = None) -> None:
        """Add ``[K]`` numbers, or ``[N]`` numbers at the indices ``places``, ``[N]``. Asynchronous."""
        with self._reader.lock:
            vector = self._vector(device)
            if places is None:
                vector += growth
            else:
                vector.index_add_(0, places, growth)

    def _vector(self, device: torch.device) -> Tensor:
        vector = self._vectors.get(device)
        if device.type == "cuda":
            # Order the work of different streams on one vector.
            stream, last = torch.cuda.current_stream(device), self._streams.get(device)
            if last is not None and last != stream:
                stream.wait_stream(last)
            self._streams[device] = stream
        if vector is None:
            # A tensor created in inference mode cannot be written outside of it.
            with torch.inference_mode(mode=False):
                vector = torch.zeros(self.num_sums, dtype=sum_dtype(device), device=device)
            self._vectors[device] = vector
        return vector


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return float64, exact for integers up to 2**53, or float32 on MPS, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass(slots=True)
class _Copy:
    """Pending copy. Once ``event`` is done, ``numbers`` holds the concatenated vectors of ``parts``."""

    numbers: Tensor
    event: Any
    device: torch.device
    parts: list[DeviceState]
    epoch_end: EpochEnd | None


@dataclass(slots=True)
class DeviceReader(Source):
    """Reads all device states of a monitor, with one copy per device and stream.

    Args:
        progress: step and epoch at the ends of epochs.
    """

    progress: Progress
    name: str = "device"
    lock: threading.RLock = field(default_factory=threading.RLock)
    _states: list[DeviceState] = field(default_factory=list)
    _copies: list[_Copy] = field(default_factory=list)
    _seen: dict[tuple[int, torch.device], list[float]] = field(default_factory=dict)
    _finishing: threading.RLock = field(default_factory=threading.RLock)

    def add(self, state: DeviceState) -> None:
        """Add a state to read."""
        with self.lock:
            self._states.append(state)

    def read(self, *, is_last: bool) -> None:
        """Start copies and record finished ones. Waits for the device only if ``is_last``."""
        self.begin()
        for _ in range(_NUM_POLLS):
            if self.finish(wait=is_last):
                return
            time.sleep(_POLL_SECONDS)  # blocks only a thread of the library

    def end_epoch(self) -> None:
        """Start copies that end the epoch; later values belong to the next one. Does not block."""
        self.begin((self.progress.step, self.progress.epoch))

    def begin(self, epoch_end: EpochEnd | None = None) -> None:
        """Start a copy of every state, on the stream that updated it last."""
        with self.lock:
            groups: dict[tuple[torch.device, Any], list[DeviceState]] = {}
            for state in self._states:
                for device in state._vectors:  # noqa: SLF001  reader and state share their fields
                    groups.setdefault((device, state._streams.get(device)), []).append(state)  # noqa: SLF001
            for (device, stream), states in groups.items():
                vectors = [state._vectors[device] for state in states]  # noqa: SLF001
                numbers, event = _start_copy(vectors, device, stream)
                self._copies.append(_Copy(numbers, event, device, states, epoch_end))

    def finish(self, *, wait: bool) -> bool:
        """Record the finished copies, oldest first. Return whether no copy is pending."""
        with self._finishing:
            while self._copies:
                copy = self._copies[0]
                if copy.event is not None:
                    if wait:
                        copy.event.synchronize()
                    elif not copy.event.query():
                        return False
                self._absorb(self._copies.pop(0))
            return True

    def after_fork(self) -> None:
        """Drop all states and copies: the child cannot use the parent's devices."""
        self.lock, self._finishing = threading.RLock(), threading.RLock()
        self._copies, self._seen = [], {}
        for state in self._states:
            state.forget()

    def _absorb(self, copy: _Copy) -> None:
        numbers: list[float] = copy.numbers.tolist()
        begin = 0
        for state in copy.parts:
            now = numbers[begin : begin + state.num_sums]
            begin += state.num_sums
            before = self._seen.get((id(state), copy.device))
            self._seen[id(state), copy.device] = now
            growth = now if before is None else [new - old for new, old in zip(now, before, strict=True)]
            state.absorb(growth, copy.epoch_end)


def _start_copy(vectors: Sequence[Tensor], device: torch.device, stream: Any) -> tuple[Tensor, Any]:  # noqa: ANN401
    """Return the concatenated vectors and, on CUDA, the event after which their host copy is complete."""
    if device.type != "cuda":
        # Stays on the device; the library thread that reads it may block.
        return torch.cat([*vectors, vectors[0][:0]]), None
    with torch.cuda.device(device), torch.cuda.stream(stream):
        gathered = torch.cat(list(vectors))
        host = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True)
        host.copy_(gathered, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
    return host, event
