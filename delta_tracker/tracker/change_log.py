"""Change log of one rank: one row store per table, and the consumers that read the stores.

A cut is a boundary in the log, at the same position in all stores. A segment of a store contains the rows that changed
between two cuts. This log is in memory. ``stream/log.py`` implements the log of a stream in an object store.
"""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from delta_tracker.rows import ChangedRows
from delta_tracker.sharding.kernel_memory import one_cut
from delta_tracker.tracker.cursors import Cursors, LogState, PendingState
from delta_tracker.tracker.log_consumers import LogConsumers
from delta_tracker.tracker.log_segments import LogSegments
from delta_tracker.tracker.log_writes import LogWrites
from delta_tracker.tracker.store.owner_store import OwnerStore
from delta_tracker.tracker.store.segments import SegmentStore
from delta_tracker.types import Delta


class ChangeLog:
    """Change log of a tracker on one rank. Hooks mark rows through :attr:`writes`. :attr:`consumers` reads the rows.

    All methods may be called from any thread. They acquire :attr:`lock`, which is reentrant. To make several calls see
    the same state, acquire the lock before the first call and release it after the last.

    The old state of a row is the data that the tracking mode saved before the row changed, such as the row's values.

    Args:
        stores: row store of each table, by FQN.
        consumers: names of the consumers.
        delete_on_read: True to drop rows that every consumer has committed.
        auto_compact: True to compact the log when an output distribution is launched, False to compact it after reads.
        max_bytes: maximum size of the log in bytes; None for no limit. See :class:`LogConsumers`.
        received: function that is called with each committed delta. See :class:`LogConsumers`.
        owners: store of the owners (raw ids) of the rows, for each table with managed collisions, by FQN.

    Attributes:
        lock: lock of the log.
        cursors: records of the consumers.
        segments: row stores of all tables.
        writes: object that the hooks call to mark rows and to record writes in progress.
        consumers: operations on the consumers, such as reads.
    """

    def __init__(
        self,
        stores: Mapping[str, SegmentStore],
        consumers: Sequence[str],
        *,
        delete_on_read: bool,
        auto_compact: bool = False,
        max_bytes: int | None,
        received: Callable[[Delta], None] | None = None,
        owners: Mapping[str, OwnerStore] = MappingProxyType({}),
    ) -> None:
        self.lock = threading.RLock()
        self.cursors = Cursors(consumers)
        self.segments = LogSegments(stores, owners, self.cursors, delete_on_read=delete_on_read)
        self.writes = LogWrites(self.lock, self.segments, auto_compact=auto_compact)
        self.consumers = LogConsumers(self.writes, self.segments, max_bytes=max_bytes, received=received)

    def compact(self) -> None:
        """Merge segments and drop rows that no consumer needs. See :meth:`LogSegments.compact`."""
        with self.lock:
            self.segments.compact()

    def replace(
        self,
        stores: Mapping[str, SegmentStore],
        owners: Mapping[str, OwnerStore] = MappingProxyType({}),
        *,
        gone: Collection[str] = (),
    ) -> None:
        """Replace the stores of some tables, and mark all rows of these tables as changed.

        The old states and owners of these rows become unknown. Aborts all reads. No-op if no table is passed.

        Args:
            stores: new row stores, by table FQN.
            owners: new owner store of each table in ``stores`` that has managed collisions, by FQN.
            gone: FQNs of tables to remove from the log. Their pending rows are dropped. Unknown FQNs are ignored.
        """
        if not (stores or gone):
            return
        changed = {*stores, *gone}

        def others(rows: Mapping[str, ChangedRows]) -> dict[str, ChangedRows]:
            return {fqn: each for fqn, each in rows.items() if fqn not in changed}

        with self.lock:
            cursors = self.cursors
            consumers = {
                name: each._replace(carried=others(each.carried), reads=()) for name, each in cursors.consumers.items()
            }
            cursors.consumers.update(consumers)
            cursors.origin = others(cursors.origin)
            self.segments.replace(stores, owners, gone)

    def state(self) -> LogState:
        """Return the state to save in a checkpoint. It contains the pending rows of every consumer.

        The pending rows include the rows of uncommitted reads and of writes in progress. The state also contains all
        rows that ever changed, unless ``delete_on_read`` is True. Consumers that a publisher adds while it copies a
        snapshot are omitted. Waits for the device. Does not move any cursor.
        """
        segments, cursors = self.segments, self.cursors
        with self.lock, one_cut():
            segments.fence.enter()
            segments.notice_writes(segments.stores)
            segments.update_owners()
            for store in segments.stores.values():
                store.catch_up()
            known = [cursors.consumers[name] for name in self.consumers.names]  # this ends abandoned reservations
            consumers = {
                each.name: PendingState(
                    each.batch,
                    {} if each.was_dropped else segments.changed_since(each.position, each.carried),
                    each.was_dropped,
                    each.note,
                )
                for each in known
                if not each.is_transient
            }
            history = None if segments.delete_on_read else segments.changed_since(0, cursors.origin)
            return LogState(cursors.num_batches, consumers, history)

    def restore(self, state: LogState) -> None:
        """Replace all pending rows with those in ``state``. Rows of writes in progress stay pending. Aborts all reads.

        If memory runs out or the call is interrupted, all rows may become pending for every consumer.

        Args:
            state: new state, for exactly the consumers of this log. If ``state.history`` is None, a later rewind makes
                all rows pending. Where :attr:`ChangedRows.former` is None, former owners become unknown.
        """
        segments, cursors = self.segments, self.cursors
        with self.lock, one_cut():
            assert set(state.consumers) == set(self.consumers.names), "checked by the caller"
            segments.fence.enter()
            origin = state.history
            if origin is None:
                stores = {} if segments.delete_on_read else segments.stores
                origin = {fqn: store.unknown() for fqn, store in stores.items()}
            origin = segments.with_former(origin)
            pending = {name: segments.with_former(each.rows) for name, each in state.consumers.items()}
            try:
                segments.reset()
                self.writes.cut()
                for name, each in state.consumers.items():
                    known = cursors.consumers[name]
                    at = segments.position
                    moved = known.moved(at, each.batch, pending[name])
                    moved = moved._replace(note=each.note, noted_at=at, restored_at=at)
                    cursors.consumers[name] = moved.dropped(at, None) if each.was_dropped else moved
                cursors.origin, cursors.num_batches = origin, state.num_batches
            except BaseException:  # out of memory, or interrupted: some marks are lost
                segments.mark_all_later()
                raise

    def mark_everything(self) -> None:
        """Make all rows pending for every consumer at the next cut. Old states become unknown. Aborts all reads."""
        with self.lock:
            num_batches = self.cursors.num_batches
            nothing = {name: PendingState(num_batches, {}) for name in self.consumers.names}
            try:
                self.restore(LogState(num_batches, nothing, {}))
                self.segments.mark_all_later()
            except BaseException:  # also after an interrupt while they were marked
                self.segments.mark_all_later()
                raise
