"""FBGEMM's kernel with rows in host memory (UVM) and a cache on the device, made of plain torch operations.

It has the attributes of FBGEMM's module that the library uses. It launches its operations on the current stream. For
each of FBGEMM's kernels it launches several, so that prefetches and flushes overlap as on a GPU. The cache is
direct-mapped: a row has one slot.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from delta_tracker.sharding.kernel_memory import Kernel
from tests.fake_streams.order import Race, passes
from tests.fake_streams.tensors import EMULATED

_NO_ROW = -1


class CachedKernel:
    """One table with a cache, as FBGEMM's module and as TorchRec's module around it.

    Args:
        table: ``[R, C]`` CPU tensor with the first rows.
        num_slots: number of rows in the cache.
        cache_dtype: dtype of the cache; None for that of the table.
    """

    def __init__(
        self, table: Tensor, num_slots: int, *, device: str = "cuda", cache_dtype: torch.dtype | None = None
    ) -> None:
        self.num_rows, self.dim = table.shape
        self.num_slots = num_slots
        self.num_flushes = self.num_resets = 0
        # One more row and slot, for operations that have nothing to do.
        self._rows = torch.cat([table, table[:1]]).to(device)
        self.lxu_cache_state = torch.full((num_slots, 1), _NO_ROW, device=device)
        self.lxu_cache_weights = torch.zeros(num_slots, self.dim, dtype=cache_dtype or table.dtype, device=device)
        self.total_cache_hash_size = self.num_rows
        self.embedding_specs = [(self.num_rows, self.dim, SimpleNamespace(name="MANAGED_CACHING"), None)]
        self.prefetch_stream: Any = None
        self.emb_module = self
        self._parameters: dict[str, Tensor] = {}
        self._buffers = {"weights_uvm": self._rows}
        self.kernel = Kernel(self, (("t", 1),), is_fused=True)

    def split_embedding_weights(self) -> list[Tensor]:
        return [self._rows[: self.num_rows]]

    def split_optimizer_states(self) -> list[list[Tensor]]:
        return [[]]

    def flush(self) -> None:
        """Write the cached rows to the table: read which row each slot has, then copy the slots."""
        self.num_flushes += 1
        owners, half = self._owners(), self.num_slots // 2
        for part in (slice(half), slice(half, None)):
            self._rows.index_copy_(0, owners[part], self.lxu_cache_weights[part].to(self._rows.dtype))

    def reset_cache_states(self) -> None:
        self.num_resets += 1
        self.lxu_cache_state.fill_(_NO_ROW)

    def prefetch(self, ids: Tensor, forward_stream: Any = None) -> None:
        """Load rows into the cache: write the rows in their slots back, load the new ones, and set the owners last.

        ``ids`` need different slots.
        """
        if self.prefetch_stream is None and forward_stream is not None:
            self.prefetch_stream = torch.cuda.current_stream()
        slots, is_there = self._slots(ids)
        evicted = self.lxu_cache_weights.index_select(0, slots)
        self._rows.index_copy_(0, self._owners().index_select(0, slots), evicted.to(self._rows.dtype))
        loaded = self._rows.index_select(0, ids).to(evicted.dtype)
        self.lxu_cache_weights.index_copy_(0, slots, torch.where(is_there, evicted, loaded))
        self.lxu_cache_state.index_copy_(0, slots, ids.unsqueeze(1))

    def lookup(self, ids: Tensor) -> Tensor:
        """Return rows from the cache, or from the table if they are not cached."""
        slots, is_there = self._slots(ids)
        cached = self.lxu_cache_weights.index_select(0, slots).to(self._rows.dtype)
        return torch.where(is_there, cached, self._rows.index_select(0, ids))

    def update(self, ids: Tensor, values: Tensor) -> None:
        """Write rows as the backward pass does: those that are cached to the cache, the others to the table."""
        slots, is_there = self._slots(ids)
        cached = self.lxu_cache_weights.index_select(0, slots)
        self.lxu_cache_weights.index_copy_(0, slots, torch.where(is_there, values.to(cached.dtype), cached))
        self._rows.index_copy_(0, ids, torch.where(is_there, self._rows.index_select(0, ids), values))

    def backward(self, ids: Tensor, values: Tensor) -> None:
        """Update rows, ordered with prefetches as FBGEMM's hooks before and after the backward pass do."""
        current = torch.cuda.current_stream()
        if self.prefetch_stream is not None:
            current.wait_stream(self.prefetch_stream)
        self.update(ids, values)
        if self.prefetch_stream is not None:
            self.prefetch_stream.wait_stream(current)

    def _slots(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slot of each row, and ``[N, 1]`` bool, True if the row is there."""
        slots = ids % self.num_slots
        return slots, self.lxu_cache_state.index_select(0, slots) == ids.unsqueeze(1)

    def _owners(self) -> Tensor:
        """Return the row in each slot; the additional row for an empty slot."""
        owners = self.lxu_cache_state.flatten()
        return torch.where(owners == _NO_ROW, self.num_rows, owners)


def is_own_race(race: Race) -> bool:
    """Return True for a race inside the kernel, or of its prefetches with a read of rows after a flush.

    Lookups and prefetches at the same time use different slots, and the rows that a prefetch evicts were flushed.
    """
    uses = race.previous_access, race.current_access
    if any(passes(use, "/cached_kernel.py", "prefetch") for use in uses):
        uses = tuple(use for use in uses if not passes(use, "/delta_tracker/rows.py", "take_rows"))
    return not any(passes(use, f"/delta_tracker/{folder}/") for use in uses for folder in ("sharding", "buffers"))


def _cache_lookup(numbers: Tensor, state: Tensor, invalid_index: int = -1, *_: Any) -> Tensor:
    """``fbgemm::lxu_cache_lookup`` for the direct-mapped cache."""
    slots = numbers % len(state)
    is_there = state.flatten().index_select(0, slots) == numbers
    return torch.where(is_there, slots, _NO_ROW).int()


EMULATED["fbgemm::lxu_cache_lookup"] = _cache_lookup
