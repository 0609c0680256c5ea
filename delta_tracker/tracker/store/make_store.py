"""Choose the row store of a table, and connect it with what this rank holds of the table."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from delta_tracker.sharding.discover import LocalShard
from delta_tracker.sharding.weights import WriteWatch, read_rows
from delta_tracker.tracker.modes import Capture
from delta_tracker.tracker.store.segments import SegmentStore
from delta_tracker.tracker.store.shadow import ShadowStore


class _ShardRows:
    """What a store asks of its shard, which may be another one after a reshard."""

    def __init__(self, shard: Callable[[], LocalShard], capture: Capture) -> None:
        self._shard = shard
        self._capture = capture

    def rows(self, ids: Tensor | None) -> Tensor:
        """Return the rows ``[N, D]`` of local ids ``[N]``; None for all."""
        return read_rows(self._shard(), ids)

    def old_states(self, ids: Tensor) -> Tensor:
        """Return what the mode keeps of the rows ``[N]``, as they are now; ``[N, S]``."""
        return self._capture.old_states(self._shard(), ids)


def make_store(shard: Callable[[], LocalShard], capture: Capture, *, engine: str | None) -> SegmentStore:
    """Return the store of a table: a second copy finds the changes where no fused optimizer reports them.

    Args:
        shard: returns what this rank holds of the table now. A later one may differ in all but its block.
        capture: the tracking mode.
        engine: which kernels keep the rows, see :func:`~delta_tracker.tracker.row_sets.engines.choose_engine`.
    """
    now, rows = shard(), _ShardRows(shard, capture)
    if not now.is_fused:
        return ShadowStore(rows.rows, now.spec.num_rows, now.device, engine=engine, keeps_states=capture.keeps_old)
    old_states = rows.old_states if capture.keeps_old else None
    return SegmentStore(
        now.spec.num_rows, now.device, engine=engine, old_states=old_states, was_written=WriteWatch(shard)
    )
