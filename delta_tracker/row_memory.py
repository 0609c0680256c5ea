"""Memory for the rows that reads return, used again when nobody holds them any more."""

from __future__ import annotations

import math
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LARGE_BYTES = 4 << 20  # from here on numpy asks for huge pages, and new memory costs more than what is written to it
_MAX_BYTES = 1 << 30
_SPARE = 4  # a buffer is used again for a quarter of its size or more
_ROUNDS = 4


@dataclass(slots=True, eq=False)
class _Buffer:
    memory: NDArray[np.uint8]
    num_references: int = 0  # when nobody else has any
    last_request: int = 0

    @property
    def is_free(self) -> bool:
        """Whether neither an array nor a tensor refers to the memory."""
        return sys.getrefcount(self.memory) == self.num_references


class RowMemory:
    """Lends memory on the CPU, and lends it again once it is free.

    New memory costs more than to copy rows into it: the first touch of 256 MB takes 17 ms of processor time in huge
    pages and 110 to 180 in small ones, the copy 15. A borrower gives nothing back: memory is free when no array and no
    tensor refers to it. What is lent is never set. For several threads.

    Memory: of all that it has lent, in use or free, 1 GiB at most is ever lent again; the rest goes back to the system
    when it is free. So does what was passed over in four requests for each buffer that is held, which is four reads
    where all reads are alike.

    Args:
        max_bytes: how much is kept at most.

    Example:
        >>> memory = RowMemory()
        >>> rows = memory.lend(8 << 20)
        >>> rows.shape
        (8388608,)
    """

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._buffers: list[_Buffer] = []
        self._num_requests = 0

    @property
    def num_bytes(self) -> int:
        """Bytes that are kept, lent ones included."""
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    def lend(self, num_bytes: int) -> NDArray[np.uint8]:
        """An array of bytes that nobody else has, at an address that suits every dtype."""
        if not _LARGE_BYTES <= num_bytes <= self._max_bytes:
            return np.empty(num_bytes, dtype=np.uint8)
        with self._lock:
            self._num_requests += 1
            oldest = self._num_requests - _ROUNDS * len(self._buffers)
            self._buffers = [each for each in self._buffers if each.last_request > oldest or not each.is_free]
            fitting = [
                each for each in self._buffers if num_bytes <= each.memory.nbytes <= _SPARE * num_bytes and each.is_free
            ]
            buffer = min(fitting, key=lambda each: each.memory.nbytes) if fitting else self._new(num_bytes)
            buffer.last_request = self._num_requests
            return buffer.memory[:num_bytes]

    def _new(self, num_bytes: int) -> _Buffer:
        size = min(num_bytes + num_bytes // _SPARE, self._max_bytes)  # some more rows next time fit too
        buffer = _Buffer(np.empty(size, dtype=np.uint8))  # what is not touched is not provided
        buffer.num_references = sys.getrefcount(buffer.memory)
        if self.num_bytes + size <= self._max_bytes:
            self._buffers.append(buffer)
        return buffer


_MEMORY = RowMemory()


def new_rows(num_rows: int, like: Tensor) -> Tensor:
    """Memory for rows, ``[num_rows, ...]``, with the dtype, device and other dimensions of ``like``; not set.

    Large memory on the CPU is this process's :class:`RowMemory`.
    """
    num_bytes = num_rows * math.prod(like.shape[1:]) * like.element_size()
    if like.device.type != "cpu" or num_bytes < _LARGE_BYTES:
        return like.new_empty((num_rows, *like.shape[1:]))
    memory = torch.from_numpy(_MEMORY.lend(num_bytes))
    return memory.view(like.dtype).view(num_rows, *like.shape[1:])
