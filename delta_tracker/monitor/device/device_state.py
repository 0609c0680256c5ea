"""Sums that accumulate on a device and are copied to the host asynchronously.

Notation: ``K`` is the number of sums of a state.

Each value is added to sums on the device of the value. A reading is an asynchronous copy of the sums to the host. The
device executes the copy in order with its other work. The difference between two readings, called the growth, is the
sum of the values added between the readings. The sums are never reset, and no value is lost or counted twice.
"""

import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from delta_tracker.buffers.cuda_fence import StreamFence, on_stream
from delta_tracker.buffers.host_copy import HostCopy
from delta_tracker.monitor.clock import Progress
from delta_tracker.monitor.polled_stats import MetricSource

EpochEnd = tuple[int | None, int | None]
"""Step and epoch number at the end of an epoch; None for a number that was not set."""

_POLL_SECONDS, _NUM_POLLS = 0.001, 50


class DeviceState(ABC):
    """Base class of metrics that add values to ``K`` sums on each device.

    Args:
        reader: reader that copies the sums to the host.
    """

    num_sums: int
    """Number of sums ``K``."""

    is_deleted = False
    """True after the destructor has passed the state to the reader for a last reading."""

    def __init__(self, reader: "DeviceReader") -> None:
        self._reader = reader
        self._vectors: dict[torch.device, Tensor] = {}
        self._fence = StreamFence(self._vectors.values)
        self._seen: dict[torch.device, list[float]] = {}  # sums that were recorded
        reader.add(self)

    def __del__(self) -> None:
        """Pass the state to the reader, which reads it once more to record the growth since the last reading."""
        if getattr(self, "_vectors", None):  # missing if a constructor raised
            self.is_deleted = True
            self._reader.deleted.append(self)

    @abstractmethod
    def record_growth(self, growth: list[float], epoch_end: EpochEnd | None) -> None:
        """Record the growth of the ``K`` sums between two readings on one device. Called in threads of the library.

        If the second reading was started at the end of an epoch, ``epoch_end`` is the step and epoch number. Otherwise,
        ``epoch_end`` is None.
        """

    def after_fork(self) -> None:
        """Discard the sums of all devices. Called in a forked child."""
        self._vectors, self._seen = {}, {}
        self._fence = StreamFence(self._vectors.values)

    def _add(self, device: torch.device, growth: Tensor, indices: Tensor | None = None) -> None:
        """Add numbers to the sums on ``device``. Does not wait for the device.

        Without ``indices``, ``growth`` contains ``K`` numbers, one for each sum. With ``indices``, both tensors have
        shape ``[N]``, and ``growth[i]`` is added to the sum at ``indices[i]``.
        """
        with self._reader.lock:
            vector = self._vector(device)
            if indices is None:
                vector += growth
            else:
                vector.index_add_(0, indices, growth)

    def _vector(self, device: torch.device) -> Tensor:
        vector = self._vectors.get(device)
        if vector is None:
            # A tensor created in inference mode cannot be written outside of it.
            with torch.inference_mode(mode=False):
                vector = torch.zeros(self.num_sums, dtype=sum_dtype(device), device=device)
            self._vectors[device] = vector
            self._fence.guard(self._vectors)
        if device.type == "cuda":
            self._fence.enter()
        return vector


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of sums on ``device``: float64, or float32 on MPS, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass(slots=True)
class _Copy:
    """Copy of the sums of the states ``parts`` on one device. ``epoch_end`` is set for a copy at an epoch's end."""

    numbers: HostCopy
    device: torch.device
    parts: list[DeviceState]
    epoch_end: EpochEnd | None


@dataclass(slots=True)
class DeviceReader(MetricSource):
    """Source that copies the sums of all device states of a monitor to the host, once per device and CUDA stream.

    Args:
        progress: step and epoch of the monitor.
        lock: lock that protects the states and the list of copies.
        deleted: deleted states that still need a last reading. Destructors append to this queue without the lock.
    """

    progress: Progress
    name: str = "device"
    lock: threading.RLock = field(default_factory=threading.RLock)
    deleted: deque[DeviceState] = field(default_factory=deque)
    _states: list[weakref.ref[DeviceState]] = field(default_factory=list)
    _copies: list[_Copy] = field(default_factory=list)
    _finishing: threading.RLock = field(default_factory=threading.RLock)

    def add(self, state: DeviceState) -> None:
        """Add a state. Its sums are read at each collection, and once more after the state is deleted."""
        with self.lock:
            self._states.append(weakref.ref(state))

    def read(self, *, is_last: bool) -> None:
        """Start to copy the sums of all states, and record the copies that are complete within about 50 ms.

        If ``is_last`` is True, wait until all copies are complete.
        """
        self.begin()
        for _ in range(_NUM_POLLS):
            if self.finish(wait=is_last):
                return
            time.sleep(_POLL_SECONDS)  # blocks only a thread of the library

    def end_epoch(self) -> None:
        """Start to copy the sums of all states at the end of an epoch. Does not wait for the device."""
        self.begin((self.progress.step, self.progress.epoch))

    def begin(self, epoch_end: EpochEnd | None = None) -> None:
        """Start to copy the sums of all states, each on the CUDA stream that last updated the state.

        After all copies are started, deleted states are removed from the reader. If a copy cannot be started, the next
        call reads the deleted states again. At the end of an epoch, pass the step and epoch number as ``epoch_end``.
        """
        with self.lock:
            deleted = [self.deleted[index] for index in range(len(self.deleted))]  # a destructor may append meanwhile
            groups: dict[tuple[torch.device, Any], list[DeviceState]] = {}
            for state in self._alive() + deleted:
                for device in state._vectors:  # noqa: SLF001  reader and state share their fields
                    groups.setdefault((device, state._fence.last_stream(device)), []).append(state)  # noqa: SLF001
            for (device, stream), states in groups.items():
                vectors = [state._vectors[device] for state in states]  # noqa: SLF001
                self._copies.append(_Copy(_start_copy(vectors, stream), device, states, epoch_end))
            for _ in deleted:
                self.deleted.popleft()

    def finish(self, *, wait: bool) -> bool:
        """Record completed copies, oldest first, up to the first pending copy. Return True if no copy is pending.

        If ``wait`` is True, wait until all copies are complete.
        """
        with self._finishing:
            while self._copies:
                if not wait and self._copies[0].numbers.is_running:
                    return False
                numbers: list[float] = self._copies[0].numbers.result().tolist()
                self._record_copy(self._copies.pop(0), numbers)
            return True

    def after_fork(self) -> None:
        """Discard all sums and copies. Called in a forked child, which cannot use the devices of its parent."""
        self.lock, self._finishing = threading.RLock(), threading.RLock()
        self._copies = []
        self.deleted.clear()
        for state in self._alive():
            state.after_fork()

    def _alive(self) -> list[DeviceState]:
        """Return the states that were not deleted, and remove the deleted ones from the list of states."""
        found = [each for reference in self._states if (each := reference()) is not None and not each.is_deleted]
        self._states = [weakref.ref(state) for state in found]
        return found

    def _record_copy(self, copy: _Copy, numbers: list[float]) -> None:
        begin = 0
        for state in copy.parts:
            now = numbers[begin : begin + state.num_sums]
            begin += state.num_sums
            before = state._seen.get(copy.device)  # noqa: SLF001  reader and state share their fields
            state._seen[copy.device] = now  # noqa: SLF001
            growth = now if before is None else [new - old for new, old in zip(now, before, strict=True)]
            state.record_growth(growth, copy.epoch_end)


def _start_copy(vectors: Sequence[Tensor], stream: Any) -> HostCopy:  # noqa: ANN401  torch's stubs lack it
    """Concatenate ``vectors`` and start to copy the result to the host on the CUDA stream ``stream``.

    For devices other than CUDA, ``stream`` is None. The copy may block, and is made when its result is read.
    """
    with nullcontext() if stream is None else on_stream(stream):
        return HostCopy(torch.cat([*vectors, vectors[0][:0]]))  # never one of the vectors themselves
