"""The row store of a shard that anything may write to: a second copy of it tells what changed.

For tables whose optimizer is not fused (DENSE kernels, DATA_PARALLEL): momentum, Adam and weight decay move rows that
nobody looked up, other ranks' gradients arrive through an all-reduce, and the write happens long after the backward.
Comparing with a copy is right for all of them, needs no collective, and sees ``load_state_dict`` too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from delta_tracker.tracker.store.segments import SegmentStore

# Rows compared at a time: bounds the memory of a comparison, large enough to be one pass over memory.
_CHUNK_ROWS = 65536
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ShadowStore(SegmentStore):
    """A :class:`SegmentStore` that finds the changed rows itself, at each cut.

    Costs one copy of the shard, and one pass over shard and copy per cut. Rows are compared bit for bit.

    Args:
        read_rows: gives the rows ``[N, D]`` that the shard holds now, for ids ``[N]`` or, for None, all of them.
        num_rows: ``R``, rows of the shard.
        device: where the shard lives.
        engine: which kernels keep the rows.
        keeps_states: keep the rows as they were before their change; ``S`` is ``D``.
    """

    def __init__(
        self,
        read_rows: Callable[[Tensor | None], Tensor],
        num_rows: int,
        device: torch.device | str = "cpu",
        *,
        engine: str | None = None,
        keeps_states: bool = False,
    ) -> None:
        self._read_rows = read_rows
        self._shadow = read_rows(None)
        old_states = (lambda ids: self._shadow.index_select(0, ids)) if keeps_states else None
        super().__init__(num_rows, device, engine=engine, old_states=old_states)

    def cut(self, position: int) -> None:
        """Mark what differs from the copy, then start a segment at ``position``. Waits for the device."""
        self.catch_up()
        super().cut(position)

    def catch_up(self) -> None:
        """Mark what differs from the copy, which then holds what the shard holds. Waits for the device."""
        for begin in range(0, self.num_rows, _CHUNK_ROWS):
            ids = torch.arange(begin, min(begin + _CHUNK_ROWS, self.num_rows), device=self._device)
            rows, shadow = self._read_rows(ids), self._shadow[begin : begin + len(ids)]
            differs = (_bits(rows) != _bits(shadow)).any(dim=1)
            places = differs.nonzero().flatten()
            if len(places):
                self.mark(ids[places])
                shadow[places] = rows[places]

    def forget(self) -> None:
        """Drop everything that is marked, and copy the shard anew."""
        super().forget()
        self._shadow = self._read_rows(None)

    @property
    def copy_bytes(self) -> int:
        """Bytes of the copy."""
        return self._shadow.nbytes


def _bits(rows: Tensor) -> Tensor:
    """The rows as integers, so that NaN equals itself and the zeros differ."""
    return rows.contiguous().view(_BITS[rows.element_size()])
