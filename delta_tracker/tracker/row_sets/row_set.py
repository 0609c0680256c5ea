"""Base class of the row sets. An *engine* is a subclass, implemented for example in torch, numba or Triton.

Notation: ``R`` is the number of rows of the shard, ``N`` the number of ids of a call, ``K`` the number of rows in the
set, ``M`` the number of rows that a call adds.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class RowSet(ABC):
    """Set of marked rows among the ``R`` local rows of a shard.

    All engines guarantee:

    1. Arguments ``ids`` are ``[N]`` int64 local ids on the set's device, in any order, duplicates allowed. The set
       never writes to them. An id outside ``[0, R)`` counts as row 0, the row that FBGEMM's table-batched embedding
       updates for such an id.
    2. Results are new tensors on the set's device. Later calls do not change them.
    3. Only :meth:`clear` removes rows.
    4. Results are deterministic, except for the order of the ids from :meth:`mark_new` and :meth:`mark_new_padded` in
       engines that document a random order.
    5. :meth:`scan`, :meth:`mark_new`, :meth:`count`, :meth:`scan_each` and :meth:`count_each` wait for the device.
       :meth:`rank` may wait. No other method waits.

    Callers must serialize the calls on one set, including calls on different CUDA streams.

    Args:
        num_rows: ``R``, 1 or more.
        device: device of the set and of all ids. The engine must support it, see :meth:`serves`.
    """

    row_bits: ClassVar[int]
    """Number of bits that a set stores for each row of the shard. Bits for blocks of rows are not included."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        assert self.serves(device), (type(self), device)
        self.num_rows = num_rows
        self.device = device

    @classmethod
    @abstractmethod
    def serves(cls, device: torch.device) -> bool:
        """Return True if this engine supports ``device``. Does not check whether the engine's package is installed."""

    @classmethod  # noqa: B027  most engines compile nothing
    def warm_up(cls, device: torch.device) -> None:
        """Compile the engine's kernels for ``device``. No-op by default.

        The first set on a device also compiles them. Call this method earlier to avoid the delay in a training step.
        """

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Size of the set's memory in bytes."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that contain the set. Empty if the engine uses numpy arrays instead."""
        return ()

    @abstractmethod
    def mark(self, ids: Tensor) -> None:
        """Add the rows with the given ids."""

    @abstractmethod
    def mark_all(self) -> None:
        """Add all ``R`` rows."""

    @abstractmethod
    def clear(self) -> None:
        """Remove all rows. Keeps the memory for reuse."""

    def mark_new(self, ids: Tensor) -> Tensor:
        """Add the rows with the given ids. Return the ``[M]`` unique ids that were not in the set, in any order.

        Engines must override this method, :meth:`mark_new_padded`, or both.
        """
        padded, count = self.mark_new_padded(ids)
        return padded[: int(count)].clone()

    def mark_new_padded(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Add the rows with the given ids. Return the result of :meth:`mark_new`, padded to ``N`` ids.

        Does not wait for the device.

        Returns:
            Two int64 tensors: ``[N]``, the ``M`` ids of the added rows followed by -1 as padding, and ``[1]``, ``M``.
        """
        new = self.mark_new(ids)
        padded = torch.nn.functional.pad(new, (0, len(ids) - len(new)), value=-1)
        return padded, torch.tensor([len(new)], device=ids.device)

    @abstractmethod
    def contains(self, ids: Tensor) -> Tensor:
        """Return ``[N]`` bool, True for each id whose row is in the set."""

    @abstractmethod
    def merge(self, other: Self) -> None:
        """Add all rows of ``other`` without changing it. Both sets must have the same engine, device and ``R``."""

    @abstractmethod
    def scan(self) -> Tensor:
        """Return the ids of all marked rows, ``[K]`` int64, ascending and unique."""

    @abstractmethod
    def count(self) -> int:
        """Return the number ``K`` of marked rows. Waits for the device. Faster than :meth:`scan`."""

    def rank(self, ids: Tensor, scanned: Tensor) -> Tensor:
        """Return the number of marked rows below each id, ``[N]`` int64 in ``[0, K]``.

        If the row of an id is marked, this number is the index of the id in ``scanned``, the result of :meth:`scan`.
        """
        return torch.searchsorted(scanned, within(ids, self.num_rows))

    @classmethod
    def create_each(cls, nums_rows: Sequence[int], device: torch.device) -> list[Self]:
        """Return an empty set for each number of rows in ``nums_rows``.

        Except on the CPU, an engine may store these sets in one tensor. :meth:`mark_each` and
        :meth:`mark_new_padded_each` then mark them together. The tensor is freed with the last set.
        """
        return [cls(num_rows, device) for num_rows in nums_rows]

    @classmethod
    def mark_each(cls, sets: Sequence[Self], ids: Sequence[Tensor]) -> None:
        """Add rows to each set. ``ids`` contains ``[N]`` int64 local ids for each set.

        Except on the CPU, an engine may mark all sets of one :meth:`create_each` call in a fixed number of operations.
        """
        for each, own in zip(sets, ids, strict=True):
            each.mark(own)

    @classmethod
    def mark_new_padded_each(cls, sets: Sequence[Self], ids: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Call :meth:`mark_new_padded` for each set and return the results. An engine may process all sets together."""
        return [each.mark_new_padded(own) for each, own in zip(sets, ids, strict=True)]

    @classmethod
    def scan_each(cls, sets: Sequence[Self]) -> list[Tensor]:
        """Return the result of :meth:`scan` for each set. An engine may wait for the device once for all sets."""
        return [each.scan() for each in sets]

    @classmethod
    def count_each(cls, sets: Sequence[Self]) -> list[int]:
        """Return the result of :meth:`count` for each set. An engine may wait for the device once for all sets."""
        return [each.count() for each in sets]


def within(ids: Tensor, num_rows: int) -> Tensor:
    """Return a copy of ``ids``, ``[N]``, in which each id outside ``[0, num_rows)`` is replaced by 0.

    Example:
        >>> within(torch.tensor([2, -1, 3]), num_rows=3)
        tensor([2, 0, 0])
    """
    return torch.where((ids >= 0) & (ids < num_rows), ids, 0)


def set_first(words: NDArray[np.int64] | Tensor, num_bits: int, word_bits: int) -> None:
    """Set the first ``num_bits`` bits of ``words`` and clear the others. Each word has ``word_bits`` bits."""
    full, rest = divmod(num_bits, word_bits)
    words[:full] = -1
    words[full:] = 0
    words[full : full + 1] = (1 << rest) - 1
