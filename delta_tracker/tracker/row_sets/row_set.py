"""The set of local rows that every engine implements.

Letters: ``R`` rows of the shard, ``N`` ids of a call, ``K`` rows in the set, ``M`` rows that a call added.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

import torch
from torch import Tensor


class RowSet(ABC):
    """Which of the ``R`` local rows of a shard are marked.

    What every engine keeps:

    1. Ids come in as ``[N]`` int64 on the set's device, in any order, with duplicates, and are never written to. They
       should lie in ``[0, R)``; one that does not counts as row 0, which is the row that FBGEMM's table-batched
       embedding updates for it. A shard without rows takes every id and holds none.
    2. Results are new tensors on the set's device. No later call changes them.
    3. Rows are only ever added, until :meth:`clear` empties the set.
    4. The same calls give the same results, their order included.
    5. :meth:`scan` and :meth:`mark_new` wait for the device, because the size of their result depends on its contents,
       and so may :meth:`rank`. Nothing else does.

    The caller serialises the calls on one set, also those on different streams of a device.

    Subclasses implement the methods whose names start with an underscore; these are called with ``R > 0`` only, and
    with ``N > 0`` where they take ids.

    Args:
        num_rows: ``R``; 0 is allowed.
        device: where the set and all ids live.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        assert self.serves(device), (type(self), device)
        self.num_rows = num_rows
        self.device = device

    @classmethod
    @abstractmethod
    def serves(cls, device: torch.device) -> bool:
        """Whether this engine can hold a set on ``device``, its package being installed."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes held now, summaries included."""

    def mark(self, ids: Tensor) -> None:
        """Add rows.

        Args:
            ids: ``[N]`` int64 local ids.
        """
        if self.num_rows and ids.numel():
            self._mark(ids)

    def mark_all(self) -> None:
        """Add all ``R`` rows."""
        if self.num_rows:
            self._mark_all()

    def clear(self) -> None:
        """Remove all rows: what a new set costs in memory that was never touched, this costs in rows marked."""
        if self.num_rows:
            self._clear()

    def mark_new(self, ids: Tensor) -> Tensor:
        """Add rows and say which of them the set did not hold before.

        Args:
            ids: ``[N]`` int64 local ids.

        Returns:
            ``[M]`` int64 ids, unique, in an order that the engine chooses.
        """
        if self.num_rows and ids.numel():
            return self._mark_new(ids)
        return ids.new_empty(0)

    def mark_new_padded(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Do what :meth:`mark_new` does, without waiting for the device.

        Args:
            ids: ``[N]`` int64 local ids.

        Returns:
            ``[N]`` int64, the ids that :meth:`mark_new` would return and -1 in the places after them, and ``[1]``
            int64, their number ``M``.
        """
        if self.num_rows and ids.numel():
            return self._mark_new_padded(ids)
        return torch.full_like(ids, -1), ids.new_zeros(1)

    def contains(self, ids: Tensor) -> Tensor:
        """Say which rows are marked.

        Args:
            ids: ``[N]`` int64 local ids.

        Returns:
            ``[N]`` bool.
        """
        if self.num_rows and ids.numel():
            return self._contains(ids)
        return torch.zeros_like(ids, dtype=torch.bool)

    def absorb(self, other: Self) -> None:
        """Add the rows of another set, which stays as it is.

        Args:
            other: a set of the same engine, device and ``R``.
        """
        assert (type(other), other.num_rows, other.device) == (type(self), self.num_rows, self.device)
        if self.num_rows:
            self._absorb(other)

    def scan(self) -> Tensor:
        """List the marked rows.

        Returns:
            ``[K]`` int64 ids, ascending and unique.
        """
        if self.num_rows:
            return self._scan()
        return torch.empty(0, dtype=torch.int64, device=self.device)

    def count(self) -> int:
        """How many rows are marked, ``K``. Waits for the device, and takes no memory for the ids."""
        return self._num_marked() if self.num_rows else 0

    def rank(self, ids: Tensor) -> Tensor:
        """Count the marked rows below each id: for a marked row, its position in :meth:`scan`.

        Args:
            ids: ``[N]`` int64 local ids.

        Returns:
            ``[N]`` int64, each in ``[0, K]``.
        """
        if self.num_rows and ids.numel():
            return self._rank(ids)
        return torch.zeros_like(ids)

    @abstractmethod
    def _mark(self, ids: Tensor) -> None: ...

    @abstractmethod
    def _mark_all(self) -> None: ...

    @abstractmethod
    def _clear(self) -> None: ...

    def _mark_new(self, ids: Tensor) -> Tensor:
        padded, count = self._mark_new_padded(ids)
        return padded[: int(count)].clone()

    @abstractmethod
    def _mark_new_padded(self, ids: Tensor) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def _contains(self, ids: Tensor) -> Tensor: ...

    @abstractmethod
    def _absorb(self, other: Self) -> None: ...

    @abstractmethod
    def _scan(self) -> Tensor: ...

    @abstractmethod
    def _num_marked(self) -> int: ...

    @abstractmethod
    def _rank(self, ids: Tensor) -> Tensor: ...
