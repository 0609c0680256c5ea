"""Choose the row store of a table and connect it with this rank's shard.

Notation: ``N`` is the number of ids, ``D`` the number of columns of the shard, ``S`` the number of values in an old
state.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from delta_tracker.sharding.local_shard import LocalShard
from delta_tracker.sharding.weights import WriteWatch, read_rows
from delta_tracker.tracker.modes import Capture
from delta_tracker.tracker.store.segments import SegmentStore
from delta_tracker.tracker.store.shadow import ShadowStore


class _ShardRows:
    """Reader through which a row store reads the current rows and old states of its shard.

    Args:
        shard: returns this rank's current shard of the table. It is called at each read, because a reshard may replace
            the shard.
        capture: strategy of the tracking mode.
    """

    def __init__(self, shard: Callable[[], LocalShard], capture: Capture) -> None:
        self._shard = shard
        self._capture = capture

    def rows(self, ids: Tensor | None) -> Tensor:
        """Return a copy ``[N, D]`` of the current rows with the given local ids, or of all rows if ``ids`` is None."""
        return read_rows(self._shard(), ids)

    def old_states(self, ids: Tensor) -> Tensor:
        """Return the current states ``[N, S]`` of the rows with the given local ids.

        When rows are about to change, the tracking mode keeps these values as the old states of the rows.
        """
        return self._capture.old_states(self._shard(), ids)


def make_store(shard: Callable[[], LocalShard], capture: Capture, *, engine: str | None) -> SegmentStore:
    """Return a table's store: a :class:`SegmentStore` if hooks report writes, otherwise a :class:`ShadowStore`.

    Args:
        shard: returns this rank's current shard of the table. After a reshard it may return another shard with the
            same block.
        capture: strategy of the tracking mode.
        engine: implementation of the row sets, see :func:`~delta_tracker.tracker.row_sets.engines.choose_engine`.
    """
    now, rows = shard(), _ShardRows(shard, capture)
    if now.is_compared:
        return ShadowStore(rows.rows, now.spec.num_rows, now.device, engine=engine, keeps_states=capture.keeps_old)
    old_states = rows.old_states if capture.keeps_old else None
    return SegmentStore(
        now.spec.num_rows, now.device, engine=engine, old_states=old_states, was_written=WriteWatch(shard)
    )
