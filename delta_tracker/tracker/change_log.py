"""Change log of one rank: one row store per table, and the consumers that read the stores.

A cut is a boundary in the log, at the same position in all stores. The rows that changed between two cuts are a segment
of a store. This log is in memory. For the log of a stream, which is in an object store, see ``stream/log.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from torch import Tensor

from delta_tracker.sharding.kernel_memory import one_cut
from delta_tracker.tracker.consumer_lag import LagClock
from delta_tracker.tracker.consumer_positions import ConsumerPositions
from delta_tracker.tracker.log_consumers import LogConsumers
from delta_tracker.tracker.log_segments import LogSegments
from delta_tracker.tracker.log_state import LogState, PendingState
from delta_tracker.tracker.log_writes import LogWrites
from delta_tracker.tracker.store.owners import OwnerStore
from delta_tracker.tracker.store.segments import SegmentStore
from delta_tracker.types import Delta, Memory


class ChangeLog:
    """Thread-safe log of changed rows: hooks report :attr:`writes`, and :attr:`consumers` read them.

    All methods and properties may be called from any thread. They acquire :attr:`lock`. The lock is reentrant: hold it
    around several calls that must see the same state.

    The old state of a row is the data that the tracking mode saved before the row changed, such as the row's values.

    Args:
        stores: table FQN to its store.
        consumers: names of the consumers.
        delete_on_read: True to drop rows that every consumer has committed.
        auto_compact: True to compact the log after an output distribution was launched; False after every read.
        max_bytes: see :class:`LogConsumers`.
        received: see :class:`LogConsumers`.
        owners: see :class:`LogSegments`.

    Attributes:
        lock: lock of the log.
        writes: listener of the hooks, with the writes in progress.
        consumers: the consumers, and their reads.
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
        self._cursors = ConsumerPositions(consumers)
        self._lag = LagClock()
        self._segments = LogSegments(stores, owners, self._cursors, self._lag, delete_on_read=delete_on_read)
        self.writes = LogWrites(self.lock, self._segments, auto_compact=auto_compact)
        self.consumers = LogConsumers(
            self.lock, self.writes, self._segments, self._lag, max_bytes=max_bytes, received=received
        )

    @property
    def stores(self) -> Mapping[str, SegmentStore]:
        """Mapping from table FQN to its current store."""
        with self.lock:
            return dict(self._segments.stores)

    @property
    def owners(self) -> Mapping[str, OwnerStore]:
        """Mapping from the FQN of each table with managed collisions to the current store of its owners."""
        with self.lock:
            return dict(self._segments.owners)

    def owners_of(self, fqn: str, ids: Tensor) -> Tensor:
        """Return the owners of some slots at the last cut, ``[N]`` int64.

        Args:
            fqn: a table with managed collisions.
            ids: ``[N]`` int64 local ids.
        """
        with self.lock:
            return self._segments.owners[fqn].owners.index_select(0, ids)

    @property
    def num_batches(self) -> int:
        """Number of ``step()`` calls, including those before a restored checkpoint."""
        with self.lock:
            return self._cursors.num_batches

    @property
    def num_compacted(self) -> int:
        """Value of :attr:`num_batches` at the last :meth:`compact`; 0 before the first."""
        with self.lock:
            return self._segments.num_compacted

    @property
    def num_recorded(self) -> Mapping[str, int]:
        """Mapping from table FQN to the number of rows recorded as changed so far. Repeated rows count each time.

        Does not wait for the device.
        """
        with self.lock:
            return dict(self._segments.num_recorded)

    def memory(self) -> Memory:
        """Return the sizes in bytes of the log, of the stores' copies of their shards, and of the carried rows."""
        with self.lock:
            return Memory(self._segments.log_bytes, self._segments.copy_bytes, self._cursors.num_bytes)

    def compact(self) -> None:
        """Merge neighboring segments, unless a cursor or the end of a read lies between them.

        If ``delete_on_read`` is True, first drop the rows that every consumer has committed.
        """
        with self.lock:
            self._segments.compact()

    def replace(
        self,
        stores: Mapping[str, SegmentStore],
        owners: Mapping[str, OwnerStore] = MappingProxyType({}),
        *,
        gone: Collection[str] = (),
    ) -> None:
        """Replace the stores of some tables, and mark all rows of these tables, with unknown old states and owners.

        Aborts all reads. Does nothing if ``stores`` and ``gone`` are empty.

        Args:
            stores: table FQN to its new store.
            owners: the new store of the owners of each of these tables that has managed collisions.
            gone: FQNs of the tables to remove from the log, with their pending rows. Some may be removed already.
        """
        with self.lock:
            self._segments.fence.guard(store.device for store in {**self._segments.stores, **stores}.values())
            self._segments.fence.enter()
            if stores or gone:
                self._cursors.forget_tables({*stores, *gone})
            if gone:
                self.writes.remove_tables(gone)
                self._segments.remove(gone)
            self._segments.replace(stores, owners)

    def state(self) -> LogState:
        """Return the state for a checkpoint: the pending rows of every consumer, and the log's history if it is kept.

        The pending rows include those of uncommitted reads and writes in progress. Consumers that a publisher adds
        while it copies a snapshot are omitted. Waits for the device. Moves no cursor.
        """
        segments = self._segments
        with self.lock, one_cut():
            segments.fence.enter()
            segments.notice_writes(segments.stores)
            segments.update_owners()
            for store in segments.stores.values():
                store.catch_up()
            consumers = {}
            for name in self._cursors.names:
                consumer = self._cursors[name]
                if consumer.is_transient:
                    continue
                rows = {} if consumer.is_behind else segments.changed_since(consumer.position, consumer.carried)
                consumers[name] = PendingState(consumer.batch, rows, consumer.is_behind)
            history = None if segments.delete_on_read else segments.changed_since(0, self._cursors.origin)
            return LogState(self._cursors.num_batches, consumers, history)

    def restore(self, state: LogState) -> None:
        """Replace all pending rows with ``state``; rows of writes in progress stay pending. Aborts all reads.

        If memory is missing or the call is interrupted, all rows may count as changed for every consumer.

        Args:
            state: pending rows of exactly this log's consumers. If its ``history`` is None, a rewind makes all rows
                pending. The former owners of rows without :attr:`ChangedRows.former` are unknown.
        """
        segments = self._segments
        with self.lock, one_cut():
            assert set(state.consumers) == set(self.consumers.names), "checked by the caller"
            segments.fence.enter()
            origin = state.history
            if origin is None:
                stores = {} if segments.delete_on_read else segments.stores
                origin = {fqn: store.unknown() for fqn, store in stores.items()}
            origin = segments.with_former(origin)
            consumers = {
                name: replace(pending, rows=segments.with_former(pending.rows))
                for name, pending in state.consumers.items()
            }
            try:
                segments.forget()
                self.writes.cut()
                self._cursors.restore(segments.position, consumers, origin)
            except BaseException:  # out of memory, or interrupted: some marks are lost
                self.mark_everything_later()
                raise
            self._cursors.num_batches = state.num_batches
            for name, pending in state.consumers.items():
                self._lag.placed(name, segments.position, has_rows=pending.has_rows)

    def mark_everything(self) -> None:
        """Make all rows pending for every consumer, with unknown old states and owners. Aborts all reads."""
        with self.lock:
            nothing = {name: PendingState(self._cursors.num_batches, {}) for name in self._cursors.names}
            try:
                self.restore(LogState(self._cursors.num_batches, nothing, {}))
                for owners in self._segments.owners.values():
                    owners.mark_unknown()
                for fqn in self._segments.stores:
                    self.writes.mark(fqn, None, is_written=True)
            except BaseException:
                self.mark_everything_later()
                raise

    def mark_everything_later(self) -> None:
        """Make all rows pending for every consumer at the next cut. Takes no memory."""
        with self.lock:
            self._segments.mark_all_later()
