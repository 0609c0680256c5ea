"""Kernel with UVM caching in plain torch. FBGEMM has this cache on CUDA only.

It has the attributes of FBGEMM's module that the package uses. ``kernel_memory_cases.fbgemm`` compares them with
FBGEMM's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import torch
from torch import Tensor, nn

_WAYS = 4
_EMPTY = -1


class Location(IntEnum):
    """FBGEMM's places of tables: in device memory, or in host memory with a cache in device memory."""

    DEVICE = 0
    MANAGED_CACHING = 2


class CachedTbe(nn.Module):
    """Tables in host memory with a cache, and tables in device memory.

    Args:
        specs: number of rows, number of columns and location of each table.
        num_sets: size of the cache in sets of four rows.
    """

    def __init__(self, specs: list[tuple[int, int, Location]], num_sets: int) -> None:
        super().__init__()
        self.embedding_specs = [(rows, dim, location, None) for rows, dim, location in specs]
        sizes = {place: sum(rows * dim for rows, dim, at in specs if at is place) for place in Location}
        self.register_buffer("weights_dev", torch.rand(sizes[Location.DEVICE]))
        self.register_buffer("weights_uvm", torch.rand(sizes[Location.MANAGED_CACHING]))
        self.total_cache_hash_size = sum(rows for rows, _, location in specs if location is Location.MANAGED_CACHING)
        self.register_buffer("lxu_cache_weights", torch.zeros(num_sets * _WAYS, max(dim for _, dim, _ in specs)))
        self.register_buffer("lxu_cache_state", torch.full((num_sets, _WAYS), _EMPTY))
        self.num_flushes = 0
        self.num_splits = 0

    @property
    def emb_module(self) -> CachedTbe:
        """The module itself: TorchRec's module around FBGEMM's has this attribute."""
        return self

    def split_embedding_weights(self) -> list[Tensor]:
        """Return a view of each table."""
        self.num_splits += 1
        return self._split()

    def split_optimizer_states(self) -> list[list[Tensor]]:
        """Return no states, as for SGD."""
        return []

    def flush(self) -> None:
        """Write every row of the cache to its table. The rows stay in the cache."""
        self.num_flushes += 1
        for place, index in enumerate(self.lxu_cache_state.flatten().tolist()):
            if index != _EMPTY:
                self._evict(place, index)

    def load(self, slot: int, ids: Tensor, generator: torch.Generator) -> None:
        """Copy rows into random places of the cache, and write the rows that are there to their tables."""
        if self.embedding_specs[slot][2] is not Location.MANAGED_CACHING:
            return
        state = self.lxu_cache_state.view(-1)
        for row in ids.tolist():
            index = self._first(slot) + row
            if bool((state == index).any()):
                continue
            place = int(torch.randint(len(state), (), generator=generator))
            if state[place] != _EMPTY:
                self._evict(place, int(state[place]))
            table = self._split()[slot]
            self.lxu_cache_weights[place] = torch.nan
            self.lxu_cache_weights[place, : table.shape[1]] = table[row]
            state[place] = index

    def write(self, slot: int, ids: Tensor, values: Tensor) -> None:
        """Write rows as an update does: in the cache if they are there, otherwise in the table."""
        state = self.lxu_cache_state.view(-1)
        is_cached = self.embedding_specs[slot][2] is Location.MANAGED_CACHING
        for row, value in zip(ids.tolist(), values, strict=True):
            places = (state == self._first(slot) + row).nonzero().flatten() if is_cached else []
            if len(places):
                self.lxu_cache_weights[places[0], : len(value)] = value
            else:
                self._split()[slot][row] = value

    def _split(self) -> list[Tensor]:
        """Return a view of each table. Writes to it do not change the version of the weights, as FBGEMM's do not."""
        begin = dict.fromkeys(Location, 0)
        views = []
        for rows, dim, location, _ in self.embedding_specs:
            weights = self.weights_dev if location is Location.DEVICE else self.weights_uvm
            views.append(weights.data[begin[location] : begin[location] + rows * dim].view(rows, dim))
            begin[location] += rows * dim
        return views

    def _first(self, slot: int) -> int:
        return sum(rows for rows, _, at, _ in self.embedding_specs[:slot] if at is Location.MANAGED_CACHING)

    def _evict(self, place: int, index: int) -> None:
        cached = [slot for slot, spec in enumerate(self.embedding_specs) if spec[2] is Location.MANAGED_CACHING]
        slot = max(slot for slot in cached if self._first(slot) <= index)
        table = self._split()[slot]
        table[index - self._first(slot)] = self.lxu_cache_weights[place, : table.shape[1]]


@contextmanager
def cache_lookups() -> Iterator[None]:
    """Implement FBGEMM's operator ``lxu_cache_lookup`` on the CPU, where FBGEMM's own returns uninitialized numbers."""
    library = torch.library.Library("fbgemm", "IMPL")
    library.impl("lxu_cache_lookup", _lookup, "CPU", allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def _lookup(indices: Tensor, state: Tensor, invalid_index: int = -1, *_: object) -> Tensor:
    found = (indices.unsqueeze(1) == state.view(1, -1)) & (indices != invalid_index).unsqueeze(1)
    return torch.where(found.any(dim=1), found.int().argmax(dim=1), -1).to(torch.int32)
