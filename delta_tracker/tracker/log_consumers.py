"""Consumers of a change log: their reads, reservations and lag."""

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from delta_tracker.arguments import check_count
from delta_tracker.errors import InvalidArgumentError, NeedsSnapshotError, ReservedConsumerError, StaleDeltaError
from delta_tracker.rows import ChangedRows, merge_first
from delta_tracker.sharding.watcher import is_capturing
from delta_tracker.tracker.cursors import Consumer, Read, check_consumer_name
from delta_tracker.tracker.log_segments import LogSegments, maintain
from delta_tracker.tracker.log_writes import LogWrites
from delta_tracker.types import Delta


@dataclass(frozen=True, slots=True)
class ConsumerLag:
    """Lag of one consumer behind training, returned by :meth:`LogConsumers.lags`.

    Args:
        batches: number of ``step()`` calls since the consumer's last committed read.
        seconds: time since the consumer's last committed read, in seconds.
        oldest_pending: age of the consumer's oldest pending row in seconds; None if no row is known to be pending. The
            age of some rows is approximate, see :meth:`~delta_tracker.tracker.cursors.Cursors.pending_since`.
        pending: number of pending rows by table FQN; empty if they were not counted.
    """

    batches: int
    seconds: float
    oldest_pending: float | None
    pending: Mapping[str, int]


class LogConsumers:
    """Operations on the consumers of a :class:`ChangeLog`, such as adding and reserving consumers and reading rows.

    All methods may be called from any thread. They acquire the log's lock.

    Args:
        writes: the log's hook listener.
        segments: the log's segments. Their ``cursors`` contain the records of the consumers.
        max_bytes: maximum total size in bytes of the log and of pending rows outside the log. If it is exceeded, the
            consumer with the oldest cursor is dropped. None for no limit.
        received: function that is called with each committed delta while the lock is held. Not called for transient
            consumers, which a publisher adds while it copies a snapshot.

    Attributes:
        abandoned: names of reserved consumers whose owner was deleted without :meth:`release`. Finalizers append to it
            without the lock. The next operation ends these reservations. It removes the consumers that are transient,
            and discards the notes of the others.
    """

    def __init__(
        self,
        writes: LogWrites,
        segments: LogSegments,
        *,
        max_bytes: int | None,
        received: Callable[[Delta], None] | None,
    ) -> None:
        if max_bytes is not None:
            check_count("max_bytes", max_bytes)
        self.lock = writes.lock
        self.abandoned: deque[str] = deque()
        self._writes = writes
        self._segments = segments
        self._cursors = segments.cursors
        self._known = segments.cursors.consumers
        self._max_bytes = max_bytes
        self._received = received

    # Names

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the consumers, in the order in which they were added."""
        with self.lock:
            self._release_abandoned()
            return tuple(self._known)

    def find(self, consumer: str | None) -> Consumer:
        """Return the record of a consumer, even if the consumer is reserved.

        ``consumer`` is its name. None selects the only non-transient consumer. Raises InvalidArgumentError if the name
        is unknown, or if ``consumer`` is None and the number of non-transient consumers is not one.
        """
        with self.lock:
            if self.abandoned:
                self._release_abandoned()
            if isinstance(consumer, str) and consumer in self._known:
                return self._known[consumer]
            lasting = [each for each in self._known.values() if not each.is_transient]
            if consumer is None and len(lasting) == 1:
                return lasting[0]
            remedy = "Pass one of the known consumers: "
            if consumer is None:
                remedy = "Pass a name, because the tracker has several; known consumers: "
            raise InvalidArgumentError(
                "consumer", consumer, remedy + (", ".join(repr(each.name) for each in lasting) or "none")
            )

    def resolve(self, consumer: str | None) -> str:
        """Return the name of the consumer that :meth:`find` returns. Raise ReservedConsumerError if it is reserved."""
        found = self.find(consumer)
        if found.holder is not None:
            remedy = (
                "Pass another consumer, which you add with consumers=[...] or tracker.add_consumer(name): "
                "each reader and each Publisher(tracker, url, consumer) needs its own"
            )
            raise ReservedConsumerError(found.name, found.holder, remedy)
        return found.name

    def reserve(self, consumer: str | None, holder: str) -> str:
        """Reserve a consumer for the owner ``holder``, and return the consumer's name.

        Until :meth:`release` is called, :meth:`resolve` and this method raise ReservedConsumerError for the consumer.
        The error message contains ``holder``.
        """
        with self.lock:
            name = self.resolve(consumer)
            try:
                self._known[name] = self._known[name]._replace(holder=holder)
                return name  # noqa: TRY300  see below
            except BaseException:  # interrupted: the caller does not know that it has to release the consumer
                self.release(name)
                raise

    def release(self, consumer: str) -> None:
        """End the reservation of a consumer."""
        with self.lock:
            self._known[consumer] = self._known[consumer]._replace(holder=None)

    def _release_abandoned(self) -> None:
        while self.abandoned:
            known = self._known.get(self.abandoned[0])
            if known is None:
                pass  # memory ran out before it was added
            elif known.is_transient:
                del self._known[known.name]
            else:
                # Without the note, because another owner may read the rows.
                self._known[known.name] = known._replace(holder=None, reads=(), note=None)
            self._segments.is_compact = False
            self.abandoned.popleft()  # last: an interrupted call is repeated

    def annotate(self, consumer: str, note: object) -> None:
        """Set the note that checkpoints save for a consumer. Raise InvalidArgumentError if ``note`` is not JSON."""
        try:
            held = json.loads(json.dumps(note, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError("note", note, "Pass dicts, lists, strings and finite numbers") from error
        with self.lock:
            known = self._known[consumer]
            self._known[consumer] = known._replace(note=held, noted_at=known.position)

    # Cursors

    def num_pending(self, consumer: str | None) -> dict[str, int]:
        """Return the number of pending rows of the consumer that :meth:`find` returns, by FQN. Waits for the device."""
        with self.lock:
            found = self.find(consumer)
            self._segments.fence.enter()
            self._segments.notice_writes(self._segments.stores)
            return self._segments.num_changed(found)

    def lags(self, *, counts: bool) -> dict[str, ConsumerLag]:
        """Return the lag of each non-transient consumer, by name.

        All rows of a dropped consumer count as pending. For other consumers, pending rows are counted only if
        ``counts`` is True: counting waits for the device.
        """
        with self.lock:
            self._release_abandoned()
            now, segments, cursors = time.monotonic(), self._segments, self._cursors
            found: dict[str, ConsumerLag] = {}
            for each in self._known.values():
                if each.is_transient:
                    continue
                pending: Mapping[str, int] = {}
                if each.was_dropped:
                    pending = {fqn: store.num_rows for fqn, store in segments.stores.items()}
                elif counts:
                    # No notice_writes() here: a hook in another thread may not have acknowledged its write yet.
                    segments.fence.enter()
                    pending = segments.num_changed(each)
                since = cursors.pending_since(each)
                age = None if since is None else now - since
                found[each.name] = ConsumerLag(cursors.num_batches - each.batch, now - each.moved_at, age, pending)
            return found

    def add(self, consumer: str, *, holder: str | None = None) -> None:
        """Add a consumer at the end of the log. Raise InvalidArgumentError if the name exists or is not a string.

        If ``holder`` is given, the consumer is transient: it is reserved for this owner and not saved in checkpoints.
        """
        check_consumer_name(consumer)
        with self.lock:
            if consumer in self.names:
                raise InvalidArgumentError("consumer", consumer, f"Pass a name not in {list(self.names)}")
            self._writes.cut()
            position, batch = self._segments.position, self._cursors.num_batches
            is_transient = holder is not None
            self._known[consumer] = Consumer(
                consumer, position, batch, time.monotonic(), holder=holder, is_transient=is_transient
            )

    def remove(self, consumer: str) -> None:
        """Remove a consumer if it exists. Drops rows that are no longer needed if ``delete_on_read`` is True."""
        with self.lock:
            self._known.pop(consumer, None)
            maintain(self._segments.compact)

    def clear(self, *consumers: str) -> None:
        """Discard the pending rows of ``consumers``. Those that were dropped no longer need a snapshot.

        If the call is interrupted, all rows may become pending.
        """
        with self.lock:
            self._writes.cut()
            cursors, position = self._cursors, self._segments.position
            moved = {name: self._known[name].moved(position, cursors.num_batches) for name in consumers}
            try:
                self._known.update(moved)
                maintain(self._segments.compact)
            except BaseException:  # interrupted: the caller does not know that nothing is pending
                self._segments.mark_all_later()
                raise

    def rewind(self, consumer: str) -> None:
        """Move a consumer's cursor to the start of the log. All rows that ever changed become pending again.

        Aborts the consumer's uncommitted read. Raises InvalidArgumentError if ``delete_on_read`` is True.
        """
        with self.lock:
            if self._segments.delete_on_read:
                raise InvalidArgumentError("delete_on_read", True, "Build the tracker with delete_on_read=False")
            self._known[consumer] = self._known[consumer].moved(0, 0, self._cursors.origin)

    def make_pending(self, consumer: str, fqn: str, ids: Tensor, *, knows_owners: bool = True) -> None:
        """Make rows of the table ``fqn`` pending for one consumer. Aborts the consumer's uncommitted read.

        The rows' old states become unknown. ``ids`` is ``[N]`` int64 local ids in any order, duplicates allowed. Pass
        ``knows_owners=False`` if the raw ids in the consumer's copy may differ from those of its last committed read.
        """
        if not len(ids):
            return
        with self.lock:
            segments, cursors = self._segments, self._cursors
            segments.fence.enter()
            rows = unknown = segments.with_former({fqn: segments.stores[fqn].unknown(ids)})[fqn]
            known = self._known[consumer]
            if fqn in segments.owners and knows_owners:
                rows = replace(rows, former=segments.former(fqn, rows.ids, known))
            since = time.monotonic() if known.carried_since is None else known.carried_since
            carried = known._replace(carried=_over(rows, fqn, known.carried), carried_since=since, reads=())
            if not segments.delete_on_read:
                # The owners of this consumer are not those of a consumer that is rewound.
                cursors.origin = _over(unknown, fqn, cursors.origin)
            self._known[consumer] = carried

    # Reads

    def read(self, consumer: str, *, with_states: bool = True) -> Read:
        """Cut the log and begin a read of the pending rows of ``consumer``. Does not move the cursor.

        Pass ``with_states=True`` if the delta may leave out rows. Otherwise, the old states of these rows are lost.
        Raises NeedsSnapshotError if the consumer was dropped.
        """
        with self.lock:
            if self.abandoned:
                self._release_abandoned()
            segments, cursors = self._segments, self._cursors
            known = self._known[consumer]
            if known.was_dropped:
                raise NeedsSnapshotError(consumer, self._max_bytes)
            batches = known.batch, cursors.num_batches
            read = Read(consumer, known.position, segments.position + 1, batches)
            begun = known._replace(reads=(*known.reads, read))
            try:
                self._known[consumer] = begun
                self._writes.cut()
                if segments.owners:
                    segments.check_owners()
                read.rows = segments.changed_since(known.position, known.carried, read.stop, with_states=with_states)
                for fqn, rows in known.carried.items():
                    if read.rows[fqn].ids is rows.ids:  # nothing newer: the tensors belong to the log
                        read.rows[fqn] = read.rows[fqn].copy()
                if cursors.pending_since(known) is None and any(map(len, read.rows.values())):
                    self._known[consumer] = begun._replace(carried_since=time.monotonic())
            except BaseException:
                self.abort(read)
                raise
            return read

    def uncommitted(self, delta: Delta) -> Read:
        """Return the uncommitted read that returned ``delta``. Raise StaleDeltaError if there is none."""
        for read in self.find(delta.consumer).reads:
            if read.delta is delta:
                return read
        raise StaleDeltaError(delta.consumer)

    def hold(self, read: Read) -> None:
        """Keep a read uncommitted until :meth:`commit` or :meth:`abort`. Discards the consumer's earlier reads."""
        with self.lock:
            known = self._current(read)
            if len(known.reads) > 1 or self._max_bytes is not None:  # else, commit() or abort() will compact the log
                maintain(*self._due(compacts=len(known.reads) > 1))
                known = self._known[known.name]
            read.rows = {}
            if read in known.reads:  # last, so that a call that fails leaves the earlier read
                self._known[known.name] = known._replace(reads=(read,))

    def commit(self, read: Read) -> None:
        """Move the consumer's cursor to the end of a read. Rows that top-k left out of the delta stay pending.

        If the call is interrupted, the rows of the read may stay pending, and their old states may become unknown.
        """
        with self.lock:
            self._segments.fence.enter()
            known, delta = self._current(read), read.delta
            tasks = []
            if self._received is not None and delta is not None and not known.is_transient:
                tasks.append(partial(self._received, delta))
            moved = known.moved(read.stop, read.batches[1])
            if delta is not None and delta.held_back:
                carried = {fqn: rows.aged() for fqn, rows in delta.held_back.items()}
                moved = moved._replace(carried=carried, carried_since=self._cursors.pending_since(known))
            self._segments.is_compact = False
            due = self._due(*tasks)
            try:
                self._known[known.name] = moved  # last, so that a call that fails leaves the earlier reads
                maintain(*due)
            except (MemoryError, RuntimeError):  # before maintain(), which handles its own: no segment was dropped
                self._known[known.name] = known
                self.abort(read)
                raise
            except BaseException:
                self.abort(read)
                raise

    def abort(self, read: Read) -> None:
        """Discard a read, so that its rows are pending again. An earlier uncommitted read of the consumer stays valid.

        If the read was committed, the old states of its rows become unknown. Does nothing if the read was discarded.
        """
        with self.lock:
            known = self._known.get(read.consumer)
            if known is None:
                return
            if read in known.reads:
                reads = tuple(each for each in known.reads if each is not read)
                self._known[known.name] = known._replace(reads=reads)
                maintain(self._segments.compact)
            elif known.position == read.stop:  # committed
                for fqn, rows in (read.rows if read.delta is None else read.delta).items():
                    self.make_pending(read.consumer, fqn, rows.ids, knows_owners=False)

    def _current(self, read: Read) -> Consumer:
        """Check that ``read`` was not discarded, and return its consumer."""
        known = self._known.get(read.consumer)
        if known is None or read not in known.reads:
            raise StaleDeltaError(self.find(read.consumer).name)
        return known

    # Memory

    def step(self) -> None:
        """Count a batch, mark rows that were written without a hook's report, and enforce ``max_bytes``."""
        with self.lock:
            self._release_abandoned()
            self._writes.end_writes()
            is_captured = is_capturing()  # the graph would contain the operations that mark rows
            tasks = [] if is_captured else [partial(self._segments.notice_writes, self._segments.stores)]
            self._cursors.num_batches += 1
            maintain(*tasks, self._drop_lagging)

    def _due(self, *tasks: Callable[[], None], compacts: bool = True) -> Sequence[Callable[[], None]]:
        """Return ``tasks`` followed by the maintenance tasks that are due: compaction, and enforcing ``max_bytes``."""
        # Compact at every sixteenth position also with auto_compact, because an idle model runs no output distribution.
        if compacts and (not self._writes.compacts_after_odist or self._segments.position % 16 == 0):
            tasks += (self._segments.compact,)
        return tasks if self._max_bytes is None else (*tasks, self._drop_lagging)

    def _drop_lagging(self) -> None:
        segments, cursors = self._segments, self._cursors
        while self._max_bytes is not None and self._is_too_large(self._max_bytes):
            oldest = min(cursors.pinned, default=None)
            if segments.synced and (oldest is None or min(segments.synced.values()) < oldest):
                segments.synced.clear()  # the next sync() of the replicas marks all rows
            elif oldest is None:
                return
            else:
                readers = [each for each in self._known.values() if not each.was_dropped]
                hindmost = min(readers, key=lambda each: each.position)
                self._writes.cut()
                self._known[hindmost.name] = hindmost.dropped(segments.position, cursors.pending_since(hindmost))
            segments.compact()

    def _is_too_large(self, max_bytes: int) -> bool:
        """Return True if the log and carried rows exceed ``max_bytes`` even after spare row sets have been freed."""
        for _ in range(2):
            memory = self._segments.memory()
            if memory.log_bytes + memory.carried_bytes <= max_bytes:
                return False
            self._segments.drop_spare()
        return True


def _over(rows: ChangedRows, fqn: str, tables: Mapping[str, ChangedRows]) -> dict[str, ChangedRows]:
    """Return a copy of ``tables`` with ``rows`` added to the table ``fqn``. They replace rows that have equal ids."""
    return {**tables, fqn: merge_first(rows, tables[fqn]) if fqn in tables else rows}
