"""Pure functions on the changed rows of one table.

Letters: ``N`` rows, ``S`` numbers in an old state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray


NewRows = Callable[[int, Tensor], Tensor]
"""Allocate uninitialized memory ``[num_rows, ...]`` with the dtype and device of a tensor."""


def plain_rows(num_rows: int, like: Tensor) -> Tensor:
    """Allocate with torch's own allocator; see :data:`NewRows`."""
    return like.new_empty((num_rows, *like.shape[1:]))


@dataclass(frozen=True, slots=True, eq=False)
class ChangedRows:
    """Changed rows of one shard, with their old states.

    Args:
        ids: ``[N]`` int64 local ids, ascending and unique.
        states: ``[N, S]`` old states, NaN where unknown; None in a mode without old states.
        known: ``[N]`` bool, True where the old state is known; None in a mode without old states.
        ages: ``[N]`` int32, number of reads that left the row out; None for all zeros.
    """

    ids: Tensor
    states: Tensor | None = None
    known: Tensor | None = None
    ages: Tensor | None = None

    def __len__(self) -> int:
        return self.ids.shape[0]

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return sum(each.nbytes for each in (self.ids, self.states, self.known, self.ages) if each is not None)

    def take(self, index: Tensor, new_rows: NewRows = plain_rows) -> ChangedRows:
        """Return some of the rows.

        Args:
            index: ``[M]`` int64 row numbers in ascending order, or an ``[N]`` bool mask.
            new_rows: allocates the memory.
        """
        places = index.nonzero().flatten() if index.dtype == torch.bool else index
        columns = (self.states, self.known, self.ages)
        return ChangedRows(
            take_rows(self.ids, places, new_rows),
            *(None if each is None else take_rows(each, places, new_rows) for each in columns),
        )

    def copy(self, new_rows: NewRows = plain_rows) -> ChangedRows:
        """Return a copy of the rows in memory from ``new_rows``."""
        columns = (self.ids, self.states, self.known, self.ages)
        ids, *rest = (None if each is None else new_rows(len(each), each).copy_(each) for each in columns)
        assert ids is not None, "rows have ids"
        return ChangedRows(ids, *rest)

    def without_states(self) -> ChangedRows:
        """Return the same rows without their old states; the tensors are shared."""
        return ChangedRows(self.ids, ages=self.ages)

    def aged(self) -> ChangedRows:
        """Return the same rows with their ages increased by one."""
        ages = torch.zeros_like(self.ids, dtype=torch.int32) if self.ages is None else self.ages
        return ChangedRows(self.ids, self.states, self.known, ages + 1)


def merge_first(older: ChangedRows, newer: ChangedRows) -> ChangedRows:
    """Return the union of two sets of rows of one shard. A row in both keeps its older state.

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
    states, known, ages = (
        None if left is None and right is None else torch.cat([_or_zeros(left, older), _or_zeros(right, newer)])[index]
        for left, right in ((older.states, newer.states), (older.known, newer.known), (older.ages, newer.ages))
    )
    return ChangedRows(ids[is_first], states, known, ages)


def _or_zeros(column: Tensor | None, rows: ChangedRows) -> Tensor:
    return torch.zeros_like(rows.ids, dtype=torch.int32) if column is None else column


def first_per_id(ids: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """Return each id once, ascending, with the state of its first occurrence.

    Args:
        ids: ``[N]`` int64, in any order.
        states: ``[N, ...]``.

    Returns:
        ``[M]`` ids and ``[M, ...]`` states.

    Example:
        >>> first_per_id(torch.tensor([3, 1, 3]), torch.tensor([30, 10, 31]))
        (tensor([1, 3]), tensor([10, 30]))
    """
    ordered, order = ids.sort(stable=True)
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_first], states[order[is_first]]


def last_per_id(ids: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same as :func:`first_per_id`, with the state of the last occurrence."""
    return first_per_id(ids.flip(0), states.flip(0))


def take_rows(memory: Tensor, places: Tensor, new_rows: NewRows = plain_rows) -> Tensor:
    """Copy rows.

    Args:
        memory: ``[R, ...]``.
        places: ``[N]`` int64 in ``[0, R)``.
        new_rows: allocates the memory.

    Returns:
        ``[N, ...]``.
    """
    return torch.index_select(memory.detach(), 0, places, out=new_rows(len(places), memory))


def put_rows(memory: Tensor, places: Tensor, values: Tensor) -> None:
    """Write rows in place.

    Args:
        memory: ``[R, C]``.
        places: ``[N]`` int64, unique and in ``[0, R)``.
        values: ``[N, C]`` in the dtype of ``memory``.

    Example:
        >>> memory = torch.zeros(3, 2)
        >>> put_rows(memory, torch.tensor([2, 0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> memory
        tensor([[3., 4.],
                [0., 0.],
                [1., 2.]])
    """
    devices = {each.device.type for each in (memory, places, values)}
    if devices == {"cpu"} and memory.dim() == 2 and memory.stride(1) == values.stride(1) == 1:  # noqa: PLR2004  rows
        held = _items(memory)
        if held.flags.c_contiguous:
            held.put(places.numpy(), _items(values))  # faster, but copies non-contiguous memory twice
        else:
            held[places.numpy()] = _items(values)
        torch.autograd.graph.increment_version(memory)  # as torch's own writes do, so that autograd detects the change
    else:
        memory.index_copy_(0, places.to(memory.device), values.to(memory.device))


def _items(rows: Tensor) -> NDArray[np.void]:
    """Return a view with one item per row, which numpy copies twice as fast as ``index_copy_`` copies numbers.

    numpy uses one thread and releases the GIL. The other cores stay free for lookups, and the write does not wait for a
    team of threads.
    """
    held = rows.view(torch.uint8).numpy()
    return held.view(np.dtype((np.void, held.shape[1])))[:, 0]
