"""The change log of one rank: a row store per table, cut at the same positions, and the consumers that read it.

It is in memory. The log of a stream, which is in an object store, is in ``stream/log.py``.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from delta_tracker.errors import InvalidArgumentError, NeedsSnapshotError
from delta_tracker.rows import ChangedRows, merge_first
from delta_tracker.sharding.kernel_memory import one_cut
from delta_tracker.tracker.consumer_lag import Lag, LagClock
from delta_tracker.tracker.consumer_positions import ConsumerPositions
from delta_tracker.tracker.log_state import LogState, PendingState
from delta_tracker.tracker.profiling import profiler_range
from delta_tracker.tracker.store.segments import SegmentStore
from delta_tracker.types import Delta, Memory

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """What a consumer's read covers, before anything is left out.

    Args:
        consumer: who reads.
        start: log position of the cursor.
        stop: log position of the cut.
        batches: half-open range of ``step()`` counts.
        rows: table FQN to changed rows, carried ones included.
        shared: the tables whose rows are tensors of the log. Copy them before they leave the tracker.
    """

    consumer: str
    start: int
    stop: int
    batches: tuple[int, int]
    rows: Mapping[str, ChangedRows]
    shared: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Standing:
    """How far behind a consumer is.

    Args:
        lag: since its last committed read.
        pending: table FQN to pending rows; empty where they were not counted.
    """

    lag: Lag
    pending: Mapping[str, int]


class ChangeLog:
    """Serialise what the hooks record and what the consumers read.

    Every method and property takes :attr:`lock` itself, so that all of them may be called from any thread, except
    :meth:`ended`, which needs none. The lock is reentrant: hold it around calls that have to see one state.

    Args:
        stores: table FQN to its store.
        consumers: names of the readers.
        delete_on_read: forget what every consumer has committed.
        auto_compact: do so, and merge, at :meth:`output_launched`; otherwise after every read.
        max_bytes: how much the log may hold; above it the consumer that stands furthest back is given up.
        received: called with each committed read, except those that a publisher makes for the time of a snapshot; the
            lock is held.
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
    ) -> None:
        if max_bytes is not None and (type(max_bytes) is not int or max_bytes < 1):
            raise InvalidArgumentError("max_bytes", max_bytes, "Pass a whole number of 1 or more, or None")
        self.lock = threading.RLock()
        self._stores = dict(stores)
        self._consumers = ConsumerPositions(consumers)
        self._delete_on_read = delete_on_read
        self._auto_compact = auto_compact
        self._is_compact = True  # nothing was read since the log was compacted
        self._is_reading = False  # between a read and its seal no cursor keeps the cut
        self._max_bytes = max_bytes
        self._received = received
        self._position = 0
        self._num_batches = 0
        self._num_compacted = 0
        self._open: dict[int, tuple[str, ...]] = {}  # key to tables
        self._ended: deque[int] = deque()
        self._num_recorded = dict.fromkeys(self._stores, 0)
        self._lag = LagClock()
        for name in self._consumers.names:
            self._lag.placed(name, 0)

    @property
    def stores(self) -> Mapping[str, SegmentStore]:
        """Table FQN to store, as they are now."""
        with self.lock:
            return dict(self._stores)

    @property
    def consumers(self) -> tuple[str, ...]:
        """Names of the consumers."""
        with self.lock:
            return self._consumers.names

    @property
    def num_batches(self) -> int:
        """How often :meth:`step` was called."""
        with self.lock:
            return self._num_batches

    @property
    def num_compacted(self) -> int:
        """:attr:`num_batches` at the last :meth:`compact`; 0 before the first."""
        with self.lock:
            return self._num_compacted

    @property
    def batches(self) -> dict[str, int]:
        """Consumer to :attr:`num_batches` at its last committed read."""
        with self.lock:
            return {name: self._consumers.start(name)[1] for name in self._consumers.names}

    @property
    def log_bytes(self) -> int:
        """Bytes of the segments and open batches of all stores."""
        with self.lock:
            return sum(store.log_bytes for store in self._stores.values())

    @property
    def carried_bytes(self) -> int:
        """Bytes of the rows that the consumers' reads left out."""
        with self.lock:
            return self._consumers.num_bytes

    def memory(self) -> Memory:
        """Return the bytes that the log holds, and the stores' copies of their shards."""
        with self.lock:
            copies = sum(store.copy_bytes for store in self._stores.values())
            return Memory(self.log_bytes, copies, self.carried_bytes)

    @property
    def num_recorded(self) -> Mapping[str, int]:
        """Table FQN to how many rows were recorded as changed up to now, repeats included. Waits for no device."""
        with self.lock:
            return dict(self._num_recorded)

    def num_pending(self, consumer: str | None) -> dict[str, int]:
        """Table FQN to how many rows are pending for a consumer. Waits for the device."""
        with self.lock:
            name = self._consumers.resolve(consumer)
            self.notice_writes(self._stores)
            return self._num_pending(name)

    def _num_pending(self, name: str) -> dict[str, int]:
        with self.lock:
            start, _ = self._consumers.start(name)
            carried = self._consumers.carried(name)
            return {
                fqn: store.num_changed(start, carried[fqn].ids if fqn in carried else None)
                for fqn, store in self._stores.items()
            }

    def standings(self, *, counts: bool) -> dict[str, Standing]:
        """Return how far behind each consumer is, without those that a publisher adds for the time of a snapshot.

        Args:
            counts: count the pending rows, which waits for the device. Without it they are known only of a consumer
                whose changes were given up: all rows.
        """
        with self.lock:
            found: dict[str, Standing] = {}
            for name in self._consumers.names:
                if self._consumers.is_transient(name):
                    continue
                pending: Mapping[str, int] = {}
                if self._consumers.is_behind(name):
                    pending = {fqn: store.num_rows for fqn, store in self._stores.items()}
                elif counts:
                    # Without notice_writes(): another thread's hook may be between a write and its acknowledgement.
                    pending = self._num_pending(name)
                lag = self._lag.lag(name, self._num_batches - self._consumers.start(name)[1])
                found[name] = Standing(lag, pending)
            return found

    def resolve(self, consumer: str | None) -> str:
        """Return the name of a consumer that nobody has reserved; None means the only one.

        Raises:
            UnknownConsumerError: if there is no such consumer, or several and none was named.
            ReservedConsumerError: if it is reserved.
        """
        with self.lock:
            name = self._consumers.resolve(consumer)
            self._consumers.check_free(name)
            return name

    def reserve(self, consumer: str | None, holder: str) -> str:
        """Reserve a consumer for ``holder``, which errors name. Until :meth:`release`, :meth:`resolve` refuses it.

        Raises: as :meth:`resolve`.
        """
        with self.lock:
            name = self.resolve(consumer)
            self._consumers.reserve(name, holder)
            return name

    def release(self, consumer: str) -> None:
        """End a reservation."""
        with self.lock:
            self._consumers.reserve(consumer, None)

    def position(self, consumer: str) -> int:
        """Where a consumer's cursor stands; every committed read moves it."""
        with self.lock:
            return self._consumers.start(consumer)[0]

    def is_behind(self, consumer: str | None) -> bool:
        """Whether the changes of a consumer were given up."""
        with self.lock:
            return self._consumers.is_behind(self._consumers.resolve(consumer))

    def looked_up(self, ids: Mapping[str, Tensor | None]) -> None:
        """Rows of tables were looked up, and that counts."""
        with self.lock, one_cut(), profiler_range("delta_tracker: record"):
            self._notice_before_capture(ids)
            for fqn, table_ids in ids.items():
                self._count(fqn, table_ids)
                self._stores[fqn].mark(table_ids)

    def opened(self, key: int, ids: Mapping[str, Tensor | None]) -> None:
        """Rows of tables are about to be written, under a key that no open batch has."""
        with self.lock, one_cut(), profiler_range("delta_tracker: record"):
            self._close_ended()
            self._notice_before_capture(ids)
            self._open[key] = tuple(ids)
            for fqn, table_ids in ids.items():
                self._count(fqn, table_ids)
                self._stores[fqn].open_batch(key, table_ids)

    def applied(self, key: int, tables: Iterable[str]) -> None:
        """The rows opened under ``key`` are written."""
        with self.lock:
            self._open.pop(key, None)
            for fqn in tables:
                self._stores[fqn].close_batch(key)

    def ended(self, key: int) -> None:
        """Nothing writes the rows opened under ``key`` any more, whether they were written or not.

        Takes no lock: it may be called by a destructor in any thread. Every cut before this call has marked the rows
        again, so that the first read after it includes them.
        """
        self._ended.append(key)

    def mark(self, fqn: str, ids: Tensor | None, *, states: Tensor | None = None, is_written: bool = False) -> None:
        """As :meth:`~delta_tracker.tracker.store.segments.SegmentStore.mark`."""
        with self.lock, profiler_range("delta_tracker: record"):
            if states is None and not is_written:
                self._notice_before_capture([fqn])
            self._count(fqn, ids)
            self._stores[fqn].mark(ids, states=states, is_written=is_written)

    def notice_writes(self, fqns: Iterable[str]) -> None:
        """Make all rows of those tables changed whose weights were written to in place, by nothing that reported it."""
        with self.lock:
            for fqn in fqns:
                if self._stores[fqn].notice_writes():
                    self._count(fqn, None)

    def acknowledge_writes(self, fqns: Iterable[str]) -> None:
        """Ignore the in-place writes so far to the weights of some tables: their rows were reported."""
        with self.lock:
            for fqn in fqns:
                self._stores[fqn].acknowledge_writes()

    def replace(self, stores: Mapping[str, SegmentStore]) -> None:
        """Take new stores for some tables; all their rows count as changed, old values unknown. Aborts open reads."""
        with self.lock:
            if stores:
                self._consumers.forget_tables(stores)
            for fqn, store in stores.items():
                self._stores[fqn] = store
                self._count(fqn, None)
                store.cut(self._position)
                store.mark(None, is_written=True)

    def state(self) -> LogState:
        """What every consumer has not received, sealed and open rows included. Waits for the device; moves nothing."""
        with self.lock, one_cut():
            self.notice_writes(self._stores)
            for store in self._stores.values():
                store.catch_up()
            consumers = {}
            for name in self._consumers.names:
                if self._consumers.is_transient(name):
                    continue
                start, batch = self._consumers.start(name)
                is_behind = self._consumers.is_behind(name)
                rows = {} if is_behind else self._changed_since(start, self._consumers.carried(name))
                consumers[name] = PendingState(batch, rows, is_behind)
            history = None if self._delete_on_read else self._changed_since(0, self._consumers.origin)
            return LogState(self._num_batches, consumers, history)

    def restore(self, state: LogState) -> None:
        """Take a state over: nothing else is pending afterwards, except rows that are open now. Aborts open reads.

        Args:
            state: of exactly this log's consumers; a ``history`` of None makes all rows changed for whoever rewinds.
        """
        with self.lock, one_cut():
            assert set(state.consumers) == set(self._consumers.names), "checked by the caller"
            self._num_batches = state.num_batches
            for store in self._stores.values():
                store.forget()
            self._cut()
            origin = state.history
            if origin is None:
                origin = {} if self._delete_on_read else {fqn: store.unknown() for fqn, store in self._stores.items()}
            self._consumers.restore(self._position, state.consumers, origin)
            for name, pending in state.consumers.items():
                self._lag.placed(name, self._position, has_rows=pending.has_rows)

    def mark_everything(self) -> None:
        """Make all rows changed for every consumer, old values unknown, whatever was pending. Aborts open reads."""
        with self.lock:
            nothing = {name: PendingState(self._num_batches, {}) for name in self._consumers.names}
            self.restore(LogState(self._num_batches, nothing, {}))
            for fqn in self._stores:
                self.mark(fqn, None, is_written=True)

    def distrust(self, consumer: str, fqn: str, ids: Tensor) -> None:
        """Make rows pending for one consumer, old values unknown, whatever was pending of them. Aborts its open read.

        Args:
            consumer: whose copy of the rows is not what it last received.
            fqn: the table.
            ids: ``[N]`` int64 local ids, in any order, duplicates allowed.
        """
        with self.lock:
            if len(ids):
                rows = self._stores[fqn].unknown(ids)
                self._consumers.carry(consumer, fqn, rows, in_origin=not self._delete_on_read)
                self._lag.distrusted(consumer)

    def step(self) -> None:
        """Count a batch, and keep the memory within its bound."""
        with self.lock:
            self._close_ended()
            self.notice_writes(self._stores)
            self._num_batches += 1
            self._tidy(self._shed)

    def output_launched(self) -> None:
        """Compact after an output distribution was launched, with ``auto_compact``. Neither blocks nor waits.

        Does nothing if nothing was read since the last time, or while another thread holds the lock.
        """
        if self._auto_compact and not self._is_compact and self.lock.acquire(blocking=False):
            try:
                if self._compacts_after_odist and not self._is_reading:
                    self._tidy(self.compact)
            finally:
                self.lock.release()

    @property
    def _compacts_after_odist(self) -> bool:
        """Whether :meth:`output_launched` compacts. Where that waits for the device, reads do, which wait anyway."""
        return self._auto_compact and not any(store.compact_waits for store in self._stores.values())

    def read(self, consumer: str, *, with_states: bool = True) -> Reading:
        """Cut the log and collect what ``consumer`` has not received. Nothing moves before :meth:`seal`.

        Call :meth:`seal` or :meth:`discard` afterwards.

        Args:
            consumer: who reads.
            with_states: collect the old states too, in a mode that keeps them. Rows that a read without them leaves
                out would lose them.

        Raises:
            NeedsSnapshotError: if its changes were given up.
        """
        with self.lock:
            if self._consumers.is_behind(consumer):
                raise NeedsSnapshotError(consumer, self._max_bytes)
            start, first_batch = self._consumers.start(consumer)
            self._is_reading = True
            try:
                self._cut()
                carried = self._consumers.carried(consumer)
                rows = self._changed_since(start, carried, self._position, with_states=with_states)
            except BaseException:
                self.discard()
                raise
            self._lag.found(consumer, sum(map(len, rows.values())))
            shared = frozenset(fqn for fqn in carried if rows[fqn].ids is carried[fqn].ids)
            return Reading(consumer, start, self._position, (first_batch, self._num_batches), rows, shared)

    def discard(self) -> None:
        """Remove the cut of a :meth:`read` that failed; the consumer's earlier uncommitted read stays valid."""
        with self.lock:
            self._is_reading = False
            self._tidy(self.compact)

    def seal(self, delta: Delta, *, commit: bool) -> None:
        """Make ``delta`` its consumer's uncommitted read, or commit it at once."""
        with self.lock:
            self._is_reading = False
            replaces = self._consumers.seal(delta)
            if commit:
                self._commit(delta)
            if commit or replaces:
                self._after_read()
            else:  # its commit or abort compacts the log
                self._tidy(self._shed)

    def commit(self, delta: Delta) -> None:
        """As :meth:`~delta_tracker.tracker.consumer_positions.ConsumerPositions.commit`."""
        with self.lock:
            self._commit(delta)
            self._after_read()

    def abort(self, delta: Delta) -> None:
        """As :meth:`~delta_tracker.tracker.consumer_positions.ConsumerPositions.abort`."""
        with self.lock:
            self._consumers.abort(delta)
            self._after_read()

    def add(self, consumer: str, *, holder: str | None = None) -> None:
        """Add a consumer at the end of the log.

        Args:
            consumer: its name.
            holder: reserve it, and save it in no checkpoint; None for one like those of the constructor.

        Raises:
            InvalidArgumentError: if it exists.
        """
        with self.lock:
            if consumer in self._consumers.names:
                raise InvalidArgumentError("consumer", consumer, f"Pass a name beside {list(self._consumers.names)}")
            self._place_at_end(consumer)
            if holder is not None:
                self._consumers.reserve(consumer, holder, is_transient=True)

    def remove(self, consumer: str) -> None:
        """Remove a consumer, and what only it needed.

        Raises:
            UnknownConsumerError: if there is no such consumer.
        """
        with self.lock:
            name = self._consumers.resolve(consumer)
            self._consumers.remove(name)
            self._lag.removed(name)
            self.compact()

    def clear(self, consumer: str) -> None:
        """Forget all that is pending for a consumer, whose copy is now taken to be as the shard is."""
        with self.lock:
            self._place_at_end(consumer)
            self.compact()

    def rewind(self, consumer: str) -> None:
        """Put a consumer back to the start of the log.

        Raises:
            InvalidArgumentError: if the log forgets what was read.
        """
        with self.lock:
            if self._delete_on_read:
                raise InvalidArgumentError("delete_on_read", True, "Build the tracker with delete_on_read=False")
            self._consumers.rewind(consumer)
            self._lag.placed(consumer, 0, has_rows=any(map(len, self._consumers.origin.values())))

    def compact(self) -> None:
        """Drop what every consumer has committed and merge what no cursor tells apart."""
        with self.lock, profiler_range("delta_tracker: compact"):
            self._num_compacted = self._num_batches
            oldest = self._consumers.oldest
            for store in self._stores.values():
                if self._delete_on_read:
                    store.delete(oldest)  # first: what is dropped need not be merged
            crowded = [store for store in self._stores.values() if store.num_segments > 1]
            pinned = self._consumers.pinned if crowded else set()
            for store in crowded:
                store.compact(pinned)
            self._lag.compact(pinned, forgets=self._delete_on_read)
            self._is_compact = True

    def _changed_since(
        self, start: int, carried: Mapping[str, ChangedRows], stop: int | None = None, *, with_states: bool = True
    ) -> dict[str, ChangedRows]:
        """Return by table FQN the carried rows and those marked from ``start`` up to ``stop`` or, for None, to now."""
        end = self._position + 1 if stop is None else stop
        rows = {fqn: store.changed(start, end, with_states=with_states) for fqn, store in self._stores.items()}
        for fqn, older in carried.items():
            rows[fqn] = merge_first(older if with_states else older.without_states(), rows[fqn])
        return rows

    def _count(self, fqn: str, ids: Tensor | None) -> None:
        num_rows = self._stores[fqn].num_rows if ids is None else ids.numel()
        self._num_recorded[fqn] = self._num_recorded.get(fqn, 0) + num_rows
        if num_rows:
            self._lag.recorded(self._position)

    def _commit(self, delta: Delta) -> None:
        self._consumers.commit(delta)
        self._lag.committed(delta.consumer, delta.stop, leaves_out=bool(delta.kept))
        if self._received is not None and not self._consumers.is_transient(delta.consumer):
            self._received(delta)

    def _after_read(self) -> None:
        self._is_compact = False
        # Every sixteenth read also under auto_compact: the model may be idle.
        compacts = not self._compacts_after_odist or self._position % 16 == 0
        self._tidy(*([self.compact] if compacts else []), self._shed)

    def _tidy(self, *tasks: Callable[[], None]) -> None:
        """Run tasks of upkeep. If memory runs out, log it and leave the rest to the next call.

        The log is complete either way, and the read or commit before has succeeded.
        """
        try:
            for task in tasks:
                task()
        except (MemoryError, RuntimeError):  # torch raises the latter, also where a device is out of memory
            _logger.exception("the log of changed rows was not compacted; the next read tries again")

    def _close_ended(self) -> None:
        """Close the batches of backward passes that have ended without closing them: those that raised."""
        while self._ended:
            key = self._ended.popleft()
            for fqn in self._open.pop(key, ()):
                self._stores[fqn].close_batch(key)

    def _notice_before_capture(self, fqns: Iterable[str]) -> None:
        """As :meth:`notice_writes`, for the tables of which old states are captured next."""
        self.notice_writes([fqn for fqn in fqns if self._stores[fqn].keeps_states])

    def _cut(self) -> None:
        self._close_ended()
        self.notice_writes(self._stores)
        self._position += 1
        self._is_compact = False
        with one_cut():
            for store in self._stores.values():
                store.cut(self._position)
                if store.has_open:  # these rows were marked again
                    self._lag.recorded(self._position)

    def _place_at_end(self, consumer: str) -> None:
        self._cut()
        self._consumers.place(consumer, self._position, self._num_batches)
        self._lag.placed(consumer, self._position)

    def _shed(self) -> None:
        while self._is_too_large():
            hindmost = self._consumers.hindmost
            if hindmost is None:
                return
            self._cut()
            self._consumers.give_up(hindmost, self._position)
            self._lag.given_up(hindmost, self._position)
            self.compact()

    def _is_too_large(self) -> bool:
        """Whether the log holds more than it may, also without what it only keeps to use again."""
        if self._max_bytes is None or self.log_bytes + self.carried_bytes <= self._max_bytes:
            return False
        for store in self._stores.values():
            store.drop_spare()
        return self.log_bytes + self.carried_bytes > self._max_bytes
