"""Choose the row store of a table and connect it with this rank's shard."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from delta_tracker.sharding.discover import LocalShard
from delta_tracker.sharding.weights import WriteWatch, read_rows
from delta_tracker.tracker.modes import Capture
from delta_tracker.tracker.store.segments import SegmentStore
from delta_tracker.tracker.store.shadow import ShadowStore


class _ShardRows:
    """Reader of the current shard's rows for a store. The shard may be replaced by a reshard."""

    def __init__(self, shard: Callable[[], LocalShard], capture: Capture) -> None:
        self._shard = shard
        self._capture = capture

    def rows(self, ids: Tensor | None) -> Tensor:
        """Return the current rows ``[N, D]`` of local ids ``[N]``, or all rows for None."""
        return read_rows(self._shard(), ids)

    def old_states(self, ids: Tensor) -> Tensor:
        """Return the data ``[N, S]`` that the mode keeps of the current rows with local ids ``[N]``."""
        return self._capture.old_states(self._shard(), ids)


def make_store(shard: Callable[[], LocalShard], capture: Capture, *, engine: str | None) -> SegmentStore:
    """Return the store of a table: a :class:`ShadowStore` if its optimizer is not fused, else a :class:`SegmentStore`.

    Args:
        shard: returns this rank's current shard of the table. After a reshard it may return another shard with the
            same block.
        capture: the tracking mode.
        engine: implementation of the row sets, see :func:`~delta_tracker.tracker.row_sets.engines.choose_engine`.
    """
    now, rows = shard(), _ShardRows(shard, capture)
    if not now.is_fused:
        return ShadowStore(rows.rows, now.spec.num_rows, now.device, engine=engine, keeps_states=capture.keeps_old)
    old_states = rows.old_states if capture.keeps_old else None
    return SegmentStore(
        now.spec.num_rows, now.device, engine=engine, old_states=old_states, was_written=WriteWatch(shard)
    )
