"""Read and write rows in the device cache of a kernel whose tables are in unified virtual memory (UVM caching).

A lookup copies rows into the cache, and training updates them there. A cached row is therefore newer than the same row
in the table, until FBGEMM evicts the row or ``flush()`` copies the whole cache to the tables. Code that writes rows to
a table must also write them to the cache.

With ``PrefetchTrainPipelineSparseDist``, FBGEMM loads the rows of later batches into the cache on a separate stream,
while other streams run. A flush first reads which row is in a slot of the cache, then copies the slot to this row. If a
prefetch loads another row between these two operations, the flush writes the new row's values to the old row.

Attributes of FBGEMM's module that are used here: ``lxu_cache_weights`` (``[slots, columns]``), ``lxu_cache_state``
(``[sets, ways]``, the linear index of the row in each slot), ``total_cache_hash_size``, ``embedding_specs`` and
``prefetch_stream``. The linear index of a row is its local id, plus the rows of the cached tables in earlier slots of
the kernel.

FBGEMM has no such cache on the CPU. The tests use a stub with FBGEMM's attributes.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Name of FBGEMM's EmbeddingLocation of tables with a cache.
_CACHED = "MANAGED_CACHING"

_NO_PREFETCHES = nullcontext()


@dataclass(frozen=True, slots=True, eq=False)
class CachedTable:
    """Access to the cached rows of one table. The methods do not wait for the device.

    Args:
        tbe: FBGEMM module for training or inference.
        first: linear index of row 0 of the table, as defined in the description of this module.
    """

    tbe: Any
    first: int

    def overlay(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Return ``rows``, with cached rows replaced by their newer values from the cache.

        ``ids`` are ``[N]`` int64 local ids, and ``rows`` are the ``[N, columns]`` values of these rows in the table.
        Cached values are rounded to nearest if the dtypes of cache and table differ.
        """
        if not len(ids):
            return rows
        found = self._indices(ids)
        cached = self.tbe.lxu_cache_weights.index_select(0, found.clamp(min=0))[:, : rows.shape[1]]
        return torch.where((found >= 0).unsqueeze(1), cached.to(rows.dtype), rows)

    def write(self, ids: Tensor, values: Tensor, columns: tuple[int, int]) -> None:
        """Overwrite the cached copies of rows. The arguments are those of ``delta_tracker.row_target.RowCopies``."""
        memory = self.tbe.lxu_cache_weights[:, slice(*columns)]
        found = self._indices(ids)
        # Selecting the cached rows would wait for the device. Instead, write one of the cached rows once more for each
        # row that is not cached. If no row is cached, write the first row of the cache to its own place.
        last_place, last = found.max(dim=0)
        source = torch.where(found < 0, last, torch.arange(len(found), device=found.device))
        new = torch.where(last_place < 0, memory[0], values.index_select(0, source).to(memory.dtype))
        memory.index_copy_(0, found.index_select(0, source).clamp(min=0), new)

    def _indices(self, ids: Tensor) -> Tensor:
        """Return the index of each row in the cache, ``[N]`` int64; -1 for a row that is not cached."""
        tbe = self.tbe
        ways = getattr(tbe, "cache_assoc", None)
        lookup = torch.ops.fbgemm.direct_mapped_lxu_cache_lookup if ways == 1 else torch.ops.fbgemm.lxu_cache_lookup
        found: Tensor = lookup(ids + self.first, tbe.lxu_cache_state, tbe.total_cache_hash_size)
        return found.long()


def cached_table(tbe: Any, slot: int) -> CachedTable | None:  # noqa: ANN401  a class of fbgemm
    """Return the cache of the table in a slot of the FBGEMM module ``tbe``; None if the table is not cached."""
    weights = getattr(tbe, "lxu_cache_weights", None)
    if weights is None or not weights.numel():
        return None
    tables = list(map(_rows_and_location, tbe.embedding_specs))
    first = sum(num_rows for num_rows, location in tables[:slot] if location.name == _CACHED)
    return CachedTable(tbe, first) if tables[slot][1].name == _CACHED else None


def _rows_and_location(spec: tuple[Any, ...]) -> tuple[int, Any]:
    """Return the number of rows and the memory location of a table from the table's FBGEMM spec."""
    is_inference = isinstance(spec[0], str)  # name, rows, columns, type, location; or rows, columns, location, device
    return (spec[1], spec[4]) if is_inference else (spec[0], spec[2])


def between_prefetches(tbe: Any) -> AbstractContextManager[None]:  # noqa: ANN401  one of several classes of FBGEMM
    """Return a context manager in which operations on the current stream do not overlap with a kernel's prefetches.

    At entry, the current stream waits for the prefetch stream. At exit, the prefetch stream waits for the current
    stream. The thread does not wait. No thread may launch a prefetch inside the ``with`` statement. Does nothing for a
    kernel that has not prefetched on a separate stream. This function has not been tested on a GPU.
    """
    prefetches = getattr(tbe, "prefetch_stream", None)
    return _NO_PREFETCHES if prefetches is None else _between(prefetches)  # avoids the time of a generator


@contextmanager
def rounding_to_nearest(tbe: Any) -> Iterator[None]:  # noqa: ANN401  one of several classes of FBGEMM
    """Return a context manager in which flushes use no random numbers. Repeated flushes then write equal values."""
    is_random = getattr(tbe, "stochastic_rounding", None)
    try:
        if is_random:
            tbe.stochastic_rounding = False
        yield
    finally:
        if is_random:
            tbe.stochastic_rounding = is_random


@contextmanager
def _between(prefetches: Any) -> Iterator[None]:  # noqa: ANN401  torch's stubs have no common type
    current = torch.cuda.current_stream(prefetches.device)
    current.wait_stream(prefetches)
    try:
        yield
    finally:
        prefetches.wait_stream(current)
