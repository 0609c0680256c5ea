"""Change log of one rank: one row store per table, and the consumers that read the stores.

A cut is a boundary in the log, at the same position in all stores. The rows that changed between two cuts are a segment
of a store. This log is in memory. For the log of a stream, which is in an object store, see ``stream/log.py``.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from delta_tracker.cuda_fence import StreamFence
from delta_tracker.errors import InvalidArgumentError, NeedsSnapshotError, UnsupportedTableError
from delta_tracker.raw_ids import NO_OWNER
from delta_tracker.rows import ChangedRows, merge_first
from delta_tracker.sharding.kernel_hooks import UNSEEN, is_capturing
from delta_tracker.sharding.kernel_memory import one_cut, reading_in_place
from delta_tracker.tracker.consumer_lag import Lag, LagClock
from delta_tracker.tracker.consumer_positions import Consumer, ConsumerPositions, check_name
from delta_tracker.tracker.log_state import LogState, PendingState
from delta_tracker.tracker.profiling import profiler_range
from delta_tracker.tracker.store.owners import OwnerStore
from delta_tracker.tracker.store.segments import SegmentStore
from delta_tracker.tracker.store.several_stores import changed_in_each, mark_in_each, num_changed_in_each, open_in_each
from delta_tracker.types import Delta, Memory

_logger = logging.getLogger(__name__)
_Context = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """Result of :meth:`ChangeLog.read`: all pending rows of a consumer, before top-k selects some of them.

    Args:
        consumer: name of the consumer.
        start: log position of the consumer's cursor.
        stop: log position of the cut at which the read ends.
        batches: ``step()`` counts at the consumer's last committed read and at this one.
        rows: table FQN to changed rows, including carried rows (see
            :class:`~delta_tracker.tracker.consumer_positions.ConsumerPositions`).
        shared: FQNs of the tables whose tensors in ``rows`` belong to the log. Copy these tensors before returning
            them to the user.
    """

    consumer: str
    start: int
    stop: int
    batches: tuple[int, int]
    rows: Mapping[str, ChangedRows]
    shared: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Standing:
    """Lag of a consumer, and table FQN to number of its pending rows, which is empty if they were not counted."""

    lag: Lag
    pending: Mapping[str, int]


class ChangeLog:
    """Thread-safe log of changed rows, written by the hooks and read by the consumers.

    All methods and properties may be called from any thread. They acquire :attr:`lock`, except :meth:`ended` and
    :meth:`mark_all_later`, which are lock-free. The lock is reentrant: hold it around several calls that must see the
    same state.

    The old state of a row is the data that the tracking mode saved before the row changed, such as the row's values.

    Args:
        stores: table FQN to its store.
        consumers: names of the consumers.
        delete_on_read: True to drop rows that every consumer has committed.
        auto_compact: True to compact the log in :meth:`output_launched`; False to compact it after every read.
        max_bytes: maximum size in bytes of the log and the carried rows (see :class:`ConsumerPositions`). If it is
            exceeded, the consumer that lags furthest is dropped. None for no limit.
        received: function that is called with each committed read, while the lock is held. Not called for reads of the
            consumers that a publisher adds while it copies a snapshot.
        owners: FQN of each table with managed collisions, to the store of the owners of its slots. Its segments have
            the positions of the table's own store, which has every slot whose owner changed.

    Attributes:
        abandoned: reserved consumers whose owner was deleted without :meth:`release`, and True for those that are
            transient. A destructor appends to it without the lock. The next operation ends these reservations.
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
        if max_bytes is not None and (type(max_bytes) is not int or max_bytes < 1):
            raise InvalidArgumentError("max_bytes", max_bytes, "Pass a whole number of 1 or more, or None")
        self.lock = threading.RLock()
        self.abandoned: deque[tuple[str, bool]] = deque()
        self._stores = dict(stores)
        self._owners = dict(owners)
        self._every: list[tuple[str, SegmentStore]] = []  # the stores of all tables, then those of all owners
        self._list_stores()
        self._consumers = ConsumerPositions(consumers)
        self._delete_on_read = delete_on_read
        self._auto_compact = auto_compact
        self._is_compact = True  # no cut, commit or abort since the last compaction
        self._is_reading = False  # True between read() and seal(), while nothing pins the read's cut
        self._max_bytes = max_bytes
        self._received = received
        self._position = 0
        self._num_batches = 0
        self._num_compacted = 0
        self._open: dict[int, tuple[str, ...]] = {}  # key to tables
        self._ended: deque[int] = deque()
        self._num_recorded = dict.fromkeys(self._stores, 0)
        self._synced: dict[str, int] = {}  # table to the position of the last sync() of its replicas
        self._lag = LagClock()
        self._fence = StreamFence(self._tensors)
        self._fence.guard(store.device for _, store in self._every)
        self._fence.enter()  # the stores were built on this stream
        for name in self._consumers.names:
            self._lag.placed(name, 0)

    @property
    def stores(self) -> Mapping[str, SegmentStore]:
        """Mapping from table FQN to its current store."""
        with self.lock:
            return dict(self._stores)

    @property
    def owners(self) -> Mapping[str, OwnerStore]:
        """Mapping from the FQN of each table with managed collisions to the current store of its owners."""
        with self.lock:
            return dict(self._owners)

    def owners_of(self, fqn: str, ids: Tensor) -> Tensor:
        """Return the owners of some slots at the last cut, ``[N]`` int64.

        Args:
            fqn: a table with managed collisions.
            ids: ``[N]`` int64 local ids.
        """
        with self.lock:
            return self._owners[fqn].owners.index_select(0, ids)

    @property
    def consumers(self) -> tuple[str, ...]:
        """Names of the consumers."""
        with self.lock:
            self._release_abandoned()
            return self._consumers.names

    @property
    def num_batches(self) -> int:
        """Number of :meth:`step` calls, including those before a restored checkpoint."""
        with self.lock:
            return self._num_batches

    @property
    def num_compacted(self) -> int:
        """Value of :attr:`num_batches` at the last :meth:`compact`; 0 before the first."""
        with self.lock:
            return self._num_compacted

    @property
    def batches(self) -> dict[str, int]:
        """Mapping from consumer to :attr:`num_batches` at its last committed read."""
        with self.lock:
            return {name: self._consumers[name].batch for name in self._consumers.names}

    @property
    def log_bytes(self) -> int:
        """Bytes of the row sets, old states and open batches of all stores."""
        with self.lock:
            return sum(store.log_bytes for _, store in self._every)

    @property
    def carried_bytes(self) -> int:
        """Bytes of the carried rows of all consumers (see :class:`ConsumerPositions`)."""
        with self.lock:
            return self._consumers.num_bytes

    def memory(self) -> Memory:
        """Return the sizes in bytes of the log, of the stores' copies of their shards, and of the carried rows."""
        with self.lock:
            copies = sum(store.copy_bytes for _, store in self._every)
            return Memory(self.log_bytes, copies, self.carried_bytes)

    @property
    def num_recorded(self) -> Mapping[str, int]:
        """Mapping from table FQN to the number of rows recorded as changed so far. Repeated rows count each time.

        Does not wait for the device.
        """
        with self.lock:
            return dict(self._num_recorded)

    def open_updates(self) -> int:
        """Return the number of open batches: writes that have begun, and whose end has not been reported."""
        with self.lock:
            self._close_ended()
            return len(self._open)

    def num_pending(self, consumer: str | None) -> dict[str, int]:
        """Return the number of pending rows of a consumer, also if it is reserved, by table FQN. Waits for the device.

        Otherwise, the argument and the errors are those of :meth:`resolve`.
        """
        with self.lock:
            self._release_abandoned()
            name = self._consumers.resolve(consumer)
            self.notice_writes(self._stores)
            return self._num_pending(name)

    def _num_pending(self, name: str) -> dict[str, int]:
        with self.lock:
            self._fence.enter()
            consumer = self._consumers[name]
            carried = {fqn: rows.ids for fqn, rows in consumer.carried.items()}
            return num_changed_in_each(self._stores, consumer.position, carried)

    def standings(self, *, counts: bool) -> dict[str, Standing]:
        """Return the lag and the number of pending rows of each consumer, by name.

        Consumers that a publisher adds while it copies a snapshot are omitted. All rows are pending for a dropped
        consumer.

        Args:
            counts: True to count the pending rows, which waits for the device. If False, :attr:`Standing.pending` is
                empty, except for dropped consumers.
        """
        with self.lock:
            self._release_abandoned()
            found: dict[str, Standing] = {}
            for name in self._consumers.names:
                consumer = self._consumers[name]
                if consumer.is_transient:
                    continue
                pending: Mapping[str, int] = {}
                if consumer.is_behind:
                    pending = {fqn: store.num_rows for fqn, store in self._stores.items()}
                elif counts:
                    # No notice_writes() here: a hook in another thread may not have acknowledged its write yet.
                    pending = self._num_pending(name)
                lag = self._lag.lag(name, self._num_batches - consumer.batch)
                found[name] = Standing(lag, pending)
            return found

    def resolve(self, consumer: str | None) -> str:
        """Check that a consumer exists and is not reserved, and return its name. None selects the only consumer.

        Raises:
            InvalidArgumentError: if there is no such consumer, or no name was given and there are several.
            ReservedConsumerError: if the consumer is reserved.
        """
        with self.lock:
            self._release_abandoned()
            name = self._consumers.resolve(consumer)
            self._consumers.check_free(name)
            return name

    def reserve(self, consumer: str | None, holder: str) -> str:
        """Reserve a consumer for ``holder`` until :meth:`release`, and return its name.

        While the consumer is reserved, :meth:`resolve` raises an error that names ``holder``, and so does this method.
        """
        with self.lock:
            name = self.resolve(consumer)
            try:
                self._consumers.reserve(name, holder)
                return name  # noqa: TRY300  see below
            except BaseException:  # interrupted: the caller does not know that it has to release the consumer
                self._consumers.reserve(name, None)
                raise

    def release(self, consumer: str) -> None:
        """End the reservation of a consumer."""
        with self.lock:
            self._consumers.reserve(consumer, None)

    def position(self, consumer: str) -> int:
        """Return the log position of a consumer's cursor. Every committed read moves the cursor."""
        with self.lock:
            return self._consumers[consumer].position

    def others(self, consumer: str) -> dict[str, tuple[int, dict[str, Tensor]]]:
        """Return the pending rows of the other consumers, as far as the log can describe them without reading it.

        Consumers that were dropped, and those that a publisher adds while it copies a snapshot, are omitted.

        Returns:
            Name to the position of the consumer's cursor, and its carried rows: table FQN to ``[N]`` int64 local ids.
            The rows that changed after the cursor are pending, too.
        """
        with self.lock:
            self._release_abandoned()
            others = {name: self._consumers[name] for name in self._consumers.names if name != consumer}
            return {
                name: (each.position, {fqn: rows.ids for fqn, rows in each.carried.items() if len(rows)})
                for name, each in others.items()
                if not each.is_transient and not each.is_behind
            }

    def is_behind(self, consumer: str | None) -> bool:
        """Return True if a consumer was dropped and needs a snapshot, also if it is reserved; see :meth:`resolve`."""
        with self.lock:
            self._release_abandoned()
            return self._consumers[self._consumers.resolve(consumer)].is_behind

    def looked_up(self, ids: Mapping[str, Tensor | None]) -> None:
        """Mark rows as changed because they were looked up; see :class:`UpdateListener`."""
        with self.lock, self._reading_in_place(), profiler_range("delta_tracker: record"):
            self._fence.enter()
            self._notice_before_capture(ids)
            self._count_each(ids)
            mark_in_each(self._stores, ids)

    def opened(self, key: int, ids: Mapping[str, Tensor | None]) -> None:
        """Open a batch of rows that are about to be written, and mark the rows as changed; see :class:`UpdateListener`.

        While the batch is open, every cut marks the batch's rows again.
        """
        with self.lock, self._reading_in_place(), profiler_range("delta_tracker: record"):
            self._fence.enter(key)
            self._close_ended()
            self._notice_before_capture(ids)
            self._open[key] = tuple(ids)
            self._count_each(ids)
            open_in_each(self._stores, key, ids)

    def applied(self, key: int, tables: Iterable[str]) -> None:
        """Close batch ``key`` in ``tables``, those that were passed to :meth:`opened`: the rows have been written."""
        with self.lock:
            if not self._fence.leave(key):
                self._fence.enter()  # opened() failed: order the next use after the write
            self._close(key, tables)

    def ended(self, key: int) -> None:
        """Close batch ``key`` at the next cut or the next call of :meth:`opened` or :meth:`step`. Lock-free.

        No update is lost: every cut that was made while the batch was open has marked the batch's rows again.
        """
        self._ended.append(key)

    def mark(self, fqn: str, ids: Tensor | None, *, states: Tensor | None = None, is_written: bool = False) -> None:
        """Mark rows of table ``fqn`` as changed.

        The other arguments are those of :meth:`~delta_tracker.tracker.store.segments.SegmentStore.mark`.
        """
        with self.lock, self._reading_in_place(), profiler_range("delta_tracker: record"):
            self._fence.enter()
            if states is None and not is_written:
                self._notice_before_capture([fqn])
            self._count_each({fqn: ids})
            self._stores[fqn].mark(ids, states=states, is_written=is_written)

    def notice_writes(self, fqns: Iterable[str]) -> None:
        """Mark all rows of the tables in ``fqns`` whose weights may have been written without a report by a hook."""
        with self.lock:
            for fqn in fqns:
                if self._stores[fqn].has_unmarked_writes():
                    self._fence.enter()
                    self._stores[fqn].notice_writes()
                    self._count_each({fqn: None})

    def mark_all_later(self, fqns: Collection[str], key: int | None = None) -> None:
        """Mark all rows of the tables ``fqns`` at the next cut, with unknown old states; see :class:`UpdateListener`.

        Until the end of the write ``key``, every cut marks them, and so does the first cut afterwards. If a cut cannot
        mark the rows, the read fails, and the next cut marks them.
        """
        for fqn in fqns:
            if fqn in self._stores:  # it may have left the model
                self._stores[fqn].mark_all_later(key)
        if key is not None and key != UNSEEN:
            self._open[key] = tuple(fqns)

    def acknowledge_writes(self, fqns: Iterable[str]) -> None:
        """Ignore earlier in-place writes to the weights of the tables ``fqns``, because a hook reported the rows."""
        with self.lock:
            for fqn in fqns:
                self._stores[fqn].acknowledge_writes()

    def changed_since_sync(self, fqns: Iterable[str]) -> dict[str, Tensor | None]:
        """Return the local ids of the rows marked since the last :meth:`synced`, by table FQN. Waits for the device.

        The value is None for a table without :meth:`synced` since its store was created, since the last
        :meth:`diverged` or :meth:`restore`, or since ``max_bytes`` was exceeded.
        """
        with self.lock:
            tables = tuple(fqns)
            self._fence.enter()
            self._close_ended()
            self.notice_writes(tables)
            return {
                fqn: self._stores[fqn].changed(self._synced[fqn], self._position + 1, with_states=False).ids
                if fqn in self._synced
                else None
                for fqn in tables
            }

    def unsynced(self, fqns: Iterable[str]) -> list[str]:
        """Return those tables in ``fqns`` with rows that :meth:`changed_since_sync` returns. Waits for the device."""
        with self.lock:
            return [fqn for fqn, ids in self.changed_since_sync(fqns).items() if ids is None or len(ids)]

    def synced(self, fqns: Iterable[str]) -> None:
        """Start to collect the result of :meth:`changed_since_sync` for the tables ``fqns``, and compact the log.

        The log keeps the rows marked from now on until the next call, also if all consumers commit them.
        """
        with self.lock:
            tables = tuple(fqns)
            self._fence.enter()
            self._close_ended()
            self.notice_writes(tables)
            self._position += 1
            with one_cut():
                for fqn in tables:
                    self._stores[fqn].cut(self._position)
                    self._synced[fqn] = self._position
                    if self._stores[fqn].has_open:  # the cut marked the open rows again
                        self._lag.recorded(self._position)
            self._tidy(self.compact)

    def diverged(self, fqns: Iterable[str]) -> None:
        """Make :meth:`changed_since_sync` return None for the tables ``fqns`` until the next :meth:`synced`."""
        with self.lock:
            for fqn in fqns:
                self._synced.pop(fqn, None)

    def replace(
        self,
        stores: Mapping[str, SegmentStore],
        owners: Mapping[str, OwnerStore] = MappingProxyType({}),
        *,
        gone: Collection[str] = (),
    ) -> None:
        """Replace the stores of some tables, and mark all rows of these tables, with unknown old states and owners.

        Aborts all uncommitted reads. Does nothing if ``stores`` and ``gone`` are empty.

        Args:
            stores: table FQN to its new store.
            owners: the new store of the owners of each of these tables that has managed collisions.
            gone: FQNs of the tables to remove from the log, with their pending rows. Some may be removed already.
        """
        with self.lock:
            self._fence.guard(store.device for store in {**self._stores, **stores}.values())
            self._fence.enter()
            if stores or gone:
                self._consumers.forget_tables({*stores, *gone})
            if gone:
                self._open = {key: tuple(set(fqns).difference(gone)) for key, fqns in self._open.items()}
                for held in (self._stores, self._owners, self._synced, self._num_recorded):
                    for fqn in gone:
                        held.pop(fqn, None)
                self._list_stores()
            for fqn, store in stores.items():
                self._owners.pop(fqn, None)
                if fqn in owners:
                    self._owners[fqn] = owners[fqn]
                    owners[fqn].cut(self._position)
                    owners[fqn].mark_unknown()
                self._stores[fqn] = store
                self._synced.pop(fqn, None)
                self._count_each({fqn: None})
                store.cut(self._position)
                store.mark(None, is_written=True)
            self._list_stores()

    def state(self) -> LogState:
        """Return the state for a checkpoint: the pending rows of every consumer, and the log's history if it is kept.

        The pending rows include those of uncommitted reads and open batches. Consumers that a publisher adds while it
        copies a snapshot are omitted. Waits for the device. Moves no cursor.
        """
        with self.lock, one_cut():
            self._fence.enter()
            self.notice_writes(self._stores)
            self._update_owners()
            for store in self._stores.values():
                store.catch_up()
            consumers = {}
            for name in self._consumers.names:
                consumer = self._consumers[name]
                if consumer.is_transient:
                    continue
                rows = {} if consumer.is_behind else self._changed_since(consumer.position, consumer.carried)
                consumers[name] = PendingState(consumer.batch, rows, consumer.is_behind)
            history = None if self._delete_on_read else self._changed_since(0, self._consumers.origin)
            return LogState(self._num_batches, consumers, history)

    def restore(self, state: LogState) -> None:
        """Replace all pending rows with ``state``; rows of open batches stay pending. Aborts uncommitted reads.

        If memory is missing or the call is interrupted, all rows may count as changed for every consumer.

        Args:
            state: pending rows of exactly this log's consumers. If its ``history`` is None, :meth:`rewind` makes all
                rows pending. The former owners of rows without :attr:`ChangedRows.former` are unknown.
        """
        with self.lock, one_cut():
            self._release_abandoned()
            assert set(state.consumers) == set(self._consumers.names), "checked by the caller"
            self._fence.enter()
            origin = state.history
            if origin is None:
                origin = {} if self._delete_on_read else {fqn: store.unknown() for fqn, store in self._stores.items()}
            origin = self._with_former(origin)
            consumers = {
                name: replace(pending, rows=self._with_former(pending.rows))
                for name, pending in state.consumers.items()
            }
            try:
                self._synced.clear()  # the replicas may have loaded different weights
                for _, store in self._every:
                    store.forget()
                self._cut()
                self._consumers.restore(self._position, consumers, origin)
            except BaseException:  # out of memory, or interrupted: some marks are lost
                self.mark_everything_later()
                raise
            self._num_batches = state.num_batches
            for name, pending in state.consumers.items():
                self._lag.placed(name, self._position, has_rows=pending.has_rows)

    def mark_everything(self) -> None:
        """Make all rows pending for every consumer, with unknown old states and owners. Aborts uncommitted reads."""
        with self.lock:
            nothing = {name: PendingState(self._num_batches, {}) for name in self._consumers.names}
            try:
                self.restore(LogState(self._num_batches, nothing, {}))
                for owners in self._owners.values():
                    owners.mark_unknown()
                for fqn in self._stores:
                    self.mark(fqn, None, is_written=True)
            except BaseException:
                self.mark_everything_later()
                raise

    def mark_everything_later(self) -> None:
        """Make all rows pending for every consumer at the next cut. Takes no memory."""
        with self.lock:
            for _, store in self._every:
                store.mark_all_later()

    def distrust(self, consumer: str, fqn: str, ids: Tensor, *, knows_owners: bool = True) -> None:
        """Make rows pending for one consumer, with unknown old states, and abort its uncommitted read.

        Args:
            consumer: name of the consumer whose copy of the rows may be wrong.
            fqn: the table.
            ids: ``[N]`` int64 local ids, in any order, duplicates allowed.
            knows_owners: True if the consumer has the owners of its last committed read; False if its owners are
                unknown. No effect on a table without managed collisions.
        """
        with self.lock:
            if len(ids):
                self._fence.enter()
                rows = unknown = self._with_former({fqn: self._stores[fqn].unknown(ids)})[fqn]
                if fqn in self._owners and knows_owners:
                    rows = replace(rows, former=self._former(fqn, rows.ids, self._consumers[consumer]))
                # The owners of this consumer are not those of a consumer that is rewound.
                self._consumers.carry(consumer, fqn, rows, origin=None if self._delete_on_read else unknown)
                self._lag.distrusted(consumer)

    def step(self) -> None:
        """Count a batch and enforce ``max_bytes``."""
        with self.lock:
            self._release_abandoned()
            self._close_ended()
            tasks: list[Callable[[], None]] = [self._shed]
            if not is_capturing():  # the graph would contain the operations that mark rows
                tasks.insert(0, partial(self.notice_writes, self._stores))
            self._num_batches += 1
            self._tidy(*tasks)

    def output_launched(self) -> None:
        """Compact the log if ``auto_compact`` is set. Called after an output distribution was launched.

        Does not block. Does nothing during a read, if another thread holds the lock, or if there was no cut, commit or
        abort since the last compaction.
        """
        if self._auto_compact and not self._is_compact and self.lock.acquire(blocking=False):
            try:
                if self._compacts_after_odist and not self._is_reading:
                    self._tidy(self.compact)
            finally:
                self.lock.release()

    @property
    def _compacts_after_odist(self) -> bool:
        """True if the log is compacted in :meth:`output_launched`, False if it is compacted after reads.

        Compaction that waits for the device always runs after reads, which wait for the device anyway.
        """
        return self._auto_compact and not any(store.compact_waits for store in self._stores.values())

    def read(self, consumer: str, *, with_states: bool = True) -> Reading:
        """Cut the log and return the pending rows of ``consumer``. Moves no cursor.

        Call :meth:`seal` or :meth:`discard` afterwards.

        Args:
            consumer: name of the consumer.
            with_states: True to also return the old states, if the mode keeps them. Must be True if the delta may leave
                out rows, because the old states of these rows would otherwise be lost.

        Raises:
            NeedsSnapshotError: if the consumer was dropped.
            UnsupportedTableError: if a stream cannot have the owners of a table's slots.
        """
        with self.lock:
            self._release_abandoned()
            known = self._consumers[consumer]
            if known.is_behind:
                raise NeedsSnapshotError(consumer, self._max_bytes)
            self._is_reading = True
            try:
                self._cut()
                if self._owners:
                    self._check_owners()
                rows = self._changed_since(known.position, known.carried, self._position, with_states=with_states)
            except BaseException:
                self.discard()
                raise
            self._lag.found(consumer, sum(map(len, rows.values())))
            shared = frozenset([fqn for fqn, carried in known.carried.items() if rows[fqn].ids is carried.ids])
            return Reading(consumer, known.position, self._position, (known.batch, self._num_batches), rows, shared)

    def discard(self) -> None:
        """End a failed :meth:`read`, and merge the segments that its cut separated.

        An earlier uncommitted read of the same consumer stays valid.
        """
        with self.lock:
            self._is_reading = False
            self._tidy(self.compact)

    def seal(self, delta: Delta, *, commit: bool) -> None:
        """Store ``delta`` as the uncommitted read of its consumer, or commit it immediately.

        If a commit is interrupted, the rows stay pending, with unknown old states.
        """
        with self.lock:
            self._is_reading = False
            if commit:
                self._commit(delta)
                return
            # Without an earlier one, commit() or abort() will compact the log.
            tasks = self._tasks_after_read() if self._consumers[delta.consumer].sealed is not None else [self._shed]
            self._consumers.seal(delta)
            self._tidy(*tasks)

    def commit(self, delta: Delta) -> None:
        """Move a consumer's cursor to the end of its uncommitted read ``delta``.

        If the call is interrupted, the rows of the delta may stay pending, with unknown old states.

        Raises:
            StaleDeltaError: if ``delta`` is no longer the consumer's uncommitted read.
            InvalidArgumentError: if the consumer was removed.
        """
        with self.lock:
            self._consumers.check_uncommitted(delta)
            self._commit(delta)

    def abort(self, delta: Delta) -> None:
        """Discard a consumer's uncommitted read ``delta``; its rows stay pending. Errors as of :meth:`commit`."""
        with self.lock:
            tasks = self._tasks_after_read()
            self._consumers.abort(delta)
            self._tidy(*tasks)

    def add(self, consumer: str, *, holder: str | None = None) -> None:
        """Add a consumer at the end of the log.

        Args:
            consumer: name of the consumer.
            holder: description of the owner of a transient consumer, which is reserved for the owner and not saved in
                checkpoints. None adds an ordinary consumer.

        Raises:
            InvalidArgumentError: if a consumer of this name exists, or the name is not a string.
        """
        check_name(consumer)
        with self.lock:
            self._release_abandoned()
            if consumer in self._consumers.names:
                raise InvalidArgumentError("consumer", consumer, f"Pass a name not in {list(self._consumers.names)}")
            self._cut()
            self._lag.placed(consumer, self._position)
            self._consumers.add(consumer, self._position, self._num_batches, holder=holder)

    def remove(self, consumer: str) -> None:
        """Remove a consumer. With ``delete_on_read``, also drop the rows that were pending only for this consumer."""
        with self.lock:
            name = self._consumers.resolve(consumer)
            self._consumers.remove(name)
            self._tidy(partial(self._lag.removed, name), self.compact)

    def clear(self, *consumers: str) -> None:
        """Discard the pending rows of consumers and treat them as up to date, even if they were dropped.

        If the call is interrupted, all rows may count as changed.
        """
        with self.lock:
            self._cut()
            tasks: list[Callable[[], None]] = [partial(self._lag.placed, name, self._position) for name in consumers]
            try:
                self._consumers.place(consumers, self._position, self._num_batches)
                self._tidy(*tasks, self.compact)
            except BaseException:  # interrupted: the caller does not know that nothing is pending
                if any(self._consumers[name].position == self._position for name in consumers):
                    self.mark_everything_later()
                raise

    def rewind(self, consumer: str) -> None:
        """Move a consumer back to the start of the log, so that all rows changed so far are pending.

        Aborts its uncommitted read.

        Raises:
            InvalidArgumentError: if the log drops rows after reads (``delete_on_read``).
        """
        with self.lock:
            if self._delete_on_read:
                raise InvalidArgumentError("delete_on_read", True, "Build the tracker with delete_on_read=False")
            self._lag.placed(consumer, 0, has_rows=any(map(len, self._consumers.origin.values())))
            self._consumers.rewind(consumer)

    def compact(self) -> None:
        """Merge neighboring segments, unless a cursor or the end of an uncommitted read lies between them.

        If ``delete_on_read`` is True, first drop the rows that every consumer has committed.
        """
        with self.lock, profiler_range("delta_tracker: compact"):
            self._fence.enter()
            if self._delete_on_read:
                self._delete_committed()  # before the stores are compacted, so that dropped segments are not merged
            crowded = [(fqn, store) for fqn, store in self._every if store.num_segments > 1]
            pinned = self._consumers.pinned if crowded else set()
            for fqn, store in crowded:
                store.compact({*pinned, self._synced[fqn]} if fqn in self._synced else pinned)
            self._lag.compact(pinned, forgets=self._delete_on_read)
            self._num_compacted = self._num_batches
            self._is_compact = True

    def _delete_committed(self) -> None:
        """Drop the rows that every consumer has committed, except those marked since the last :meth:`synced`."""
        oldest = self._consumers.oldest
        for fqn, store in self._every:
            synced = self._synced.get(fqn) if self._synced else None
            if synced is None:
                store.delete(oldest)
            else:
                store.drop_states(oldest)
                store.delete(synced if oldest is None else min(oldest, synced))

    def _changed_since(
        self, start: int, carried: Mapping[str, ChangedRows], stop: int | None = None, *, with_states: bool = True
    ) -> dict[str, ChangedRows]:
        """Return the rows in ``carried`` and the rows marked in ``[start, stop)``, by table FQN.

        A ``stop`` of None means no upper bound. For rows in both, the old states of ``carried`` are returned.
        """
        end = self._position + 1 if stop is None else stop
        rows = changed_in_each(self._stores, start, end, with_states=with_states)
        for fqn, owners in self._owners.items():
            rows[fqn] = replace(rows[fqn], former=owners.former(rows[fqn].ids, start))
        for fqn, older in carried.items():
            rows[fqn] = merge_first(older if with_states else older.without_states(), rows[fqn])
        return rows

    def _former(self, fqn: str, ids: Tensor, consumer: Consumer) -> Tensor:
        """Return the owners that a consumer has of some rows, ``[N]`` int64, as of its last committed read.

        Args:
            fqn: a table with managed collisions.
            ids: ``[N]`` int64 local ids, ascending and unique.
            consumer: the consumer.
        """
        former = self._owners[fqn].former(ids, consumer.position)
        older = consumer.carried.get(fqn)
        if older is not None and older.former is not None:
            is_carried = torch.isin(older.ids, ids)
            former[torch.searchsorted(ids, older.ids[is_carried])] = older.former[is_carried]
        return former

    def _with_former(self, rows: Mapping[str, ChangedRows]) -> dict[str, ChangedRows]:
        """Return rows by table, in which unknown former owners are ``NO_OWNER`` in tables with managed collisions.

        All former owners of rows without :attr:`ChangedRows.former` are unknown.
        """
        found = {}
        for fqn, each in rows.items():
            former = each.former if fqn in self._owners else None
            if fqn in self._owners and former is None:
                former = torch.full_like(each.ids, NO_OWNER)
            found[fqn] = each if former is each.former else replace(each, former=former)
        return found

    def _update_owners(self) -> None:
        """Mark the slots whose owner has changed since the last call, with their old states."""
        for fqn, owners in self._owners.items():
            owners.update(partial(self._mark_owned, fqn))

    def _mark_owned(self, fqn: str, ids: Tensor) -> None:
        self._count_each({fqn: ids})
        self._stores[fqn].mark(ids)

    def _check_owners(self) -> None:
        """Check the owners of the last cut.

        Raises:
            UnsupportedTableError: if a stream cannot have the owners of a table's slots.
        """
        for fqn, owners in self._owners.items():
            if owners.refusal:
                remedy = "Name the table in fqns_to_skip to train it untracked"
                raise UnsupportedTableError(fqn, owners.refusal, remedy, problem="cannot be read")

    def _list_stores(self) -> None:
        self._every = [*self._stores.items(), *self._owners.items()]
        self._reads_shards = any(store.reads_shard for store in self._stores.values())
        # Marks read shards without flushing a cache; a cut flushes each cache once.
        self._reading_in_place: _Context = reading_in_place if self._reads_shards else nullcontext

    def _count_each(self, ids: Mapping[str, Tensor | None]) -> None:
        """Count rows that are recorded as changed.

        Args:
            ids: table FQN to ``[N]`` local ids; None for all rows.
        """
        recorded, num_rows = self._num_recorded, 0
        for fqn, own in ids.items():
            num_own = self._stores[fqn].num_rows if own is None else own.numel()
            recorded[fqn] = recorded.get(fqn, 0) + num_own
            num_rows += num_own
        if num_rows:
            self._lag.recorded(self._position)

    def _commit(self, delta: Delta) -> None:
        self._fence.enter()
        tasks = self._tasks_after_read()
        try:
            self._consumers.advance(delta)
            self._tidy(partial(self._count_received, delta), *tasks)
        except BaseException:
            self.undo_commit(delta)
            raise

    def undo_commit(self, delta: Delta) -> None:
        """Make the rows of ``delta`` pending again, with unknown old states, if the read was committed.

        Call it if an interrupt keeps the result of a committed read from the user.
        """
        with self.lock:
            if self._consumers[delta.consumer].position == delta.stop:
                for fqn, rows in delta.items():
                    self.distrust(delta.consumer, fqn, rows.ids, knows_owners=False)

    def _count_received(self, delta: Delta) -> None:
        self._lag.committed(delta.consumer, delta.stop, leaves_out=bool(delta.kept))
        if self._received is not None and not self._consumers[delta.consumer].is_transient:
            self._received(delta)

    def _tasks_after_read(self) -> list[Callable[[], None]]:
        self._is_compact = False
        # Compact at every sixteenth position also with auto_compact, because an idle model runs no output distribution.
        compacts = not self._compacts_after_odist or self._position % 16 == 0
        return [self.compact, self._shed] if compacts else [self._shed]

    def _tensors(self) -> Iterator[Tensor]:
        """Yield all tensors of the log."""
        for _, store in self._every:
            yield from store.tensors()
        for rows in self._consumers.held():
            yield from rows.tensors

    def _tidy(self, *tasks: Callable[[], None]) -> None:
        """Run maintenance tasks in order.

        If one raises MemoryError or RuntimeError, log the error and skip the others. No pending row is lost, the
        preceding read or commit stays valid, and the next call tries again.
        """
        try:
            for task in tasks:
                task()
        except (MemoryError, RuntimeError):  # torch raises RuntimeError if host or device memory runs out
            _logger.exception("maintenance of the change log failed; the next call retries")

    def _release_abandoned(self) -> None:
        """End the reservations in :attr:`abandoned`. The next compaction frees the rows of transient consumers."""
        while self.abandoned:
            name, is_transient = self.abandoned[0]
            self._consumers.abandon(name)
            if is_transient:
                self._lag.removed(name)
            self._is_compact = False
            self.abandoned.popleft()  # last: an interrupted call is repeated

    def _close_ended(self) -> None:
        """Close the batches queued by :meth:`ended`. Usually only batches of failed backward passes are still open."""
        while self._ended:
            key = self._ended[0]
            self._fence.leave(key)
            self._close(key, self._open.get(key, ()))
            self._ended.popleft()  # last: an interrupted call is repeated

    def _close(self, key: int, tables: Iterable[str]) -> None:
        """Close a batch in its tables. An interrupted call can be repeated."""
        for fqn in tables:
            if fqn in self._stores:  # it may have left the model
                self._stores[fqn].close_batch(key)
        self._open.pop(key, None)

    def _notice_before_capture(self, fqns: Iterable[str]) -> None:
        """Call :meth:`notice_writes` for each table in ``fqns`` that keeps old states.

        Must run before the old states are captured.
        """
        if self._reads_shards:
            self.notice_writes([fqn for fqn in fqns if self._stores[fqn].keeps_states])

    def _cut(self) -> None:
        self._fence.enter()
        self._close_ended()
        self.notice_writes(self._stores)
        with one_cut():
            if self._owners:
                self._update_owners()  # first, so that the changes are before the cut
            self._position += 1
            self._is_compact = False
            for _, store in self._every:
                store.cut(self._position)
                if store.has_open:  # the cut marked the open rows again
                    self._lag.recorded(self._position)

    def _shed(self) -> None:
        while self._max_bytes is not None and self._is_too_large(self._max_bytes):
            hindmost = self._consumers.hindmost
            start = None if hindmost is None else self._consumers[hindmost].position
            if self._synced and (start is None or min(self._synced.values()) < start):
                self._synced.clear()  # the next sync() of the replicas marks all rows
            elif hindmost is None:
                return
            else:
                self._cut()
                self._consumers.give_up(hindmost, self._position)
                self._lag.given_up(hindmost, self._position)
            self.compact()

    def _is_too_large(self, max_bytes: int) -> bool:
        """Return True if the log and the carried rows exceed ``max_bytes``.

        If they do, frees the stores' spare row sets and checks once more.
        """
        if self.log_bytes + self.carried_bytes <= max_bytes:
            return False
        for _, store in self._every:
            store.drop_spare()
        return self.log_bytes + self.carried_bytes > max_bytes
