"""Read rows from the device cache of a kernel whose tables are in unified virtual memory (UVM caching).

A lookup copies rows into the cache, and training writes them there. A row that is in the cache is therefore newer than
the same row in its table, until FBGEMM evicts the row or ``flush()`` writes the whole cache back.

Attributes of FBGEMM's module that are used here: ``lxu_cache_weights`` (``[slots, columns]``), ``lxu_cache_state``
(``[sets, ways]``, the linear index of the row in each slot), ``total_cache_hash_size`` and ``embedding_specs``. The
linear index of a row is its local id, plus the rows of the cached tables in earlier slots of the kernel.

FBGEMM has no such cache on the CPU. The tests use a stub with FBGEMM's attributes.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

# Name of FBGEMM's EmbeddingLocation of tables with a cache.
_CACHED = "MANAGED_CACHING"


class RowCache:
    """Reader of the rows in a kernel's cache.

    Args:
        tbe: FBGEMM's module, which has a cache.
    """

    def __init__(self, tbe: Any) -> None:  # noqa: ANN401  a class of fbgemm
        self._tbe = tbe
        self._first: list[int | None] = []
        begin = 0
        for num_rows, _, location, *_ in tbe.embedding_specs:
            is_cached = location.name == _CACHED
            self._first.append(begin if is_cached else None)
            begin += num_rows if is_cached else 0

    @classmethod
    def of(cls, tbe: Any) -> Self | None:  # noqa: ANN401  a class of fbgemm
        """Return the cache of FBGEMM's module ``tbe``; None if the module has no cache."""
        weights = getattr(tbe, "lxu_cache_weights", None)
        return cls(tbe) if weights is not None and weights.numel() else None

    def first_row(self, slot: int) -> int | None:
        """Return the linear index of a slot's row 0; None if the table is not cached."""
        return self._first[slot]

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
        found = torch.ops.fbgemm.lxu_cache_lookup(ids + first, tbe.lxu_cache_state, tbe.total_cache_hash_size)
        cached = tbe.lxu_cache_weights.index_select(0, found.clamp(min=0))[:, : rows.shape[1]]
        return torch.where((found >= 0).unsqueeze(1), cached.to(rows.dtype), rows)
