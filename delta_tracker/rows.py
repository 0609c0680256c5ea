"""Changed rows of one table, and functions that merge, copy and write rows.

Notation: ``N`` is the number of rows, ``S`` the number of values in the old state of a row.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from delta_tracker.buffers import new_rows

# Item size to dtype.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, eq=False)
class ChangedRows:
    """Changed rows of one shard, with their old states.

    Args:
        ids: ``[N]`` int64 local ids, ascending and unique.
        states: ``[N, S]`` old states, NaN where unknown; None in a mode without old states.
        known: ``[N]`` bool, True where the old state is known; None in a mode without old states.
        ages: ``[N]`` int32, number of top-k reads that left the row out; None if all are 0.
        former: ``[N]`` int64 raw id that owned each row when the consumer last received it, 2**63 - 1 if no raw id
            owned it; None for a table without managed collisions.
    """

    ids: Tensor
    states: Tensor | None = None
    known: Tensor | None = None
    ages: Tensor | None = None
    former: Tensor | None = None

    def __len__(self) -> int:
        return self.ids.shape[0]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors of all fields that are not None."""
        return tuple(each for each in (self.ids, *self.columns) if each is not None)

    @property
    def num_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(each.nbytes for each in self.tensors)

    def take(self, index: Tensor) -> "ChangedRows":
        """Return a copy of the rows that ``index`` selects.

        ``index`` is an ascending int64 tensor of row indices, or an ``[N]`` bool mask.
        """
        indices = index.nonzero().flatten() if index.dtype == torch.bool else index
        return ChangedRows(
            take_rows(self.ids, indices), *(None if each is None else take_rows(each, indices) for each in self.columns)
        )

    def copy(self) -> "ChangedRows":
        """Return a copy that shares no tensor with these rows."""
        columns = (None if each is None else new_rows(len(each), each).copy_(each) for each in self.columns)
        return ChangedRows(new_rows(len(self.ids), self.ids).copy_(self.ids), *columns)

    def without_states(self) -> "ChangedRows":
        """Return these rows without old states. The result shares the tensors of this object."""
        return ChangedRows(self.ids, ages=self.ages, former=self.former)

    def aged(self) -> "ChangedRows":
        """Return these rows with each age increased by one. The result shares the other tensors of this object."""
        ages = torch.zeros_like(self.ids, dtype=torch.int32) if self.ages is None else self.ages
        return ChangedRows(self.ids, self.states, self.known, ages + 1, self.former)

    @property
    def columns(self) -> tuple[Tensor | None, ...]:
        """Values of all fields except ``ids``, in the order of definition."""
        return self.states, self.known, self.ages, self.former


def merge_first(older: ChangedRows, newer: ChangedRows) -> ChangedRows:
    """Return the union of two sets of rows of one shard. A row in both sets is taken from ``older``.

    ``former`` must be present in both sets or in neither.

    Example:
        >>> older = ChangedRows(torch.tensor([2, 5]), torch.tensor([[2.0], [5.0]]), torch.tensor([True, True]))
        >>> newer = ChangedRows(torch.tensor([1, 5]), torch.tensor([[10.0], [50.0]]), torch.tensor([True, True]))
        >>> merged = merge_first(older, newer)
        >>> merged.ids, merged.states.flatten()
        (tensor([1, 2, 5]), tensor([10.,  2.,  5.]))
    """
    if len(older) == 0 or len(newer) == 0:
        return newer if len(older) == 0 else older
    ids, order = torch.cat([older.ids, newer.ids]).sort(stable=True)
    is_first = torch.ones_like(ids, dtype=torch.bool)
    is_first[1:] = ids[1:] != ids[:-1]
    index = order[is_first]
    assert (older.former is None) == (newer.former is None), "all rows of a table have former owners, or none has"
    columns = (
        None if left is None and right is None else torch.cat([_or_zeros(left, older), _or_zeros(right, newer)])[index]
        for left, right in zip(older.columns, newer.columns, strict=True)
    )
    return ChangedRows(ids[is_first], *columns)


def _or_zeros(column: Tensor | None, rows: ChangedRows) -> Tensor:
    return torch.zeros_like(rows.ids, dtype=torch.int32) if column is None else column


def first_per_id(ids: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct ids in ascending order, each with the state of its first occurrence.

    Args:
        ids: ``[N]`` int64, in any order.
        states: ``[N, ...]``.

    Returns:
        ``[M]`` ids and ``[M, ...]`` states, where ``M`` is the number of distinct ids.

    Example:
        >>> first_per_id(torch.tensor([3, 1, 3]), torch.tensor([30, 10, 31]))
        (tensor([1, 3]), tensor([10, 30]))
    """
    ordered, order = ids.sort(stable=True)
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_first], states[order[is_first]]


def last_per_id(ids: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct ids in ascending order, each with the state of its last occurrence."""
    return first_per_id(ids.flip(0), states.flip(0))


def take_rows(memory: Tensor, indices: Tensor) -> Tensor:
    """Return a copy of the rows at ``indices``, allocated with :func:`~delta_tracker.buffers.new_rows`.

    ``memory`` has the shape ``[R, ...]``. ``indices`` are ``[N]`` int64 in ``[0, R)``. The result is ``[N, ...]``.
    """
    return torch.index_select(memory.detach(), 0, indices, out=new_rows(len(indices), memory))


def split_by_mask(masks: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the indices of the True elements and the indices of the False elements of each mask.

    The function waits only once for each GPU, regardless of the number of masks.

    Args:
        masks: mapping from a name to a mask, ``[N]`` bool.

    Returns:
        Mapping from each name to two ascending int64 tensors: the indices of True and the indices of False.

    Example:
        >>> split_by_mask({"t": torch.tensor([True, False, True])})
        {'t': (tensor([0, 2]), tensor([1]))}
    """
    indices = {}
    on_device: dict[torch.device, list[str]] = {}
    for name, mask in masks.items():
        if mask.device.type == "cpu":
            indices[name] = mask.nonzero().flatten(), (~mask).nonzero().flatten()
        else:
            on_device.setdefault(mask.device, []).append(name)
    for names in on_device.values():
        counts: list[int] = torch.stack([masks[name].sum() for name in names]).tolist()
        for name, count in zip(names, counts, strict=True):
            # A stable sort puts the True elements first. Unlike nonzero(), it does not wait for the device.
            order = masks[name].logical_not().byte().sort(stable=True).indices
            indices[name] = order[:count], order[count:]
    return indices


def put_pieces(memory: Tensor, indices: Tensor, pieces: Iterable[Tensor]) -> None:
    """Write row ``i`` of the concatenated ``pieces`` to row ``indices[i]`` of ``memory``.

    Args:
        memory: ``[R, C]`` tensor to write to.
        indices: ``[N]`` int64 row numbers in ``memory``, unique and in ``[0, R)``.
        pieces: tensors ``[M, C]`` in the dtype of ``memory``, with ``N`` rows in total.

    Example:
        >>> memory = torch.zeros(3, 1)
        >>> put_pieces(memory, torch.tensor([2, 0]), [torch.ones(1, 1), torch.ones(1, 1) * 2])
        >>> memory.flatten()
        tensor([2., 0., 1.])
    """
    is_host = memory.device.type == indices.device.type == "cpu" and memory.dim() == 2  # noqa: PLR2004  rows
    held = _items(memory) if is_host and memory.stride(1) == 1 else None
    at, begin = indices.numpy() if is_host else None, 0
    for values in pieces:
        end = begin + values.shape[0]
        if held is None or at is None or values.device.type != "cpu" or values.stride(1) != 1:
            own = to_device(indices[begin:end], memory.device)
            memory.index_copy_(0, own, to_device(values, memory.device))
        elif held.flags.c_contiguous:
            held.put(at[begin:end], _items(values))  # faster, but would copy non-contiguous memory twice
        else:
            held[at[begin:end]] = _items(values)
        begin = end
    if held is not None:
        torch.autograd.graph.increment_version(memory)  # as torch's own writes do: autograd then detects the change


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return ``tensor`` on ``device``. A copy from the host to a CUDA device is asynchronous.

    An asynchronous copy uses pinned memory, which torch's allocator reuses once the copy is complete.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def copy_from_host(memory: Tensor, values: Tensor) -> None:
    """Copy ``values`` to ``memory``, a tensor of the same shape. A copy from the host to a GPU is asynchronous."""
    if memory.is_cuda and not values.is_cuda:  # faster than a comparison of devices
        memory.copy_(values.pin_memory(), non_blocking=True)
    else:
        memory.copy_(values)


def bits_of(rows: Tensor) -> Tensor:
    """Return the bits of ``rows`` as integers, in which NaNs with equal bits are equal and -0.0 differs from 0.0."""
    return rows.contiguous().view(_INTEGERS[rows.element_size()])


def _items(rows: Tensor) -> NDArray[np.void]:
    """Return a numpy view ``[N]`` of a CPU tensor ``[N, C]``, with one item per row.

    numpy copies such items twice as fast as ``index_copy_``, in one thread and without the GIL.
    """
    held = rows.view(torch.uint8).numpy()
    return held.view(np.dtype((np.void, held.shape[1])))[:, 0]


def memory_span(tensor: Tensor) -> tuple[str, int, int]:
    """Return the device of ``tensor``, the address of its first byte, and the address after its last byte."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = tensor.data_ptr() + (last + 1) * tensor.element_size() if tensor.numel() else tensor.data_ptr()
    return str(tensor.device), tensor.data_ptr(), end
