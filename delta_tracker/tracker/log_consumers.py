"""Consumers of a change log: their reads, reservations and lag."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from delta_tracker.errors import InvalidArgumentError, NeedsSnapshotError
from delta_tracker.sharding.kernel_hooks import is_capturing
from delta_tracker.tracker.consumer_lag import Lag, LagClock
from delta_tracker.tracker.consumer_positions import Consumer, ConsumerPositions, check_name
from delta_tracker.tracker.log_segments import LogSegments, maintain
from delta_tracker.tracker.log_writes import LogWrites
from delta_tracker.tracker.read import Read
from delta_tracker.types import Delta


@dataclass(frozen=True, slots=True)
class Standing:
    """Lag of a consumer, and table FQN to number of its pending rows, which is empty if they were not counted."""

    lag: Lag
    pending: Mapping[str, int]


class LogConsumers:
    """Consumers of a change log, which read its segments.

    All methods may be called from any thread. They acquire the log's lock.

    Args:
        lock: the log's lock.
        writes: the writes in progress, which take part in each cut.
        segments: the log's segments.
        lag: clock of the consumers' lag.
        max_bytes: maximum size in bytes of the log and the carried rows (see :class:`ConsumerPositions`). If it is
            exceeded, the consumer that lags furthest is dropped. None for no limit.
        received: function that is called with each committed delta, while the lock is held. Not called for reads of the
            consumers that a publisher adds while it copies a snapshot.

    Attributes:
        abandoned: reserved consumers whose owner was deleted without :meth:`release`, and True for those that are
            transient. A destructor appends to it without the lock. The next operation ends these reservations.
    """

    def __init__(
        self,
        lock: threading.RLock,
        writes: LogWrites,
        segments: LogSegments,
        lag: LagClock,
        *,
        max_bytes: int | None,
        received: Callable[[Delta], None] | None,
    ) -> None:
        if max_bytes is not None and (type(max_bytes) is not int or max_bytes < 1):
            raise InvalidArgumentError("max_bytes", max_bytes, "Pass a whole number of 1 or more, or None")
        self.lock = lock
        self.abandoned: deque[tuple[str, bool]] = deque()
        self._writes = writes
        self._segments = segments
        self._cursors: ConsumerPositions = segments.cursors
        self._lag = lag
        self._max_bytes = max_bytes
        self._received = received
        for name in self._cursors.names:
            self._lag.placed(name, 0)

    # Names

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the consumers."""
        with self.lock:
            self.release_abandoned()
            return self._cursors.names

    def resolve(self, consumer: str | None) -> str:
        """Check that a consumer exists and is not reserved, and return its name. None selects the only consumer.

        Raises:
            InvalidArgumentError: if there is no such consumer, or no name was given and there are several.
            ReservedConsumerError: if the consumer is reserved.
        """
        with self.lock:
            self.release_abandoned()
            name = self._cursors.resolve(consumer)
            self._cursors.check_free(name)
            return name

    def reserve(self, consumer: str | None, holder: str) -> str:
        """Reserve a consumer for ``holder`` until :meth:`release`, and return its name.

        While the consumer is reserved, :meth:`resolve` raises an error that names ``holder``, and so does this method.
        """
        with self.lock:
            name = self.resolve(consumer)
            try:
                self._cursors.reserve(name, holder)
                return name  # noqa: TRY300  see below
            except BaseException:  # interrupted: the caller does not know that it has to release the consumer
                self._cursors.reserve(name, None)
                raise

    def release(self, consumer: str) -> None:
        """End the reservation of a consumer."""
        with self.lock:
            self._cursors.reserve(consumer, None)

    def release_abandoned(self) -> None:
        """End the reservations in :attr:`abandoned`. The next compaction frees the rows of transient consumers."""
        with self.lock:
            while self.abandoned:
                name, is_transient = self.abandoned[0]
                self._cursors.abandon(name)
                if is_transient:
                    self._lag.removed(name)
                self._segments.is_compact = False
                self.abandoned.popleft()  # last: an interrupted call is repeated

    # Cursors

    @property
    def batches(self) -> dict[str, int]:
        """Mapping from consumer to the number of ``step()`` calls at its last committed read."""
        with self.lock:
            return {name: self._cursors[name].batch for name in self._cursors.names}

    def position(self, consumer: str) -> int:
        """Return the log position of a consumer's cursor. Every committed read moves the cursor."""
        with self.lock:
            return self._cursors[consumer].position

    def is_behind(self, consumer: str | None) -> bool:
        """Return True if a consumer was dropped and needs a snapshot, also if it is reserved; see :meth:`resolve`."""
        with self.lock:
            self.release_abandoned()
            return self._cursors[self._cursors.resolve(consumer)].is_behind

    def others(self, consumer: str) -> dict[str, tuple[int, dict[str, Tensor]]]:
        """Return the pending rows of the other consumers, as far as the log can describe them without reading it.

        Consumers that were dropped, and those that a publisher adds while it copies a snapshot, are omitted.

        Returns:
            Name to the position of the consumer's cursor, and its carried rows: table FQN to ``[N]`` int64 local ids.
            The rows that changed after the cursor are pending, too.
        """
        with self.lock:
            self.release_abandoned()
            others = {name: self._cursors[name] for name in self._cursors.names if name != consumer}
            return {
                name: (each.position, {fqn: rows.ids for fqn, rows in each.carried.items() if len(rows)})
                for name, each in others.items()
                if not each.is_transient and not each.is_behind
            }

    def num_pending(self, consumer: str | None) -> dict[str, int]:
        """Return the number of pending rows of a consumer, also if it is reserved, by table FQN. Waits for the device.

        Otherwise, the argument and the errors are those of :meth:`resolve`.
        """
        with self.lock:
            self.release_abandoned()
            name = self._cursors.resolve(consumer)
            self._segments.fence.enter()
            self._segments.notice_writes(self._segments.stores)
            return self._segments.num_changed(self._cursors[name])

    def standings(self, *, counts: bool) -> dict[str, Standing]:
        """Return the lag and the number of pending rows of each consumer, by name.

        Consumers that a publisher adds while it copies a snapshot are omitted. All rows are pending for a dropped
        consumer.

        Args:
            counts: True to count the pending rows, which waits for the device. If False, :attr:`Standing.pending` is
                empty, except for dropped consumers.
        """
        with self.lock:
            self.release_abandoned()
            found: dict[str, Standing] = {}
            for name in self._cursors.names:
                consumer = self._cursors[name]
                if consumer.is_transient:
                    continue
                pending: Mapping[str, int] = {}
                if consumer.is_behind:
                    pending = {fqn: store.num_rows for fqn, store in self._segments.stores.items()}
                elif counts:
                    # No notice_writes() here: a hook in another thread may not have acknowledged its write yet.
                    self._segments.fence.enter()
                    pending = self._segments.num_changed(consumer)
                lag = self._lag.lag(name, self._cursors.num_batches - consumer.batch)
                found[name] = Standing(lag, pending)
            return found

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
            self.release_abandoned()
            if consumer in self._cursors.names:
                raise InvalidArgumentError("consumer", consumer, f"Pass a name not in {list(self._cursors.names)}")
            self._writes.cut()
            self._lag.placed(consumer, self._segments.position)
            self._cursors.add(consumer, self._segments.position, holder=holder)

    def remove(self, consumer: str) -> None:
        """Remove a consumer. With ``delete_on_read``, also drop the rows that were pending only for this consumer."""
        with self.lock:
            name = self._cursors.resolve(consumer)
            self._cursors.remove(name)
            maintain(partial(self._lag.removed, name), self._segments.compact)

    def clear(self, *consumers: str) -> None:
        """Discard the pending rows of consumers and treat them as up to date, even if they were dropped.

        If the call is interrupted, all rows may count as changed.
        """
        with self.lock:
            self._writes.cut()
            position = self._segments.position
            tasks: list[Callable[[], None]] = [partial(self._lag.placed, name, position) for name in consumers]
            try:
                self._cursors.place(consumers, position)
                maintain(*tasks, self._segments.compact)
            except BaseException:  # interrupted: the caller does not know that nothing is pending
                if any(self._cursors[name].position == position for name in consumers):
                    self._segments.mark_all_later()
                raise

    def rewind(self, consumer: str) -> None:
        """Move a consumer back to the start of the log, so that all rows changed so far are pending.

        Aborts its uncommitted read.

        Raises:
            InvalidArgumentError: if the log drops rows after reads (``delete_on_read``).
        """
        with self.lock:
            if self._segments.delete_on_read:
                raise InvalidArgumentError("delete_on_read", True, "Build the tracker with delete_on_read=False")
            self._lag.placed(consumer, 0, has_rows=any(map(len, self._cursors.origin.values())))
            self._cursors.rewind(consumer)

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
                segments = self._segments
                segments.fence.enter()
                rows = unknown = segments.with_former({fqn: segments.stores[fqn].unknown(ids)})[fqn]
                if fqn in segments.owners and knows_owners:
                    rows = replace(rows, former=segments.former(fqn, rows.ids, self._cursors[consumer]))
                # The owners of this consumer are not those of a consumer that is rewound.
                self._cursors.carry(consumer, fqn, rows, origin=None if segments.delete_on_read else unknown)
                self._lag.distrusted(consumer)

    # Reads

    def read(self, consumer: str, *, with_states: bool = True) -> Read:
        """Cut the log and begin a read of the pending rows of ``consumer``. Moves no cursor.

        Args:
            consumer: name of the consumer.
            with_states: True to also return the old states, if the mode keeps them. Must be True if the delta may leave
                out rows, because the old states of these rows would otherwise be lost.

        Raises:
            NeedsSnapshotError: if the consumer was dropped.
            UnsupportedTableError: if a stream cannot have the owners of a table's slots.
        """
        with self.lock:
            if self.abandoned:
                self.release_abandoned()
            segments, known = self._segments, self._cursors[consumer]
            if known.is_behind:
                raise NeedsSnapshotError(consumer, self._max_bytes)
            batches = known.batch, self._cursors.num_batches
            read = Read(self, consumer, known.position, segments.position + 1, batches)
            self._cursors.begin(read)
            try:
                self._writes.cut()
                if segments.owners:
                    segments.check_owners()
                rows = segments.changed_since(known.position, known.carried, read.stop, with_states=with_states)
            except BaseException:
                read.abort()
                raise
            self._lag.found(consumer, sum(map(len, rows.values())))
            read.shared = frozenset([fqn for fqn, carried in known.carried.items() if rows[fqn].ids is carried.ids])
            read.rows = rows
            return read

    def uncommitted(self, delta: Delta) -> Read:
        """Return the uncommitted read that returned ``delta``.

        Raises:
            StaleDeltaError: if ``delta`` is no longer the consumer's uncommitted read.
            InvalidArgumentError: if the consumer was removed.
        """
        with self.lock:
            return self._cursors.uncommitted(delta)

    def hold(self, read: Read) -> None:
        """Make ``read`` the uncommitted read of its consumer; see :meth:`Read.hold`."""
        with self.lock:
            # Without an earlier one, commit() or abort() will compact the log.
            if self._cursors.current(read).read is not None:
                tasks = self._tasks_after_read()
            else:
                tasks = [] if self._max_bytes is None else [self._shed]
            self._cursors.hold(read)
            read.rows = {}
            maintain(*tasks)

    def commit(self, read: Read) -> None:
        """Move the consumer's cursor to the end of ``read``; see :meth:`Read.commit`."""
        with self.lock:
            self._segments.fence.enter()
            tasks = self._tasks_after_read()
            consumer = self._cursors.current(read)
            try:
                self._cursors.advance(read)
                maintain(partial(self._count_received, read, consumer), *tasks)
            except BaseException:
                self.abort(read)
                raise

    def abort(self, read: Read) -> None:
        """Discard ``read``; see :meth:`Read.abort`."""
        with self.lock:
            if self._cursors.discard(read):
                maintain(self._segments.compact)
            elif self._cursors.has_committed(read):
                for fqn, rows in (read.rows if read.delta is None else read.delta).items():
                    self.distrust(read.consumer, fqn, rows.ids, knows_owners=False)

    def _count_received(self, read: Read, consumer: Consumer) -> None:
        self._lag.committed(read.consumer, read.stop, leaves_out=read.delta is not None and bool(read.delta.kept))
        if self._received is not None and read.delta is not None and not consumer.is_transient:
            self._received(read.delta)

    def _tasks_after_read(self) -> list[Callable[[], None]]:
        self._segments.is_compact = False
        # Compact at every sixteenth position also with auto_compact, because an idle model runs no output distribution.
        compacts = not self._writes.compacts_after_odist or self._segments.position % 16 == 0
        return ([self._segments.compact] if compacts else []) + ([] if self._max_bytes is None else [self._shed])

    # Memory

    def step(self) -> None:
        """Count a batch and enforce ``max_bytes``."""
        with self.lock:
            self.release_abandoned()
            self._writes.end_writes()
            tasks: list[Callable[[], None]] = [self._shed]
            if not is_capturing():  # the graph would contain the operations that mark rows
                tasks.insert(0, partial(self._segments.notice_writes, self._segments.stores))
            self._cursors.num_batches += 1
            maintain(*tasks)

    def _shed(self) -> None:
        segments, cursors = self._segments, self._cursors
        while self._max_bytes is not None and self._is_too_large(self._max_bytes):
            hindmost = cursors.hindmost
            start = None if hindmost is None else cursors[hindmost].position
            if segments.synced and (start is None or min(segments.synced.values()) < start):
                segments.synced.clear()  # the next sync() of the replicas marks all rows
            elif hindmost is None:
                return
            else:
                self._writes.cut()
                cursors.give_up(hindmost, segments.position)
                self._lag.given_up(hindmost, segments.position)
            segments.compact()

    def _is_too_large(self, max_bytes: int) -> bool:
        """Return True if the log and the carried rows exceed ``max_bytes``.

        If they do, frees the stores' spare row sets and checks once more.
        """
        if self._segments.log_bytes + self._cursors.num_bytes <= max_bytes:
            return False
        self._segments.drop_spare()
        return self._segments.log_bytes + self._cursors.num_bytes > max_bytes
