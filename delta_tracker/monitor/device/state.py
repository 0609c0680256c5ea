"""Sums that live on a device, and how they reach the host without anybody waiting.

Letters: ``K`` numbers of a state.

A state only ever grows by addition, on the device of its values. A reading is a copy of it, started in the order of
the device's work and fetched when it is done; what happened between two readings is their difference. So nothing is
ever reset, and no reading is torn.
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
"""Step and epoch."""

_POLL_SECONDS, _NUM_POLLS = 0.001, 50


class DeviceState(ABC):
    """A vector of ``K`` sums on each device that values came from.

    Args:
        name: names it.
        num_sums: ``K``.
        reader: who reads it.
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
        """Record by how much the ``K`` sums grew since the last reading; called in the collector's threads.

        Args:
            growth: ``[K]``.
            epoch_end: step and epoch, if the growth ends one.
        """

    def sums(self, device: torch.device) -> Tensor:
        """The ``[K]`` sums of all devices, on one; waits for the others."""
        with self._reader.lock:
            total = torch.zeros(self.num_sums, dtype=sum_dtype(device), device=device)
            for own, vector in self._vectors.items():
                if own.type == "cuda":
                    self._streams[own].synchronize()
                total += vector.to(device)
            return total

    def merged_until(self, now: Tensor) -> Tensor:
        """What :meth:`sums` said when this was called last, with ``now`` in its place from now on."""
        before, self._merged = self._merged, now
        return torch.zeros_like(now) if before is None else before

    def forget(self) -> None:
        """Begin at 0 on every device; for a process that was forked."""
        self._vectors, self._streams, self._merged = {}, {}, None

    def _add(self, device: torch.device, growth: Tensor, places: Tensor | None = None) -> None:
        """Add ``[K]`` numbers, or each of ``[N]`` at its place in ``[N]``; launches work and waits for nothing."""
        with self._reader.lock:
            vector = self._vector(device)
            if places is None:
                vector += growth
            else:
                vector.index_add_(0, places, growth)

    def _vector(self, device: torch.device) -> Tensor:
        vector = self._vectors.get(device)
        if device.type == "cuda":
            # Work of different streams on one vector goes one after the other.
            stream, last = torch.cuda.current_stream(device), self._streams.get(device)
            if last is not None and last != stream:
                stream.wait_stream(last)
            self._streams[device] = stream
        if vector is None:
            # A tensor that is made in inference mode could not be written to outside it.
            with torch.inference_mode(mode=False):
                vector = torch.zeros(self.num_sums, dtype=sum_dtype(device), device=device)
            self._vectors[device] = vector
        return vector


def sum_dtype(device: torch.device) -> torch.dtype:
    """float64, which counts exactly to 2**53; float32 where a device has nothing better."""
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass(slots=True)
class _Copy:
    """A copy under way: ``numbers`` are the vectors of ``parts`` one after the other once ``event`` is done."""

    numbers: Tensor
    event: Any
    device: torch.device
    parts: list[DeviceState]
    epoch_end: EpochEnd | None


@dataclass(slots=True)
class DeviceReader(Source):
    """Reads all device states of a monitor: one copy for each device, however many states it holds.

    Args:
        progress: what the ends of epochs are stamped with.
    """

    progress: Progress
    name: str = "device"
    lock: threading.RLock = field(default_factory=threading.RLock)
    _states: list[DeviceState] = field(default_factory=list)
    _copies: list[_Copy] = field(default_factory=list)
    _seen: dict[tuple[int, torch.device], list[float]] = field(default_factory=dict)
    _finishing: threading.RLock = field(default_factory=threading.RLock)

    def add(self, state: DeviceState) -> None:
        """Read this one too."""
        with self.lock:
            self._states.append(state)

    def read(self, *, is_last: bool) -> None:
        """Start copies, and record what has arrived; wait for the device only if ``is_last``."""
        self.begin()
        for _ in range(_NUM_POLLS):
            if self.finish(wait=is_last):
                return
            time.sleep(_POLL_SECONDS)  # in a thread of the library: nobody else waits

    def end_epoch(self) -> None:
        """Start copies that end the epoch: what comes after them belongs to the next one. Waits for nothing."""
        self.begin((self.progress.step, self.progress.epoch))

    def begin(self, epoch_end: EpochEnd | None = None) -> None:
        """Start a copy of every state, in the order of the work that was launched on its device."""
        with self.lock:
            groups: dict[tuple[torch.device, Any], list[DeviceState]] = {}
            for state in self._states:
                for device in state._vectors:  # noqa: SLF001  its other half
                    groups.setdefault((device, state._streams.get(device)), []).append(state)  # noqa: SLF001
            for (device, stream), states in groups.items():
                vectors = [state._vectors[device] for state in states]  # noqa: SLF001
                numbers, event = _start_copy(vectors, device, stream)
                self._copies.append(_Copy(numbers, event, device, states, epoch_end))

    def finish(self, *, wait: bool) -> bool:
        """Record the copies that arrived, oldest first; whether none is left."""
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
        """Begin anew: a device of the parent process is not the child's."""
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
    """A tensor that will hold all vectors, on the host if there is an event, which says when."""
    if device.type != "cuda":
        # It stays there until a thread of the library reads it, which may wait.
        return torch.cat([*vectors, vectors[0][:0]]), None
    with torch.cuda.device(device), torch.cuda.stream(stream):
        gathered = torch.cat(list(vectors))
        host = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True)
        host.copy_(gathered, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
    return host, event
