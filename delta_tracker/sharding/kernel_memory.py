"""Flush a kernel's caches and split its memory into tables once per cut, not once per table.

FBGEMM builds the views of all tables of a kernel at each call: asking for every table in turn takes time that grows
with the square of their number.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

from torch import Tensor

from delta_tracker.sharding.discover import Kernel


class KernelMemory:
    """The tensors of one kernel, one entry for each table slot, after its caches were flushed.

    Args:
        kernel: the kernel; it is flushed now.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        kernel.module.flush()

    @cached_property
    def weights(self) -> list[Tensor]:
        """Live views ``[R, columns]`` of the slots' rows."""
        return [view.detach() for view in self._kernel.module.split_embedding_weights()]

    @cached_property
    def optimizer_states(self) -> list[list[Tensor]]:
        """Live states ``[R]`` or ``[R, columns]`` of the slots' rows; none for SGD and where nothing is fused."""
        kernel = self._kernel
        found = kernel.module.emb_module.split_optimizer_states() if kernel.is_fused else []
        return [[state.detach() for state in states] for states in found] or [[] for _ in kernel.slots]


class _Cut(threading.local):
    """The kernels that this thread has read in its :func:`one_cut`; None outside of one."""

    memories: dict[Kernel, KernelMemory] | None = None


_CUT = _Cut()


@contextmanager
def one_cut() -> Iterator[None]:
    """Flush and split each kernel at most once in this block, for reads of this thread.

    This thread must not train in the block: a row that is written to a cache after its flush is read as it was before.
    What other threads write counts as changed after the cut. A block inside another one belongs to it.
    """
    if _CUT.memories is not None:
        yield
        return
    _CUT.memories = {}
    try:
        yield
    finally:
        _CUT.memories = None


def memory_of(kernel: Kernel) -> KernelMemory:
    """Return the memory of a kernel, flushed now or earlier in this :func:`one_cut`."""
    memories = _CUT.memories
    if memories is None:
        return KernelMemory(kernel)
    if kernel not in memories:
        memories[kernel] = KernelMemory(kernel)
    return memories[kernel]
