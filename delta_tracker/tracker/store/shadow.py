"""Row store that finds changed rows by comparing the shard with a copy.

The store is for tables whose writes no hook reports (DENSE kernels, DATA_PARALLEL, plain modules with dense gradients).
Their changes cannot be derived from lookups: momentum, Adam and weight decay change rows that were not looked up, the
all-reduce adds gradients of other ranks, and the optimizer writes after the backward pass. Comparison with a copy is
exact in all these cases, needs no collective operation, and also finds rows that ``load_state_dict`` changed.

Notation: ``N`` is the number of ids, ``R`` the number of rows of the shard, ``D`` its number of columns.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from delta_tracker.rows import bits_of, put_pieces
from delta_tracker.sharding.local_shard import LocalShard
from delta_tracker.sharding.weights import WriteWatch, read_rows
from delta_tracker.tracker.modes import Capture
from delta_tracker.tracker.store.segments import SegmentStore

# Rows compared at a time. This bounds the temporary memory.
_CHUNK_ROWS = 65536


class ShadowStore(SegmentStore):
    """Row store for a table whose writes no hook reports. Each cut compares the shard with a copy to find changed rows.

    The copy takes as much memory as the shard. The comparison is bitwise and reads the shard and the copy once.

    Args:
        read_rows: function that takes local ids ``[N]`` and returns a copy of the current values ``[N, D]`` of these
            rows. If the argument is None, it returns all rows.
        num_rows: ``R``, number of rows of the shard.
        device: device of the shard.
        engine: name of the row set implementation, see :func:`~delta_tracker.tracker.row_sets.engines.choose_engine`.
        keeps_states: True to keep the values ``[N, D]`` of rows before their change as old states.
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
        old_states = (lambda ids: self.copy.index_select(0, ids)) if keeps_states else None
        super().__init__(num_rows, device, engine=engine, old_states=old_states)
        self.reads_shard = True  # at each cut
        self._read_rows = read_rows
        self.copy = read_rows(None)

    def cut(self, position: int) -> None:
        """Mark the rows that differ from the copy, then start a segment at ``position``. Waits for the device."""
        self.catch_up()
        super().cut(position)

    def catch_up(self) -> None:
        """Mark the rows that differ from the copy, then update the copy. Waits for the device once.

        The temporary memory is one byte per row, 8 bytes per row that differs, and the values of 65,536 rows.
        """
        differs = torch.empty(self.num_rows, dtype=torch.bool, device=self.device)
        for begin in range(0, self.num_rows, _CHUNK_ROWS):
            ids = torch.arange(begin, min(begin + _CHUNK_ROWS, self.num_rows), device=self.device)
            copied = self.copy[begin : begin + len(ids)]
            torch.any(bits_of(self._read_rows(ids)) != bits_of(copied), dim=1, out=differs[begin : begin + len(ids)])
        changed = differs.nonzero().flatten()
        if len(changed):
            self.mark(changed)
            for ids in torch.split(changed, _CHUNK_ROWS):
                put_pieces(self.copy, ids, [self._read_rows(ids)])

    def reset(self) -> None:
        """Drop all marked rows and replace the copy with the current rows."""
        super().reset()
        self.copy = self._read_rows(None)


def make_store(shard: Callable[[], LocalShard], capture: Capture, *, engine: str | None) -> SegmentStore:
    """Create a table's row store: a :class:`SegmentStore` if hooks report its writes, otherwise a :class:`ShadowStore`.

    Args:
        shard: function that returns this rank's current shard of the table. After a reshard, it may return a new object
            for the same rows.
        capture: implementation of the tracking mode.
        engine: name of the row set implementation, see :func:`~delta_tracker.tracker.row_sets.engines.choose_engine`.
    """
    now = shard()  # again at each read, because a reshard may replace it
    num_rows, keeps_old = now.spec.num_rows, capture.keeps_old
    if now.is_compared:
        return ShadowStore(
            lambda ids: read_rows(shard(), ids), num_rows, now.device, engine=engine, keeps_states=keeps_old
        )
    old_states = (lambda ids: capture.old_states(shard(), ids)) if keeps_old else None
    return SegmentStore(num_rows, now.device, engine=engine, old_states=old_states, was_written=WriteWatch(shard))
