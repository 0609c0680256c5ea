"""Memory on the CPU for rows and parts, which is reused once nothing refers to it any more."""

from __future__ import annotations

import math
import threading
import weakref
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LARGE_BYTES = 4 << 20  # from here on numpy asks for huge pages, and new memory costs more than what is written to it
_MAX_BYTES = 1 << 30
_ROUNDS = 4


class BufferPool:
    """Buffers on the CPU that are reused.

    New memory costs more than to copy rows into it: the first touch of 256 MB takes 17 ms of processor time in huge
    pages and 110 to 180 in small ones, the copy 15. Nothing has to be returned: a buffer is free when the array that
    :meth:`lend` returned is gone, which every view and tensor of it keeps alive; a weak reference shows that. For
    several threads, signal handlers and forked processes: :meth:`lend` never waits for the pool, but allocates new
    memory while another thread uses it.

    Memory: ``max_bytes`` of free buffers at most; a buffer in use has up to half as much again as was asked for. A
    buffer that was free during four requests for each buffer of the pool is freed, which is four reads where all reads
    are alike. A request takes time that grows with the logarithm of the number of buffers.

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
        self._num_requests = 0
        # A loan is a weak reference to an array; by its id, with the memory of the array.
        self._loans: dict[int, tuple[weakref.ref[NDArray[np.uint8]], NDArray[np.uint8]]] = {}
        self._ended: deque[int] = deque()  # ids of loans whose arrays are gone
        # Free memory by the number of its return, the oldest first, with the number of requests then.
        self._free: OrderedDict[int, tuple[NDArray[np.uint8], int]] = OrderedDict()
        self._sizes: list[tuple[int, int]] = []  # bytes and number of return of free memory, ascending
        self._free_bytes = 0
        self._num_returns = 0
        self._users: weakref.WeakSet[object] = weakref.WeakSet()

    @property
    def free_bytes(self) -> int:
        """Bytes of free buffers."""
        self._returned()
        return self._free_bytes

    def lend(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return an array of bytes that nothing else refers to, at an address that suits every dtype; uninitialised."""
        if num_bytes < self._min_bytes or not self._lock.acquire(blocking=False):
            return np.empty(num_bytes, dtype=np.uint8)
        try:
            self._num_requests += 1
            self._settle()
            memory = self._take(num_bytes)
            if memory is None:
                # New memory has room for some more rows next time; what is not touched is not provided.
                memory = np.empty(num_bytes + num_bytes // 8, dtype=np.uint8)
            # Not a slice: the views of that would hold the buffer itself, and nothing would tell that they exist.
            array = np.frombuffer(memory.data[:num_bytes], dtype=np.uint8)
            loan = weakref.ref(array, self._returned)
            self._loans[id(loan)] = loan, memory
            return array
        finally:
            self._lock.release()

    def join(self, user: object) -> None:
        """Count ``user`` among those for whom free memory is kept, until it leaves or is garbage."""
        self._users.add(user)

    def leave(self, user: object) -> None:
        """End :meth:`join`. The last user that leaves gives all free memory back to the system."""
        self._users.discard(user)
        if not self._users:
            self.give_back()

    def give_back(self) -> None:
        """Return all free memory to the system. Does nothing while another thread uses the pool: it never waits."""
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
                self._free.clear()
                self._sizes.clear()
                self._free_bytes = 0
            finally:
                self._lock.release()

    def _returned(self, loan: object = None) -> None:
        """Note the end of a loan. Any thread may call it at any time, because garbage collection does."""
        if loan is not None:
            self._ended.append(id(loan))
        if self._lock.acquire(blocking=False):  # otherwise the next request settles it
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        """Make the memory of ended loans free, and keep no more free memory than is wanted."""
        while self._ended:
            _, memory = self._loans.pop(self._ended.popleft())
            self._num_returns += 1
            self._free[self._num_returns] = memory, self._num_requests
            insort(self._sizes, (memory.nbytes, self._num_returns))
            self._free_bytes += memory.nbytes
        while self._free:
            number, (memory, since) = next(iter(self._free.items()))
            num_buffers = len(self._loans) + len(self._free)
            if self._free_bytes <= self._max_bytes and self._num_requests - since < _ROUNDS * num_buffers:
                break
            del self._free[number]
            del self._sizes[bisect_left(self._sizes, (memory.nbytes, number))]
            self._free_bytes -= memory.nbytes

    def _take(self, num_bytes: int) -> NDArray[np.uint8] | None:
        """Return the smallest free memory of at least this size, None if it is far larger or there is none."""
        place = bisect_left(self._sizes, (num_bytes, 0))
        if place == len(self._sizes) or self._sizes[place][0] > num_bytes * 3 // 2:
            return None
        _, number = self._sizes.pop(place)
        memory, _ = self._free.pop(number)
        self._free_bytes -= memory.nbytes
        return memory


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
