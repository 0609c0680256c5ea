"""Pool of CPU buffers for rows and parts. A buffer is reused once no array refers to it."""

import math
import threading
import weakref
from bisect import bisect_left, insort
from collections import OrderedDict, deque

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# New memory costs more than its reuse from here on: a read of 20 batches of 256 ids took 1.7 times as long.
_LARGE_BYTES = 256 << 10
_MAX_BYTES = 1 << 30
_ROUNDS = 4


class BufferPool:
    """Pool of reusable CPU buffers.

    A buffer becomes free when the array from :meth:`allocate` is garbage-collected. Views of the array, and tensors
    that share its memory, keep it alive. The pool may be used from several threads, from signal handlers, and after a
    fork. While another thread uses the pool, :meth:`allocate` returns a new array instead of blocking.

    Reuse avoids page faults: the first touch of 256 MB takes 17 ms of processor time with huge pages and 110 to 180 ms
    without. Copying 256 MB of rows takes 15 ms.

    All free buffers together take at most ``max_bytes``. A buffer in use may be up to 1.5 times as large as requested.
    With n buffers, a request takes O(log n) time, and a buffer that stays free during 4 n requests is released.

    Args:
        max_bytes: maximum total size of the free buffers, in bytes.
        min_bytes: minimum size of a request, in bytes. Smaller arrays are always new and do not belong to the pool.

    Example:
        >>> memory = BufferPool()
        >>> rows = memory.allocate(8 << 20)
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
        # Arrays in use. Key: id() of the weak reference; value: (weak reference, memory of the array).
        self._references: dict[int, tuple[weakref.ref[NDArray[np.uint8]], NDArray[np.uint8]]] = {}
        self._ended: deque[int] = deque()  # keys of self._references whose arrays are garbage
        # Free memory, oldest first. Key: self._num_returns when it became free; value: (memory, requests until then).
        self._free: OrderedDict[int, tuple[NDArray[np.uint8], int]] = OrderedDict()
        self._sizes: list[tuple[int, int]] = []  # (bytes, key in self._free), ascending
        self._free_bytes = 0
        self._num_returns = 0
        self._users: weakref.WeakSet[object] = weakref.WeakSet()

    @property
    def free_bytes(self) -> int:
        """Total size of the free buffers in bytes."""
        self._returned()
        return self._free_bytes

    def allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return an uninitialized uint8 array of ``num_bytes`` elements that is aligned for every dtype."""
        if num_bytes < self._min_bytes or not self._lock.acquire(blocking=False):
            return np.empty(num_bytes, dtype=np.uint8)
        try:
            self._num_requests += 1
            self._mark_free()
            memory = self._take(num_bytes)
            if memory is None:
                memory = np.empty(capacity(num_bytes), dtype=np.uint8)
            # Not a slice: views of a slice would refer to the buffer itself, and the weak reference would miss them.
            array = np.frombuffer(memory.data[:num_bytes], dtype=np.uint8)
            reference = weakref.ref(array, self._returned)
            self._references[id(reference)] = reference, memory
            return array
        finally:
            self._lock.release()

    def join(self, user: object) -> None:
        """Register ``user`` as a user of the pool until :meth:`leave` is called. Keeps only a weak reference to it."""
        self._users.add(user)

    def leave(self, user: object) -> None:
        """Unregister ``user``. If no other user is registered, release all free buffers."""
        self._users.discard(user)
        if not self._users:
            self.release_free()

    def release_free(self) -> None:
        """Release all free buffers. Does nothing while another thread uses the pool. Never blocks."""
        if self._lock.acquire(blocking=False):
            try:
                self._mark_free()
                self._free.clear()
                self._sizes.clear()
                self._free_bytes = 0
            finally:
                self._lock.release()

    def _returned(self, reference: object = None) -> None:
        """Record that an array was garbage-collected, and mark the memory of all recorded arrays as free.

        If another thread is using the pool, the memory is marked by a later request. The garbage collector may call
        this method in any thread at any time.
        """
        if reference is not None:
            self._ended.append(id(reference))
        if self._lock.acquire(blocking=False):  # otherwise the next request frees the memory
            try:
                self._mark_free()
            finally:
                self._lock.release()

    def _mark_free(self) -> None:
        """Mark memory of garbage-collected arrays as free, and release buffers beyond the limits. Requires the lock."""
        while self._ended:
            _, memory = self._references.pop(self._ended.popleft())
            self._num_returns += 1
            self._free[self._num_returns] = memory, self._num_requests
            insort(self._sizes, (memory.nbytes, self._num_returns))
            self._free_bytes += memory.nbytes
        while self._free:
            number, (memory, since) = next(iter(self._free.items()))
            num_buffers = len(self._references) + len(self._free)
            if self._free_bytes <= self._max_bytes and self._num_requests - since < _ROUNDS * num_buffers:
                break
            del self._free[number]
            del self._sizes[bisect_left(self._sizes, (memory.nbytes, number))]
            self._free_bytes -= memory.nbytes

    def _take(self, num_bytes: int) -> NDArray[np.uint8] | None:
        """Remove and return the smallest free buffer of 1 to 1.5 times ``num_bytes``; None if none fits."""
        index = bisect_left(self._sizes, (num_bytes, 0))
        if index == len(self._sizes) or self._sizes[index][0] > num_bytes * 3 // 2:
            return None
        _, number = self._sizes.pop(index)
        memory, _ = self._free.pop(number)
        self._free_bytes -= memory.nbytes
        return memory


def capacity(num_bytes: int) -> int:
    """Return the size in bytes of a new buffer for a request of ``num_bytes``. Slightly larger requests fit, too."""
    return num_bytes + num_bytes // 8  # untouched pages use no memory


MEMORY = BufferPool()
"""Default buffer pool of this process. All trackers share it."""


def new_rows(num_rows: int, like: Tensor) -> Tensor:
    """Return an uninitialized tensor ``[num_rows, ...]`` with the dtype, device and trailing dimensions of ``like``.

    The memory of large CPU tensors comes from :data:`MEMORY`.
    """
    num_bytes = num_rows * math.prod(like.shape[1:]) * like.element_size()
    if like.device.type != "cpu" or num_bytes < _LARGE_BYTES:
        return like.new_empty((num_rows, *like.shape[1:]))
    memory = torch.from_numpy(MEMORY.allocate(num_bytes))
    return memory.view(like.dtype).view(num_rows, *like.shape[1:])
