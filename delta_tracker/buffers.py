"""Memory on the CPU for rows and parts, which is reused once nothing refers to it any more."""

from __future__ import annotations

import math
import operator
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LARGE_BYTES = 4 << 20  # from here on numpy asks for huge pages, and new memory costs more than what is written to it
_MAX_BYTES = 1 << 30
_ROUNDS = 4


@dataclass(slots=True, eq=False)
class _Buffer:
    """Memory, and the array of it that was lent last, which is gone if the memory is free."""

    memory: NDArray[np.uint8]
    loan: weakref.ref[NDArray[np.uint8]]
    last_request: int


class BufferPool:
    """Buffers on the CPU that are reused.

    New memory costs more than to copy rows into it: the first touch of 256 MB takes 17 ms of processor time in huge
    pages and 110 to 180 in small ones, the copy 15. Nothing has to be returned: a buffer is free when the array that
    :meth:`lend` returned is gone, which every view and tensor of it keeps alive; a weak reference shows that. For
    several threads, signal handlers and forked processes: :meth:`lend` never waits for the pool, but allocates new
    memory while another thread uses it.

    Memory: ``max_bytes`` of free buffers at most; a buffer in use has up to half as much again as was asked for. A
    buffer that is not reused in four requests for each buffer of the pool is freed, which is four reads where all reads
    are alike.

    Args:
        max_bytes: how many bytes of free buffers are kept at most.
        min_bytes: smaller memory is not taken from the pool.

    Example:
        >>> memory = BufferPool()
        >>> rows = memory.lend(8 << 20)
        >>> rows.shape
        (8388608,)
        >>> del rows
        >>> memory.free_bytes >= 8 << 20
        True
    """

    def __init__(self, max_bytes: int = _MAX_BYTES, *, min_bytes: int = _LARGE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._min_bytes = min_bytes
        self._lock = threading.Lock()
        self._buffers: list[_Buffer] = []
        self._num_requests = 0

    @property
    def free_bytes(self) -> int:
        """Bytes of free buffers."""
        return sum(buffer.memory.nbytes for buffer in self._buffers if buffer.loan() is None)

    def lend(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return an array of bytes that nothing else refers to, at an address that suits every dtype; uninitialised."""
        if num_bytes < self._min_bytes or not self._lock.acquire(blocking=False):
            return np.empty(num_bytes, dtype=np.uint8)
        try:
            self._num_requests += 1
            self._trim()
            best: _Buffer | None = None
            for each in self._buffers:
                is_fitting = num_bytes <= each.memory.nbytes <= num_bytes * 3 // 2 and each.loan() is None
                if is_fitting and (best is None or each.memory.nbytes < best.memory.nbytes):
                    best = each
            # New memory has room for some more rows next time; what is not touched is not provided.
            memory = np.empty(num_bytes + num_bytes // 8, dtype=np.uint8) if best is None else best.memory
            # Not a slice: the views of that would hold the buffer itself, and nothing would tell that they exist.
            array = np.frombuffer(memory.data[:num_bytes], dtype=np.uint8)
            loan = weakref.ref(array, self._returned)
            if best is None:
                self._buffers.append(_Buffer(memory, loan, self._num_requests))
            else:
                best.loan, best.last_request = loan, self._num_requests
            return array
        finally:
            self._lock.release()

    def give_back(self) -> None:
        """Let the system have all that is free; nothing while somebody borrows, for whom it would have to wait."""
        if self._lock.acquire(blocking=False):
            try:
                self._buffers = [each for each in self._buffers if each.loan() is not None]
            finally:
                self._lock.release()

    def _returned(self, _loan: object) -> None:
        if self._lock.acquire(blocking=False):  # otherwise the next request will
            try:
                self._trim()
            finally:
                self._lock.release()

    def _trim(self) -> None:
        """Keep no more free memory than is wanted."""
        oldest = self._num_requests - _ROUNDS * len(self._buffers)
        room, kept = self._max_bytes, []
        for buffer in sorted(self._buffers, key=operator.attrgetter("last_request"), reverse=True):
            if buffer.loan() is None:
                room -= buffer.memory.nbytes
                if room < 0 or buffer.last_request <= oldest:
                    continue
            kept.append(buffer)
        self._buffers = kept


MEMORY = BufferPool()
"""This process's."""


def new_rows(num_rows: int, like: Tensor) -> Tensor:
    """Memory for rows, ``[num_rows, ...]``, with the dtype, device and other dimensions of ``like``; not set.

    Large memory on the CPU is this process's :class:`BufferPool`.
    """
    num_bytes = num_rows * math.prod(like.shape[1:]) * like.element_size()
    if like.device.type != "cpu" or num_bytes < _LARGE_BYTES:
        return like.new_empty((num_rows, *like.shape[1:]))
    memory = torch.from_numpy(MEMORY.lend(num_bytes))
    return memory.view(like.dtype).view(num_rows, *like.shape[1:])
