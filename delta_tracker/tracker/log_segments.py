"""Segments of all tables of a change log. A segment contains the rows that changed between two cuts."""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.autograd import profiler

from delta_tracker.buffers.cuda_fence import StreamFence
from delta_tracker.errors import UnsupportedModelError
from delta_tracker.raw_ids import NO_OWNER
from delta_tracker.rows import ChangedRows, merge_first
from delta_tracker.sharding.kernel_memory import one_cut, reading_in_place
from delta_tracker.tracker.cursors import Consumer, Cursors
from delta_tracker.tracker.store.owner_store import OwnerStore
from delta_tracker.tracker.store.segments import SegmentStore
from delta_tracker.tracker.store.several_stores import changed_in_each, num_changed_in_each
from delta_tracker.types import Memory

_logger = logging.getLogger(__name__)
_Stores = Mapping[str, SegmentStore]
_Context = Callable[[], AbstractContextManager[None]]
_NO_RANGE = nullcontext()


class LogSegments:
    """Row stores of all tables of a :class:`ChangeLog`. Each cut starts a new segment in every store.

    Callers must hold the log's lock, and must enter :attr:`fence` before they read or mark rows.

    Args:
        stores: row store of each table, by FQN.
        owners: store of the owners (raw ids) of the slots (rows), for each table with managed collisions, by FQN. A
            slot whose owner changed is marked in both stores of the table.
        cursors: records of the consumers. Compaction does not merge segments across a cursor or the end of a read.
        delete_on_read: True to drop rows that every consumer has committed.

    Attributes:
        stores, owners: the current stores. The mappings are replaced and never modified, so they can be read without
            the lock.
        cursors, delete_on_read: the arguments of the same names.
        position: number of cuts.
        fence: fence that orders the accesses of several CUDA streams to the stores.
        synced: position of the last sync of replicas, by table FQN. Rows marked since then are kept, even if all
            consumers have committed them.
        num_recorded: number of rows recorded as changed, by table FQN. A row counts each time it is recorded.
        num_compacted: number of ``step()`` calls at the last :meth:`compact`; 0 before the first :meth:`compact`.
        is_compact: True if :meth:`compact` has nothing to merge or drop.
        reads_shards: True if marking rows may read the shards.
        compact_waits: True if :meth:`compact` waits for the device.
        in_place: function that returns a context manager. Marking rows in this context does not flush row caches.
    """

    def __init__(
        self, stores: _Stores, owners: Mapping[str, OwnerStore], cursors: Cursors, *, delete_on_read: bool
    ) -> None:
        self.stores: _Stores = dict(stores)
        self.owners: Mapping[str, OwnerStore] = dict(owners)
        self.cursors = cursors
        self.delete_on_read = delete_on_read
        self.position = self.num_compacted = 0
        self.is_compact = True
        self.num_recorded = dict.fromkeys(self.stores, 0)
        self.synced: dict[str, int] = {}
        self.fence = StreamFence(self._tensors)
        self._every: list[tuple[str, SegmentStore | OwnerStore]] = []  # the stores of all tables, then of all owners
        self._list_stores()
        self.fence.enter()  # the stores were built on this stream

    # Recording

    def record(self, ids: Mapping[str, Tensor | None], key: int | None = None, *, captures: bool = True) -> None:
        """Enter :attr:`fence` and count changed rows. Call it before marking the rows.

        ``ids`` maps table FQNs to local ids, or to None for all rows. ``key`` is the key of the write in progress, if
        the rows belong to one. Pass ``captures=True`` if marking the rows saves their current states as old states.
        """
        self.fence.enter(key)
        if captures and self.reads_shards:  # states that are captured after other writes are not the old ones
            self.notice_writes([fqn for fqn in ids if self.stores[fqn].keeps_states])
        self.count(ids)

    def count(self, ids: Mapping[str, Tensor | None]) -> None:
        """Add the number of changed rows to :attr:`num_recorded`. ``ids`` maps FQNs to local ids; None for all rows."""
        recorded, num_rows = self.num_recorded, 0
        for fqn, own in ids.items():
            num_own = self.stores[fqn].num_rows if own is None else own.numel()
            recorded[fqn] = recorded.get(fqn, 0) + num_own
            num_rows += num_own
        if num_rows:
            self.cursors.note_change(self.position)

    def notice_writes(self, fqns: Iterable[str]) -> None:
        """Mark all rows of each table in ``fqns`` that may have been written without a report by a hook."""
        for fqn in fqns:
            if self.stores[fqn].has_unmarked_writes():
                self.fence.enter()
                self.stores[fqn].notice_writes()
                self.count({fqn: None})

    # Cuts

    def cut(self, fqns: Collection[str] | None = None) -> None:
        """Start a new segment in the row stores of the tables ``fqns``, or in all row and owner stores if None.

        Rows of writes in progress are marked again in the new segment.
        """
        with one_cut():
            if self.owners and fqns is None:
                self.update_owners()  # first, so that the changes are before the cut
            self.position += 1
            self.is_compact = False
            for _, store in self._every if fqns is None else [(fqn, self.stores[fqn]) for fqn in fqns]:
                store.cut(self.position)
                if isinstance(store, SegmentStore) and store.writes:  # the cut marked the rows of the writes again
                    self.cursors.note_change(self.position)

    def compact(self) -> None:
        """Merge adjacent segments, unless a cursor or the end of a read is between them.

        If :attr:`delete_on_read` is True, rows that every consumer has committed are dropped first. Rows marked since
        the last sync of replicas are kept, but old states that no consumer needs are dropped.
        """
        with profiler_range("delta_tracker: compact"):
            self.fence.enter()
            pinned = self.cursors.pinned
            for fqn, store in self._every:
                kept = {*pinned, self.synced[fqn]} if fqn in self.synced else pinned
                if self.delete_on_read:  # first, so that dropped segments are not merged
                    store.delete(min(kept, default=None))
                    if fqn in self.synced:
                        store.drop_states(min(pinned, default=None))
                if store.num_segments > 1:
                    store.compact(kept)
            self.cursors.merge_times(pinned if self.delete_on_read else {0, *pinned})
            self.num_compacted = self.cursors.num_batches
            self.is_compact = True

    # Reading

    def changed_since(
        self, start: int, carried: Mapping[str, ChangedRows], stop: int | None = None, *, with_states: bool = True
    ) -> dict[str, ChangedRows]:
        """Return the rows in ``carried`` and the rows marked at positions in ``[start, stop)``, by table FQN.

        If ``stop`` is None, there is no upper bound. If a row is in both, its old state is taken from ``carried``.
        """
        end = self.position + 1 if stop is None else stop
        rows, together = dict[str, ChangedRows](), dict[str, SegmentStore]()
        for fqn, store in self.stores.items():
            if store.pads:
                together[fqn] = store
            else:
                rows[fqn] = store.changed(start, end, with_states=with_states)
        if together:
            rows |= changed_in_each(together, start, end, with_states=with_states)
            rows = {fqn: rows[fqn] for fqn in self.stores}
        for fqn, owners in self.owners.items():
            rows[fqn] = replace(rows[fqn], former=owners.former(rows[fqn].ids, start))
        for fqn, older in carried.items():
            rows[fqn] = merge_first(older if with_states else older.without_states(), rows[fqn])
        return rows

    def num_changed(self, consumer: Consumer) -> dict[str, int]:
        """Return the number of pending rows of a consumer, by table FQN. Waits for the device."""
        carried = {fqn: rows.ids for fqn, rows in consumer.carried.items()}
        return num_changed_in_each(self.stores, consumer.position, carried)

    # Owners of slots

    def update_owners(self) -> None:
        """Mark the slots whose owner has changed since the last call, and save their former owners."""
        for fqn, owners in self.owners.items():
            owners.update(partial(self._mark_owned, fqn))

    def _mark_owned(self, fqn: str, ids: Tensor) -> None:
        self.count({fqn: ids})
        self.stores[fqn].mark(ids)

    def check_owners(self) -> None:
        """Raise UnsupportedModelError if the raw ids of a table at the last cut cannot be published."""
        for fqn, owners in self.owners.items():
            if owners.refusal:
                remedy = "Name the table in fqns_to_skip to train it untracked"
                raise UnsupportedModelError({fqn: owners.refusal}, remedy, problem="raw ids that cannot be read")

    def former(self, fqn: str, ids: Tensor, consumer: Consumer) -> Tensor:
        """Return the owner that each row had at the last committed read of ``consumer``, ``[N]`` int64.

        ``ids`` is ``[N]`` int64, unique local ids in ascending order.
        """
        former = self.owners[fqn].former(ids, consumer.position)
        older = consumer.carried.get(fqn)
        if older is not None and older.former is not None:
            is_carried = torch.isin(older.ids, ids)
            former[torch.searchsorted(ids, older.ids[is_carried])] = older.former[is_carried]
        return former

    def with_former(self, rows: Mapping[str, ChangedRows]) -> dict[str, ChangedRows]:
        """Return ``rows`` with former owners in all tables with managed collisions. Unknown owners are ``NO_OWNER``."""
        found = {}
        for fqn, each in rows.items():
            former = each.former if fqn in self.owners else None
            if fqn in self.owners and former is None:
                former = torch.full_like(each.ids, NO_OWNER)
            found[fqn] = each if former is each.former else replace(each, former=former)
        return found

    # All stores

    def reset(self) -> None:
        """Drop all marked rows. Later cuts mark rows of earlier writes only if the writes are still in progress."""
        self.synced.clear()  # the replicas may have loaded different weights
        for _, store in self._every:
            store.reset()

    def mark_all_later(self) -> None:
        """Request that the next cut marks all rows of all tables. Allocates no memory."""
        for _, store in self._every:
            store.mark_all_later()

    def replace(self, stores: _Stores, owners: Mapping[str, OwnerStore], gone: Collection[str]) -> None:
        """Replace the stores of some tables, and remove the tables ``gone``. See :meth:`ChangeLog.replace`.

        All rows of the new stores are marked. If memory for the marks runs out, nothing is replaced.
        """
        self.fence.guard(store.device for store in {**self.stores, **stores}.values())
        self.fence.enter()
        for store in (*stores.values(), *owners.values()):
            store.cut(self.position)
        for store in stores.values():
            store.mark(None, is_written=True)
        for own in owners.values():
            own.mark_unknown()
        changed = {*stores, *gone}
        self.synced = {fqn: position for fqn, position in self.synced.items() if fqn not in changed}
        self.owners = {**{fqn: own for fqn, own in self.owners.items() if fqn not in changed}, **owners}
        self.stores = {fqn: store for fqn, store in {**self.stores, **stores}.items() if fqn not in gone}
        self.num_recorded = {fqn: number for fqn, number in self.num_recorded.items() if fqn not in gone}
        self._list_stores()
        self.count(dict.fromkeys(stores))

    def _list_stores(self) -> None:
        self._every = [*self.stores.items(), *self.owners.items()]
        self.fence.guard(store.device for _, store in self._every)
        self.compact_waits = any(store.compact_waits for store in self.stores.values())
        self.reads_shards = any(store.reads_shard for store in self.stores.values())
        self.in_place: _Context = reading_in_place if self.reads_shards else nullcontext

    def memory(self) -> Memory:
        """Return the sizes of the log, of the copies of shards, and of pending rows outside the log, in bytes."""
        stores = [store for _, store in self._every]
        log_bytes, copy_bytes = sum(each.log_bytes for each in stores), sum(each.copy.nbytes for each in stores)
        return Memory(log_bytes, copy_bytes, self.cursors.num_bytes)

    def drop_spare(self) -> None:
        """Free the memory that the stores keep for reuse."""
        for _, store in self._every:
            store.drop_spare()

    def _tensors(self) -> Iterator[Tensor]:
        for _, store in self._every:
            yield from store.tensors()
        for rows in self.cursors.rows():
            yield from rows.tensors


def profiler_range(name: str) -> AbstractContextManager[object]:
    """Return a context manager that records a named range in ``torch.profiler``. No-op if no profiler is running."""
    # Opening a range takes microseconds even if no profiler is running. torch's optimizers and data loaders check this
    # flag for the same reason.
    return profiler.record_function(name) if profiler._is_profiler_enabled else _NO_RANGE  # noqa: SLF001


def maintain(*tasks: Callable[[], None]) -> None:
    """Run maintenance tasks of a log, such as compaction, in order.

    If a task raises MemoryError or RuntimeError, the error is logged and the remaining tasks are skipped. No pending
    row is lost. The log's next maintenance does the skipped work.
    """
    try:
        for task in tasks:
            task()
    except (MemoryError, RuntimeError):  # torch raises RuntimeError if host or device memory runs out
        _logger.exception("maintenance of the change log failed; the next call retries")
