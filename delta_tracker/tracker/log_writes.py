"""Hook listener of a change log. It marks changed rows and keeps track of the writes in progress."""

import threading
from collections import deque
from collections.abc import Collection, Iterable, Mapping

from torch import Tensor

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.rows import first_per_id
from delta_tracker.sharding.discover import Discovery
from delta_tracker.sharding.kernel_hooks import KeyedIds
from delta_tracker.sharding.watcher import UNSEEN
from delta_tracker.tracker.log_segments import LogSegments, maintain, profiler_range
from delta_tracker.tracker.store.several_stores import mark_in_each


class LogWrites:
    """Hook listener of a :class:`ChangeLog`. It marks the rows that hooks report as changed.

    Implements :class:`~delta_tracker.sharding.watcher.HookListener`. Each cut, which starts a new segment, marks the
    rows of the writes in progress again. All methods may be called from any thread. All methods except
    :meth:`end_write_later` and :meth:`mark_all_later` acquire the log's lock.

    Args:
        lock: the log's lock.
        segments: the log's segments.
        auto_compact: True to compact the log in :meth:`output_launched`, False to compact it after every read.
    """

    def __init__(self, lock: threading.RLock, segments: LogSegments, *, auto_compact: bool) -> None:
        self.lock = lock
        self._segments = segments
        self._auto_compact = auto_compact
        self._keys: set[int] = set()  # of the writes in progress
        self._ended: deque[int] = deque()

    # Updates

    def begin_write(self, key: int, ids: Mapping[str, Tensor | None]) -> None:
        """Record the start of the write ``key``, and mark its rows. ``ids`` maps FQNs to local ids, or None for all."""
        segments = self._segments
        with self.lock, segments.in_place(), profiler_range("delta_tracker: record"):
            if self._ended:
                self.end_writes()
            self._keys.add(key)
            segments.record(ids, key)
            mark_in_each(segments.stores, ids, key)

    def end_write(self, key: int, tables: Iterable[str]) -> None:
        """End the write ``key``. ``tables`` must be the FQNs of all tables that :meth:`begin_write` received."""
        with self.lock:
            if not self._segments.fence.leave(key):
                self._segments.fence.enter()  # begin_write() failed: order the next use after the write
            self._end(key, tables)

    def end_write_later(self, key: int) -> None:
        """Request that the next cut, write or ``step()`` ends the write ``key``. Does not acquire the lock."""
        self._ended.append(key)

    def order_lookup(self) -> None:
        """Make the current CUDA stream wait for earlier uses of the rows, and later uses wait for this stream."""
        with self.lock:
            self._segments.fence.enter()

    def looked_up(self, ids: Mapping[str, Tensor | None]) -> None:
        """Mark looked-up rows as changed. ``ids`` maps table FQNs to local ids, or to None for all rows."""
        segments = self._segments
        with self.lock, segments.in_place(), profiler_range("delta_tracker: record"):
            segments.record(ids)
            mark_in_each(segments.stores, ids)

    def mark(self, fqn: str, ids: Tensor | None, *, states: Tensor | None = None, is_written: bool = False) -> None:
        """Mark rows of the table ``fqn``. See :meth:`~delta_tracker.tracker.store.segments.SegmentStore.mark`."""
        segments = self._segments
        with self.lock, segments.in_place(), profiler_range("delta_tracker: record"):
            segments.record({fqn: ids}, captures=states is None and not is_written)
            segments.stores[fqn].mark(ids, states=states, is_written=is_written)

    def notice_writes(self, fqns: Iterable[str]) -> None:
        """Mark all rows of each table in ``fqns`` that may have been written without a report by a hook."""
        with self.lock:
            self._segments.notice_writes(fqns)

    def acknowledge_writes(self, fqns: Iterable[str]) -> None:
        """Treat all in-place writes to the tables ``fqns`` as reported. Call it after a hook has marked the rows."""
        with self.lock:
            for fqn in fqns:
                self._segments.stores[fqn].acknowledge_writes()

    def mark_all_later(self, fqns: Collection[str], key: int | None = None) -> None:
        """Request that the next cut marks all rows of the tables ``fqns``. The old states of the rows become unknown.

        If ``key`` is given, each cut marks the rows until the write ``key`` ends. The first cut after the end also
        marks them. If a cut fails to mark the rows, the read that made the cut fails, and the next cut marks them.
        """
        for fqn in fqns:
            if fqn in self._segments.stores:  # it may have left the model
                self._segments.stores[fqn].mark_all_later(key)
        if key is not None and key != UNSEEN:
            self._keys.add(key)

    def output_launched(self) -> None:
        """Compact the log if :attr:`compacts_after_odist` is True. Hooks call this after an output distribution starts.

        Does not block. Does nothing if another thread holds the lock, or if nothing can be merged or dropped.
        """
        if self.compacts_after_odist and not self._segments.is_compact and self.lock.acquire(blocking=False):
            try:
                maintain(self._segments.compact)
            finally:
                self.lock.release()

    @property
    def compacts_after_odist(self) -> bool:
        """True if :meth:`output_launched` compacts the log, False if reads compact it.

        This is ``auto_compact``, or False if compaction waits for the device.
        """
        return self._auto_compact and not self._segments.compact_waits

    # Replicas

    def changed_since_sync(self, fqns: Iterable[str]) -> dict[str, Tensor | None]:
        """Return the local ids of the rows marked since the last :meth:`synced`, by table FQN. Waits for the device.

        The value is None for a table whose changes are unknown: :meth:`synced` was not called since its store was
        created, since the last :meth:`diverged`, since a restore, or since ``max_bytes`` was exceeded.
        """
        segments, tables = self._segments, tuple(fqns)
        with self.lock:
            self._catch_up(tables)
            return {
                fqn: segments.stores[fqn].changed(segments.synced[fqn], segments.position + 1, with_states=False).ids
                if fqn in segments.synced
                else None
                for fqn in tables
            }

    def synced(self, fqns: Iterable[str]) -> None:
        """Record that the replicas of the tables ``fqns`` are equal, and compact the log.

        For :meth:`changed_since_sync`, the log keeps rows that are marked after this call, even if all consumers commit
        them. The next call allows the log to drop them.
        """
        segments, tables = self._segments, tuple(fqns)
        with self.lock:
            self._catch_up(tables)
            segments.cut(tables)
            segments.synced.update(dict.fromkeys(tables, segments.position))
            maintain(segments.compact)

    def diverged(self, fqns: Iterable[str]) -> None:
        """Record that all rows of the tables ``fqns`` may differ between replicas, until the next :meth:`synced`."""
        with self.lock:
            for fqn in fqns:
                self._segments.synced.pop(fqn, None)

    # The log

    def num_writes(self) -> int:
        """Return the number of writes in progress."""
        with self.lock:
            self.end_writes()
            return len(self._keys)

    def cut(self) -> None:
        """Start a new segment in each store, and mark the rows of the writes in progress again in this segment."""
        with self.lock:
            self._catch_up(self._segments.stores)
            self._segments.cut()

    def end_writes(self) -> None:
        """End the writes that :meth:`end_write_later` queued."""
        with self.lock:
            while self._ended:
                key = self._ended[0]
                self._segments.fence.leave(key)
                self._end(key, self._segments.stores if key in self._keys else ())
                self._ended.popleft()  # last: an interrupted call is repeated

    def _catch_up(self, fqns: Iterable[str]) -> None:
        """Enter the fence, end the writes that :meth:`end_write_later` queued, and mark rows of unreported writes."""
        self._segments.fence.enter()
        if self._ended:
            self.end_writes()
        self._segments.notice_writes(fqns)

    def _end(self, key: int, tables: Iterable[str]) -> None:
        """End the write ``key`` in ``tables``. An interrupted call can be repeated."""
        for fqn in tables:
            if fqn in self._segments.stores:  # it may have left the model
                self._segments.stores[fqn].end_write(key)
        self._keys.discard(key)


def _check_keyed(kjt: object) -> None:
    if not callable(getattr(kjt, "length_per_key", None)):
        raise InvalidArgumentError("kjt", kjt, "Pass a KeyedJaggedTensor of local ids, or call mark_changed(fqn, ids)")


def mark_lookup(writes: LogWrites, found: Discovery, kjt: KeyedIds, states: Tensor | None = None) -> None:
    """Mark the rows of a lookup as changed, and save their old values if the log keeps old states.

    Raises InvalidArgumentError without marking any row if no feature belongs to a tracked table, if an id on the CPU is
    outside its table, or if the number or width of the rows in ``states`` is wrong.

    Args:
        writes: listener that marks the rows.
        found: the tracked tables. The ids of a feature are marked in every table in which the feature is looked up.
        kjt: KeyedJaggedTensor of local ids.
        states: old values in the order of ``kjt.values()``, in any shape with one row per id. None: current values.
    """
    _check_keyed(kjt)
    known = {feature for features in found.features.values() for feature in features}
    if kjt.keys() and not known.intersection(kjt.keys()):
        raise InvalidArgumentError("features", list(kjt.keys()), f"Pass some of {sorted(known)}")
    num_ids = kjt.values().numel()
    if states is not None:
        if states.numel() and (num_ids == 0 or states.numel() % num_ids):
            raise InvalidArgumentError("embeddings", tuple(states.shape), f"Pass one row for each of {num_ids} ids")
        states = states.detach().reshape(num_ids, -1) if num_ids else None
    begin = 0
    looked_up = []
    for feature, length in zip(kjt.keys(), kjt.length_per_key(), strict=True):
        rows = slice(begin, begin + length)
        begin += length
        for fqn, features in found.features.items():
            spec = found.shards[fqn].spec
            if feature in features and spec.num_rows:
                ids = kjt.values()[rows].long()
                if not ids.is_cuda:  # otherwise the check would wait for the device
                    spec.check_ids(ids)
                if states is not None and states.shape[1] != spec.num_columns:
                    remedy = f"Pass rows of {spec.num_columns} columns for {fqn!r}"
                    raise InvalidArgumentError("embeddings", tuple(states.shape), remedy)
                looked_up.append((fqn, ids, None if states is None else states[rows]))
    for fqn, ids, old in looked_up:  # all are valid
        first = (ids, None) if old is None else first_per_id(ids, old)
        writes.mark(fqn, first[0], states=first[1])
