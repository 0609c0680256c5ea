"""Read and write rows in the device cache of a kernel whose tables are in unified virtual memory (UVM caching).

A lookup copies rows into the cache, and training writes them there. A row that is in the cache is therefore newer than
the same row in its table, until FBGEMM evicts the row or ``flush()`` writes the whole cache back. Rows that are written
to a table must be written to the cache too.

Attributes of FBGEMM's module that are used here: ``lxu_cache_weights`` (``[slots, columns]``), ``lxu_cache_state``
(``[sets, ways]``, the linear index of the row in each slot), ``total_cache_hash_size`` and ``embedding_specs``. The
linear index of a row is its local id, plus the rows of the cached tables in earlier slots of the kernel.

FBGEMM has no such cache on the CPU. The tests use a stub with FBGEMM's attributes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

# Name of FBGEMM's EmbeddingLocation of tables with a cache.
_CACHED = "MANAGED_CACHING"


class RowCache:
    """Reader and writer of the rows in a kernel's cache. Neither waits for the device.

    Args:
        tbe: FBGEMM's module for training or inference, which has a cache.
    """

    def __init__(self, tbe: Any) -> None:  # noqa: ANN401  a class of fbgemm
        self._tbe = tbe
        self._first: list[int | None] = []
        begin = 0
        for num_rows, location in map(_rows_and_location, tbe.embedding_specs):
            is_cached = location.name == _CACHED
            self._first.append(begin if is_cached else None)
            begin += num_rows if is_cached else 0

    @classmethod
    def of(cls, tbe: Any) -> Self | None:  # noqa: ANN401  a class of fbgemm
        """Return the cache of FBGEMM's module ``tbe``; None if the module has no cache."""
        weights = getattr(tbe, "lxu_cache_weights", None)
        return cls(tbe) if weights is not None and weights.numel() else None

    def overlay(self, slot: int, ids: Tensor, rows: Tensor) -> Tensor:
        """Return rows of a table, with the newer rows from the cache. Does not wait for the device.

        If the cache has another dtype than the table, the cached rows are rounded to the nearest value. FBGEMM's flush
        may round them stochastically.

        Args:
            slot: the kernel's slot of the table.
            ids: ``[N]`` int64 local ids, in the range of the table.
            rows: ``[N, columns]`` rows of these ids in the table.

        Returns:
            ``[N, columns]``; ``rows`` itself if the table is not cached.
        """
        first, tbe = self._first[slot], self._tbe
        if first is None or not len(ids):
            return rows
        found = self._places(ids + first)
        cached = tbe.lxu_cache_weights.index_select(0, found.clamp(min=0))[:, : rows.shape[1]]
        return torch.where((found >= 0).unsqueeze(1), cached.to(rows.dtype), rows)

    def of_table(self, slot: int) -> CachedTable | None:
        """Return the cached rows of a slot; None if the table is not cached."""
        first = self._first[slot]
        return None if first is None else CachedTable(self, first)

    def write(self, indices: Tensor, values: Tensor, columns: tuple[int, int]) -> None:
        """Write rows that are in the cache; ignore the others.

        Args:
            indices: ``[N]`` int64 linear indices, unique; at least one.
            values: ``[N, C]`` values of ``C`` columns.
            columns: half-open range of these columns.
        """
        memory = self._tbe.lxu_cache_weights[:, slice(*columns)]
        found = self._places(indices)
        # Selecting the cached rows would wait for the device. Instead, write one of the cached rows once more for each
        # row that is not cached. If no row is cached, write the first row of the cache to its own place.
        last_place, last = found.max(dim=0)
        source = torch.where(found < 0, last, torch.arange(len(found), device=found.device))
        new = torch.where(last_place < 0, memory[0], values.index_select(0, source).to(memory.dtype))
        memory.index_copy_(0, found.index_select(0, source).clamp(min=0), new)

    def _places(self, indices: Tensor) -> Tensor:
        """Return the place of each row in the cache, ``[N]`` int64; -1 for a row that is not cached."""
        tbe = self._tbe
        ways = getattr(tbe, "cache_assoc", None)
        lookup = torch.ops.fbgemm.direct_mapped_lxu_cache_lookup if ways == 1 else torch.ops.fbgemm.lxu_cache_lookup
        found: Tensor = lookup(indices, tbe.lxu_cache_state, tbe.total_cache_hash_size)
        return found.long()


@dataclass(frozen=True, slots=True, eq=False)
class CachedTable:
    """Cached rows of one table.

    Args:
        cache: the kernel's cache.
        first: linear index of the table's row 0.
    """

    cache: RowCache
    first: int

    def write(self, ids: Tensor, values: Tensor, columns: tuple[int, int]) -> None:
        """Write rows of the table that are in the cache.

        Args:
            ids: ``[N]`` int64 row numbers in the kernel's table, unique, on the kernel's device; at least one.
            values: ``[N, C]``, on the kernel's device.
            columns: half-open range of the columns of ``values`` in the kernel's table.
        """
        self.cache.write(ids + self.first, values, columns)


def cached_table(tbe: Any, slot: int) -> CachedTable | None:  # noqa: ANN401  a class of fbgemm
    """Return the cached rows of a slot of FBGEMM's module ``tbe``; None if the table is not cached."""
    cache = RowCache.of(tbe)
    return None if cache is None else cache.of_table(slot)


def _rows_and_location(spec: tuple[Any, ...]) -> tuple[int, Any]:
    """Return the number of rows and the location of a table from FBGEMM's description of it."""
    is_inference = isinstance(spec[0], str)  # name, rows, columns, type, location; or rows, columns, location, device
    return (spec[1], spec[4]) if is_inference else (spec[0], spec[2])
