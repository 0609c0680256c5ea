"""Choose the row store of a table and connect it with this rank's shard."""

from __future__ import annotations

from collections.abc import Callable

from delta_tracker.sharding.local_shard import LocalShard
from delta_tracker.sharding.weights import WriteWatch, read_rows
from delta_tracker.tracker.modes import Capture
from delta_tracker.tracker.store.segments import SegmentStore
from delta_tracker.tracker.store.shadow import ShadowStore


def make_store(shard: Callable[[], LocalShard], capture: Capture, *, engine: str | None) -> SegmentStore:
    """Return a table's store: a :class:`SegmentStore` if hooks report writes, otherwise a :class:`ShadowStore`.

    Args:
        shard: returns this rank's current shard of the table. After a reshard it may return another shard with the
            same block.
        capture: strategy of the tracking mode.
        engine: implementation of the row sets, see :func:`~delta_tracker.tracker.row_sets.engines.choose_engine`.
    """
    now = shard()  # again at each read, because a reshard may replace it
    if now.is_compared:
        return ShadowStore(
            lambda ids: read_rows(shard(), ids),
            now.spec.num_rows,
            now.device,
            engine=engine,
            keeps_states=capture.keeps_old,
        )
    old_states = (lambda ids: capture.old_states(shard(), ids)) if capture.keeps_old else None
    return SegmentStore(
        now.spec.num_rows, now.device, engine=engine, old_states=old_states, was_written=WriteWatch(shard)
    )
