"""Row store that finds changed rows by comparing the shard with a copy, whatever wrote to it.

It is for tables whose optimizer is not fused (DENSE kernels, DATA_PARALLEL). Momentum, Adam and weight decay change
rows that were not looked up, gradients of other ranks arrive through an all-reduce, and the write happens long after
the backward pass. Comparison with a copy is exact for all of them, needs no collective and detects ``load_state_dict``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from delta_tracker.tracker.store.segments import SegmentStore

# Rows compared at a time: few enough to bound the temporary memory, and enough to be one pass over shard and copy.
_CHUNK_ROWS = 65536
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ShadowStore(SegmentStore):
    """A :class:`SegmentStore` that finds changed rows at each cut by comparison with a copy of the shard.

    It takes the memory of one copy of the shard, and each cut reads the shard and the copy once. Rows are compared bit
    for bit.

    Args:
        read_rows: returns the shard's current rows ``[N, D]`` for ids ``[N]``, or all rows for None.
        num_rows: ``R``, rows of the shard.
        device: device of the shard.
        engine: implementation of the row sets.
        keeps_states: keep the rows from before their change as old states; ``S`` is ``D``.
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
        """Mark the rows that differ from the copy, then start a segment at ``position``. Waits for the device."""
        self.catch_up()
        super().cut(position)

    def catch_up(self) -> None:
        """Mark the rows that differ from the copy, then update the copy. Waits for the device."""
        for begin in range(0, self.num_rows, _CHUNK_ROWS):
            ids = torch.arange(begin, min(begin + _CHUNK_ROWS, self.num_rows), device=self._device)
            rows, shadow = self._read_rows(ids), self._shadow[begin : begin + len(ids)]
            differs = (_bits(rows) != _bits(shadow)).any(dim=1)
            places = differs.nonzero().flatten()
            if len(places):
                self.mark(ids[places])
                shadow[places] = rows[places]

    def forget(self) -> None:
        """Clear the log and copy the shard again."""
        super().forget()
        self._shadow = self._read_rows(None)

    @property
    def reads_shard(self) -> bool:
        """Always True, because each cut compares the shard with the copy."""
        return True

    @property
    def copy_bytes(self) -> int:
        """Bytes of the copy."""
        return self._shadow.nbytes


def _bits(rows: Tensor) -> Tensor:
    """Return the rows viewed as integers, so that NaN equals itself and -0.0 differs from 0.0."""
    return rows.contiguous().view(_BITS[rows.element_size()])
