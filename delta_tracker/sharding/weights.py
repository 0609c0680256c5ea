"""Read this rank's rows and their optimizer states directly from the kernels' memory.

Notation: ``N`` is the number of ids, ``R`` the number of rows of the shard, ``D`` the number of its columns, ``S`` the
number of its column ranges.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from delta_tracker.sharding.kernel_memory import one_cut
from delta_tracker.sharding.local_shard import LocalShard
from delta_tracker.sharding.named_writers import num_named_writes


def column_views(shard: LocalShard) -> list[Tensor]:
    """Return a view ``[R, columns]`` of the weights for each column range of a shard, in order. First flushes caches.

    Training overwrites the views. The list is empty if the rank has no rows of the table. To read several shards, make
    all calls inside one ``with`` statement of :func:`~delta_tracker.sharding.kernel_memory.one_cut`.
    """
    with one_cut():
        return [kernel.weight(slot) for kernel, slot in shard.holders]


def read_rows(shard: LocalShard, ids: Tensor | None = None) -> Tensor:
    """Return a copy of some or all rows of a shard.

    ``ids`` are ``[N]`` int64 local ids; None for all rows. First flushes caches. Inside ``with``
    :func:`~delta_tracker.sharding.kernel_memory.reading_in_place`, it instead reads cached rows from the cache.

    Returns:
        ``[N, D]`` in the table's dtype, with columns in the order of ``shard.spec.columns``; ``[0, 0]`` if the rank has
        no rows of the table.
    """
    if not shard.holders:
        return torch.empty(0, 0, dtype=shard.spec.table.dtype, device=shard.device)
    if ids is None:
        return _side_by_side([view.clone() for view in column_views(shard)])
    with one_cut():
        return _side_by_side([kernel.rows(slot, ids) for kernel, slot in shard.holders])


class WriteWatch:
    """Detector of in-place writes to a shard's weights, based on the version counters of the weight tensors.

    In-place operators of torch increment the counter, for example when values are copied into the tensors of a state
    dict. The following do not increment it: the fused backward pass, the reads of this module, collectives that write
    to a tensor (``broadcast``, ``all_reduce``, ``recv``), and writes through ``.data``, ``untyped_storage()``, DLPack,
    numpy or a raw pointer. The fused optimizers of ``torch.optim`` do not increment it either, but hooks report their
    steps. All tables of a kernel share one counter, so a write to one table is reported for all of them. A call of a
    function in :data:`delta_tracker.sharding.named_writers.NAMED_WRITERS` is reported for every table.

    Args:
        shard: function that returns the current shard. After a reshard, it returns a new shard.
    """

    __slots__ = ("_held", "_named", "_of", "_shard")

    def __init__(self, shard: Callable[[], LocalShard]) -> None:
        self._shard = shard
        self._of = shard()
        self._held = _held(self._of)
        self._named = num_named_writes()

    def __call__(self) -> bool:
        """Return True if weights were written or replaced since the previous call or the creation of this object."""
        # Takes less than a microsecond for most shards.
        shard = self._shard()
        named, self._named = self._named, num_named_writes()
        is_written = named != self._named
        for owner, name, tensor, version, address, storage in self._held:
            is_moved = storage is not None and (tensor.data_ptr() != address or bool(storage.expired()))  # type: ignore[no-untyped-call]
            if is_moved or tensor._version != version or owner.get(name) is not tensor:  # noqa: SLF001
                is_written = True
        if is_written or shard is not self._of:
            before, self._of, self._held = self._held, shard, _held(shard)
            is_written |= [id(each.tensor) for each in before] != [id(each.tensor) for each in self._held]
        return is_written


class _Weight(NamedTuple):
    """Nonempty weight tensor of a shard, and the values that are compared to detect a later write.

    Args:
        owner: mapping that contains the tensor, such as the parameters of a module.
        name: key of the tensor in the mapping.
        tensor: the tensor.
        version: value of its version counter.
        address: address of the first value; 0 in a kernel. In a plain module, it shows that ``weight.data`` was
            replaced, which does not change the version.
        storage: weak reference to the storage; None in a kernel. It shows that memory was freed and then reused at the
            same address.
    """

    owner: Mapping[str, Tensor | None]
    name: str
    tensor: Tensor
    version: int
    address: int
    storage: StorageWeakRef | None


def _held(shard: LocalShard) -> list[_Weight]:
    return [
        _Weight(
            owner,
            name,
            tensor,
            tensor._version,  # noqa: SLF001
            tensor.data_ptr() if shard.is_stepped else 0,
            StorageWeakRef(tensor.untyped_storage()) if shard.is_stepped else None,  # type: ignore[no-untyped-call]
        )
        for kernel, _ in shard.holders
        for owner, name in kernel.weight_slots()
        if (tensor := owner.get(name)) is not None and tensor.numel()
    ]


def row_chunks(shard: LocalShard, ids: Tensor, num_rows: int) -> Iterator[tuple[slice, Tensor]]:
    """Read the rows ``ids`` (``[N]`` int64 local ids) of a shard in chunks of at most ``num_rows`` rows.

    Yields:
        Slice of ``ids`` that the chunk covers, and a copy of these rows, ``[N, D]``.
    """
    views = column_views(shard) if len(ids) else []
    for begin in range(0, len(ids), num_rows):
        chunk = slice(begin, begin + num_rows)
        # Not read_rows(): each request ages the buffer pool, which would release the large buffers of the next read.
        yield chunk, _side_by_side([view.index_select(0, ids[chunk]) for view in views])


def read_optimizer(shard: LocalShard, ids: Tensor) -> tuple[Tensor, ...]:
    """Return a copy of the optimizer states of the rows ``ids`` (``[N]`` int64 local ids) of a shard.

    Returns:
        One tensor per state, in the optimizer's order: ``[N, D]``, or ``[N, S]`` for a state with one number per row
        and column range. The tuple is empty for SGD and unfused kernels, and if the rank has no rows.
    """
    every = zip(*state_views(shard), strict=True)
    return tuple(_side_by_side([view.index_select(0, ids) for view in views]) for views in every)


def state_views(shard: LocalShard) -> list[list[Tensor]]:
    """Return a list of views of the optimizer states for each column range of a shard, in order.

    A view is ``[R, columns]``, or ``[R, 1]`` for a state with one number per row. Training overwrites the views. The
    outer list is empty if the rank has no rows of the table, and the inner lists are empty if there are no states.
    """
    return [
        [state if state.dim() > 1 else state.unsqueeze(1) for state in kernel.optimizer_states(slot)]
        for kernel, slot in shard.holders
    ]


def _side_by_side(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim=1)
