"""Flush a kernel's caches and split its memory into tables once per cut instead of once per table.

FBGEMM's split functions create the views of all tables of a kernel. Calling them once per table therefore takes time
quadratic in the number of tables.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property

from torch import Tensor

from delta_tracker.sharding.discover import Kernel


class KernelMemory:
    """Memory of one kernel, split into weights and optimizer states by table slot.

    The constructor flushes the kernel's caches.

    Args:
        kernel: the kernel.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        kernel.module.flush()

    @cached_property
    def weights(self) -> list[Tensor]:
        """Weights of each slot, ``[rows, columns]``, as tensors that share the kernel's memory."""
        return [view.detach() for view in self._kernel.module.split_embedding_weights()]

    @cached_property
    def optimizer_states(self) -> list[list[Tensor]]:
        """Optimizer states of each slot, ``[rows]`` or ``[rows, columns]``, as tensors that share the kernel's memory.

        The list of each slot is empty for SGD and for unfused kernels.
        """
        kernel = self._kernel
        found = kernel.module.emb_module.split_optimizer_states() if kernel.is_fused else []
        return [[state.detach() for state in states] for states in found] or [[] for _ in kernel.slots]


class _Cut(threading.local):
    """Kernels that this thread has read in a ``with one_cut()`` statement; ``memories`` is None outside of it."""

    memories: dict[Kernel, KernelMemory] | None = None


_CUT = _Cut()
_NESTED = nullcontext()


def one_cut() -> AbstractContextManager[None]:
    """Return a context manager in which reads by this thread flush each kernel and split its memory at most once.

    This thread must not train inside the ``with`` statement, because reads miss rows that are written to a cache after
    the cache was flushed. Writes of other threads count as changes after the cut. Nested calls have no effect.
    """
    return _outermost_cut() if _CUT.memories is None else _NESTED  # avoids the 1.3 us of a generator


@contextmanager
def _outermost_cut() -> Iterator[None]:
    _CUT.memories = {}
    try:
        yield
    finally:
        _CUT.memories = None


def memory_of(kernel: Kernel) -> KernelMemory:
    """Return the memory of a kernel after flushing its caches.

    Inside ``with one_cut()``, only the first call for a kernel flushes its caches.
    """
    memories = _CUT.memories
    if memories is None:
        return KernelMemory(kernel)
    if kernel not in memories:
        memories[kernel] = KernelMemory(kernel)
    return memories[kernel]
