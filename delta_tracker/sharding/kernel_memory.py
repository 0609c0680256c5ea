"""Access to the memory of kernels: split it into tables, and flush the caches of a kernel before its rows are read.

A kernel is one of TorchRec's modules ``BatchedFusedEmbedding``, ``BatchedDenseEmbedding`` and their ``...Bag``
variants. It is a table-batched embedding (TBE): a group of tables has one autograd node. Within a kernel, a table is
identified by its slot, which is its index in the group, because the names of features and tables are not unique.

FBGEMM's split functions create views of all tables of a kernel. Calling them for each table takes time quadratic in the
number of tables, and calling them in each batch slows training down. The views are therefore cached until the tensors
of the kernel are replaced.

There is one cached view for each table and optimizer state. The views keep the memory of replaced tensors allocated
until the next read.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple
from weakref import ref

from torch import Tensor

from delta_tracker.errors import UnsupportedModelError
from delta_tracker.rows import take_rows
from delta_tracker.sharding.row_cache import CachedTable, between_prefetches, cached_table, rounding_to_nearest
from delta_tracker.sharding.torchrec_api import tbe_of, tensor_slots, weight_slots

_Views = list[list[Tensor]]


class Kernel:
    """Kernel (TBE module) of this rank. It provides the weights and optimizer states of the table in each slot.

    Args:
        module: TorchRec's module, which takes a KeyedJaggedTensor and returns the looked-up rows.
        slots: FQN (None if untracked) and number of features of the table in each slot, in order.
        is_fused: True if a fused optimizer updates rows in the backward pass of a lookup. False if the rows are
            ordinary parameters, which any code can write.
    """

    def __init__(self, module: Any, slots: tuple[tuple[str | None, int], ...], *, is_fused: bool) -> None:  # noqa: ANN401
        def states() -> _Views:
            _check_allocated(module, slots)
            return (tbe_of(module).split_optimizer_states() if is_fused else []) or [[]] * len(slots)

        self.module = module
        self.slots = slots
        self.is_fused = is_fused
        self._weights = _KeptViews(module, lambda: [[weight] for weight in module.split_embedding_weights()])
        self._states = _KeptViews(module, states)

    @cached_property
    def _cached(self) -> list[CachedTable | None]:
        return [cached_table(tbe_of(self.module), slot) if self.is_fused else None for slot in range(len(self.slots))]

    @property
    def has_cache(self) -> bool:
        """True if lookups move rows between a table and a cache on the device."""
        return any(each is not None for each in self._cached)

    def weight(self, slot: int) -> Tensor:
        """Return a view of the weights of a slot, ``[rows, columns]``.

        First flushes the kernel's caches, without overlapping a prefetch. Inside ``with one_cut()``, only the first
        call for a kernel flushes its caches.
        """
        cut = _THREAD.cut()
        if cut is None or self not in cut.flushed:
            tbe = tbe_of(self.module)
            with between_prefetches(tbe), rounding_to_nearest(tbe):
                self.module.flush()
        if cut is not None:
            cut.flushed.add(self)
        return self._weights()[slot][0]

    def memory(self, slot: int) -> Tensor:
        """Return a view of the weights of a slot, ``[rows, columns]``, without flushing caches. Thread-safe."""
        return self._weights()[slot][0]

    def rows(self, slot: int, ids: Tensor) -> Tensor:
        """Return a copy of the rows ``ids`` (``[N]`` int64 local ids) of a slot, ``[N, columns]``.

        First flushes the kernel's caches like :meth:`weight`. Inside ``with reading_in_place()``, it instead reads
        cached rows from the cache.
        """
        if _THREAD.in_place() is None:
            return take_rows(self.weight(slot), ids)
        cached = self._cached[slot]
        if cached is None:
            return take_rows(self._weights()[slot][0], ids)
        with between_prefetches(tbe_of(self.module)):  # they move rows between the table and the cache
            return cached.overlay(ids, take_rows(self._weights()[slot][0], ids))

    def weight_slots(self) -> list[tuple[Mapping[str, Tensor | None], str]]:
        """Return a ``(mapping, key)`` pair for each weight tensor of the kernel; ``mapping[key]`` is the tensor."""
        return weight_slots(self.module)

    def optimizer_states(self, slot: int) -> list[Tensor]:
        """Return a view of each optimizer state of a slot, ``[rows]`` or ``[rows, columns]``.

        The list is empty for SGD and for unfused kernels.
        """
        return self._states()[slot]


class _ViewedTensor(NamedTuple):
    """Tensor ``owner[name]`` of a module. Views share its memory, whose first element is at ``address``."""

    owner: Mapping[str, Tensor | None]
    name: str
    tensor: Tensor
    address: int


class _KeptViews:
    """Cached views of a module's tensors by slot. They are created again if a tensor was replaced or moved."""

    def __init__(self, module: Any, split: Callable[[], _Views]) -> None:  # noqa: ANN401  a torchrec class
        self._module = module
        self._split = split
        self._kept: tuple[_Views, list[_ViewedTensor]] | None = None

    def __call__(self) -> _Views:
        kept = self._kept  # another thread may replace it
        if kept is not None:
            for owner, name, tensor, address in kept[1]:  # not all(): this runs in each batch
                if owner.get(name) is not tensor or tensor.data_ptr() != address:
                    break
            else:
                return kept[0]
        self._kept = None
        views = [[view.detach() for view in each] for each in self._split()]
        viewed = _viewed_tensors(self._module, [view for each in views for view in each])
        self._kept = None if viewed is None else (views, viewed)
        return views


def _check_allocated(module: Any, slots: tuple[tuple[str | None, int], ...]) -> None:  # noqa: ANN401  a torchrec class
    found = [owner[name] for owner, name in tensor_slots(module) if name.startswith("momentum")]
    if any(state is not None and state.numel() and not state.untyped_storage().nbytes() for state in found):
        raise UnsupportedModelError(
            {fqn: "a pipeline moved them to host memory" for fqn, _ in slots if fqn is not None},
            "Leave model.fused_optimizer out of the pipeline's optimizer: the backward pass needs these states",
            problem="tables whose optimizer states are freed",
        )


def _viewed_tensors(module: Any, views: list[Tensor]) -> list[_ViewedTensor] | None:  # noqa: ANN401  a torchrec class
    """Return the tensors of a module that share memory with ``views``; None if a view shares memory with no tensor."""
    shared = {view.untyped_storage().data_ptr() for view in views if view.numel()}
    viewed = [
        _ViewedTensor(owner, name, tensor, tensor.data_ptr())
        for owner, name in tensor_slots(module)
        if (tensor := owner[name]) is not None and tensor.untyped_storage().data_ptr() in shared
    ]
    found = {each.tensor.untyped_storage().data_ptr() for each in viewed}
    return viewed if found == shared else None


@dataclass(eq=False)
class _Statement:
    """Active ``with one_cut()`` or ``with reading_in_place()``, and the kernels that were flushed inside it."""

    flushed: set[Kernel] = field(default_factory=set)


_ENDED = ref(_Statement())


class _Thread(threading.local):
    """State of the ``with`` statements of this module that are active in this thread.

    Only the frame that runs a statement has a strong reference to it. Therefore an interruption ends the statement.

    Attributes:
        cut: the active ``with one_cut()``.
        in_place: the innermost active ``with reading_in_place()``.
    """

    cut: ref[_Statement] = _ENDED
    in_place: ref[_Statement] = _ENDED


_THREAD = _Thread()


_NESTED = nullcontext()


def one_cut() -> AbstractContextManager[None]:
    """Return a context manager in which reads by this thread flush the caches of each kernel at most once.

    This thread must not train inside the ``with`` statement, because later reads would miss rows that training writes
    to a cache. If another thread writes rows during the statement, the next read of changes returns these rows. The
    call has no effect inside another ``with one_cut()`` or ``with reading_in_place()``.
    """
    if _THREAD.cut() is None and _THREAD.in_place() is None:
        return _active("cut")
    return _NESTED  # avoids a generator: hooks call this function for each table of each batch


def reading_in_place() -> AbstractContextManager[None]:
    """Return a context manager in which :meth:`Kernel.rows` does not flush caches. Hooks enter it in each batch."""
    return _active("in_place")


@contextmanager
def _active(name: Literal["cut", "in_place"]) -> Iterator[None]:
    statement, before = _Statement(), getattr(_THREAD, name)
    setattr(_THREAD, name, ref(statement))
    try:
        yield
    finally:
        setattr(_THREAD, name, before)
