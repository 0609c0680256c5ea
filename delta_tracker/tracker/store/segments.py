"""The row store of one shard: a log of segments, each with the rows that changed between two cuts.

Notation: ``N`` is the number of ids, ``R`` the number of rows of the shard, ``S`` the number of values in an old state.

A position is the number of cuts since the log was created. It is *pinned* while a consumer's cursor is there or an
uncommitted read ends there. A segment covers the positions from its start to the next segment's start. It has a set of
local rows and, if old states are kept, the state of each row before the row's first change in the segment.

A *write* is in progress from just before it changes its rows until it is known to be complete. For such a row, a read
may return the value from before or after the write. Therefore each cut marks the rows of the writes in progress again
in the new segment, with their states at the cut, so that the next read returns these rows again and no update is lost.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from delta_tracker.buffers import new_rows
from delta_tracker.raw_ids import NO_OWNER
from delta_tracker.rows import ChangedRows, put_pieces, to_device
from delta_tracker.tracker.row_sets.engines import choose_engine, is_engine_fault, retried
from delta_tracker.tracker.row_sets.row_set import RowSet
from delta_tracker.tracker.row_sets.torch import TorchRows
from delta_tracker.tracker.store.old_states import DeviceStates, HostStates, OldStates, settle

_logger = logging.getLogger(__name__)

# Normally few writes are in progress. More remain only if backward passes raise and their writes do not end.
_MAX_WRITES = 256
_STUCK = -2  # key of the write that _fold_oldest() creates
_DEVICE_BYTES = 64 << 20
# On the CPU, sets of at least this size are reused, because page faults in new memory take longer than a small read.
_SPARE_BYTES = 1 << 20


@dataclass(slots=True)
class _Segment:
    start: int
    rows: RowSet | None = None  # None while nothing is marked
    states: OldStates | None = None  # None until a row with an old state is marked

    def merged(self, newer: _Segment) -> _Segment:
        """Return one segment with the rows of this one and of a newer one. For rows in both, keep this one's states.

        The result may be this segment. A call that fails or is interrupted can be repeated.
        """
        if self.rows is None:
            return _Segment(self.start, newer.rows, newer.states)
        if newer.rows is not None:
            if newer.states is not None:
                if self.states is None:
                    self.states = newer.states.empty()
                self.states.absorb(newer.states, self.rows)
                newer.states = None  # if the next line runs out of memory, the next call moves the rows alone
            self.rows.absorb(newer.rows)
        return self

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in (self.rows, self.states) if each is not None)


class SegmentStore:
    """Store of the changed rows of one shard of ``R`` rows, readable from any pinned position.

    The store holds one row set for each segment with changes and, if old states are kept, at most one old state for
    each row in the set. After :meth:`compact`, there is at most one segment more than there are distinct pinned
    positions. The store also holds the ids of the writes in progress and, if row sets are large, one empty set for
    reuse.

    Callers must serialize the calls. For each write, call :meth:`begin_write` before it changes rows, and
    :meth:`end_write` once it is known to be complete. For each read, call :meth:`cut` while the shard has the
    values that the read must return, then :meth:`changed`.

    Args:
        num_rows: ``R``, number of rows of the shard; 0 is allowed.
        device: device of the shard and of all ids.
        engine: implementation of the row sets, see :func:`~delta_tracker.tracker.row_sets.engines.choose_engine`.
        old_states: returns the current states ``[N, S]`` of the rows with ids ``[N]``; None to keep no states.
        was_written: function that returns True if the shard was written in place since the previous call of the
            function. The first call covers the time since the function was created. None to disable
            :meth:`notice_writes`.
        max_device_bytes: maximum size in bytes of the old states on the device, except for the memory of the newest
            ones, see :class:`~delta_tracker.tracker.store.old_states.DeviceStates`. Older ones are moved to pinned host
            memory. Ignored on the CPU, and without effect on devices other than CUDA.

    Attributes:
        engine: implementation of the row sets.
        pads: True if the shard is not on the CPU. Only the device has the number of rows that a write adds, so that the
            ids of these rows are padded to a fixed size.

    Example:
        >>> store = SegmentStore(num_rows=8)
        >>> store.begin_write(0, torch.tensor([5, 2, 5]))
        >>> store.end_write(0)
        >>> store.cut(1)
        >>> store.changed(0, 1).ids
        tensor([2, 5])
    """

    def __init__(
        self,
        num_rows: int,
        device: torch.device | str = "cpu",
        *,
        engine: str | None = None,
        old_states: Callable[[Tensor], Tensor] | None = None,
        was_written: Callable[[], bool] | None = None,
        max_device_bytes: int = _DEVICE_BYTES,
    ) -> None:
        self.num_rows = num_rows
        self._device = torch.device(device)
        self.engine = choose_engine(engine, self._device)
        self.engine.warm_up(self._device)  # the first set is created in a backward pass
        self._old_states = old_states
        self._was_written = was_written
        self._has_unmarked = False  # the shard was written without a report, and its rows are not marked yet
        self._lost: deque[int] = deque()  # writes in progress whose rows are unknown
        self._max_device_bytes = max_device_bytes
        self.pads = self._device.type != "cpu"
        self._segments = [_Segment(start=0)]
        self._writes: dict[int, Tensor | None] = {}
        self._spare: RowSet | None = None

    def begin_write(self, key: int, ids: Tensor | None, *, is_marked: bool = False) -> None:
        """Begin a write, and mark its rows.

        Args:
            key: key of the write; no other write in progress may have it.
            ids: ``[N]`` integer local ids, in any order, duplicates allowed; None for all rows, with unknown old
                states. An id outside ``[0, R)`` counts as row 0, because FBGEMM's table-batched embedding updates row 0
                for it.
            is_marked: True if the caller marks the rows.
        """
        if self.num_rows == 0:
            return
        self._writes[key] = ids
        if not is_marked:
            self._mark(ids)
        if len(self._writes) > _MAX_WRITES:
            self._fold_oldest()

    def end_write(self, key: int) -> None:
        """End a write that is complete or will not take place. Does nothing if it is not in progress."""
        self._writes.pop(key, None)
        if key in self._lost:
            self._has_unmarked = True  # the write may have changed rows since the last cut marked them
            self._lost.remove(key)

    def mark(self, ids: Tensor | None, *, states: Tensor | None = None, is_written: bool = False) -> None:
        """Mark rows without a write in progress.

        Args:
            ids: as in :meth:`begin_write`. They must be unique if ``states`` is given.
            states: ``[N, S]`` states before the change; None to capture the current states. Ignored if ``ids`` is None.
            is_written: True if the rows have already been written. Their old states are then unknown, unless ``states``
                is given.
        """
        if self.num_rows == 0:
            return
        if states is not None and ids is not None:
            self._mark_with(ids, states)
        else:
            self._mark(ids, keep_states=not is_written)

    def cut(self, position: int) -> None:
        """Start a segment at ``position`` and mark the rows of the writes in progress in it.

        Args:
            position: the new position, higher than all earlier ones.
        """
        last = self._segments[-1]
        if last.rows is None:
            last.start = position
        else:
            self._segments.append(_Segment(start=position))
            if isinstance(last.states, DeviceStates):
                last.states.close()
        for ids in self._writes.values():
            self._mark(ids)

    @property
    def has_writes(self) -> bool:
        """True if a write is in progress."""
        return bool(self._writes)

    @property
    def keeps_states(self) -> bool:
        """True if the store keeps old states."""
        return self._old_states is not None

    @property
    def newest_set(self) -> RowSet | None:
        """Set of the rows that were marked since the last cut; None if there are none.

        Set it to an empty set if it is None, and only then. Rows may be added to it if no old states are kept, or if
        :meth:`keep_states` is called afterwards.
        """
        return self._segments[-1].rows

    @newest_set.setter
    def newest_set(self, rows: RowSet) -> None:
        assert self._segments[-1].rows is None, "only a missing set is replaced"
        self._segments[-1].rows = rows

    def keep_states(self, ids: Tensor, count: Tensor) -> None:
        """Keep the current states of rows that were added to :attr:`newest_set`. Does not wait for the device.

        Args:
            ids: first result of :meth:`~delta_tracker.tracker.row_sets.row_set.RowSet.mark_new_padded`.
            count: its second result.
        """
        states = self._last_states()
        assert self._old_states is not None, "checked by the caller"
        assert isinstance(states, DeviceStates), "the ids are padded on a device only"
        states.append(ids, count, self._old_states)
        self._tend()

    def replace_engine(self, error: Exception) -> bool:
        """Use the torch engine from now on, if the engine raised ``error``. Return True if it was replaced.

        The engine can no longer list the marked rows: all rows of each segment with marked rows count as changed.
        """
        if self.engine is TorchRows or not is_engine_fault(error):
            return False
        marked = [segment for segment in self._segments if segment.rows is not None]
        every = [TorchRows(self.num_rows, self._device) for _ in marked]
        for rows, segment in zip(every, marked, strict=True):
            rows.mark_all()
            segment.rows = rows
        _logger.error("engine failed and was replaced by torch: engine=%s", self.engine.__name__, exc_info=error)
        self.engine, self._spare = TorchRows, None
        return True

    @property
    def reads_shard(self) -> bool:
        """True if the shard's rows are read by :meth:`cut` or by the methods that mark rows."""
        return self.keeps_states

    def catch_up(self) -> None:
        """Compare the shard with its copy, and mark the rows that differ. No-op in this class, which has no copy."""

    def notice_writes(self) -> bool:
        """Mark all rows, with unknown old states, if the shard was written and no hook reported the write.

        Also mark them if :meth:`mark_all_later` requested it.

        Call this method before every :meth:`cut`. If old states are kept, also call it before each :meth:`begin_write`
        or :meth:`mark` that captures states, because states that are captured after such a write are not the old ones.

        Returns:
            True if the rows were marked.
        """
        if not self.has_unmarked_writes():
            return False
        try:
            self._has_unmarked = False  # first, because mark_all_later() may be called while the rows are marked
            self._mark(None)
        except BaseException:
            self._has_unmarked = True  # the next call marks the rows
            raise
        return True

    def mark_all_later(self, key: int | None = None) -> None:
        """Make the next call of :meth:`notice_writes` mark all rows.

        Takes no memory, and may be called from any thread while another method runs.

        Args:
            key: key of a write that may be in progress. Until :meth:`end_write`, every call of
                :meth:`notice_writes` marks all rows, and so does the first call afterwards. None if no write is in
                progress.
        """
        self._has_unmarked = True
        if key is not None and key not in self._lost:
            self._lost.append(key)

    def has_unmarked_writes(self) -> bool:
        """Return True if :meth:`notice_writes` would mark the rows. Does no work on the device."""
        if self.num_rows == 0:
            return False
        if self._was_written is not None:
            try:
                if self._was_written():
                    self._has_unmarked = True
            except BaseException:  # it may have forgotten the writes
                self._has_unmarked = True
                raise
        return self._has_unmarked or bool(self._lost)

    def acknowledge_writes(self) -> None:
        """Make :meth:`notice_writes` ignore the writes since its last call.

        Call this method if the written rows are already marked or need not be marked.
        """
        if self._was_written is not None:
            self._was_written()

    def forget(self) -> None:
        """Drop all marked rows and ignore all writes so far, except those in progress."""
        self.acknowledge_writes()
        self._has_unmarked = False
        self.delete(None)

    def unknown(self, ids: Tensor | None = None) -> ChangedRows:
        """Return :class:`ChangedRows` with the given ids and unknown old states. Does not mark the rows.

        Args:
            ids: ``[N]`` int64 local ids on any device, in any order, duplicates allowed; None for all rows.
        """
        rows = self._take_set()
        if ids is None:
            rows.mark_all()
        else:
            rows.mark(to_device(ids, self._device))
        found = self._with_states(rows.scan(), rows, [])
        self._recycle(rows)
        return found

    @retried(replace_engine)
    def num_changed(self, start: int, extra: Tensor | None = None) -> int:
        """Return the number of distinct rows that were marked at or after position ``start`` or are in ``extra``.

        Waits for the device.

        Args:
            start: a pinned position.
            extra: ``[N]`` int64 local ids; None for no ids.
        """
        rows, segments = self.marked(start, None, extra)
        count = 0 if rows is None else rows.count()
        self.release(rows, segments)
        return count

    @retried(replace_engine)
    def changed(self, start: int, stop: int, *, with_states: bool = True) -> ChangedRows:
        """Return the rows marked in ``[start, stop)``, each with its oldest state in that range.

        Waits for the device.

        Args:
            start: a position that has been pinned since it was cut. Otherwise :meth:`compact` may have merged the
                segments before and after the position.
            stop: the position of the last cut or a higher position; or, like ``start``, a position that has been pinned
                since it was cut.
            with_states: return a copy of the old states too, if the store keeps them.
        """
        if with_states and self.pads:
            self._settle()
        rows, segments = self.marked(start, stop)
        return self.found(rows, segments, None if rows is None else rows.scan(), with_states=with_states)

    @property
    def compact_waits(self) -> bool:
        """True if :meth:`compact` waits for the device.

        This is the case if old states are kept on a device other than the CPU.
        """
        return self.pads and self.keeps_states

    def compact(self, pinned: Collection[int]) -> None:
        """Merge neighboring segments that no position in ``pinned`` separates."""
        if len(self._segments) > 1 and self.pads:
            self._settle()
        place = 1
        while place < len(self._segments):
            older, newer = self._segments[place - 1], self._segments[place]
            if any(older.start < position <= newer.start for position in pinned):
                place += 1
            else:
                merged = older.merged(newer)
                self._segments[place - 1 : place + 1] = [merged]  # before the next merge, which may run out of memory
                if merged is older:
                    self._recycle(newer.rows)

    def delete(self, before: int | None) -> None:
        """Drop the segments whose start is lower than ``before``.

        Args:
            before: a pinned position; None to drop all segments.
        """
        kept = [] if before is None else [segment for segment in self._segments if segment.start >= before]
        dropped = self._segments[: len(self._segments) - len(kept)]
        self._segments = kept or [_Segment(start=self._segments[-1].start if before is None else before)]
        for segment in dropped:
            self._recycle(segment.rows)

    def drop_states(self, before: int | None) -> None:
        """Drop the old states of the segments whose start is lower than ``before``. The rows stay marked.

        Args:
            before: a pinned position; None to drop all old states.
        """
        for segment in self._segments:
            if before is None or segment.start < before:
                segment.states = None

    def drop_spare(self) -> None:
        """Free the spare set that is kept for reuse, and the memory that is reserved for further old states."""
        self._spare = None
        for states in self.device_states:
            states.shrink()

    @property
    def num_segments(self) -> int:
        """Number of segments in the store."""
        return len(self._segments)

    @property
    def device(self) -> torch.device:
        """Device of the shard."""
        return self._device

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors of the store."""
        for segment in self._segments:
            yield from () if segment.rows is None else segment.rows.tensors
            yield from () if segment.states is None else segment.states.tensors()
        yield from (ids for ids in self._writes.values() if ids is not None)
        yield from () if self._spare is None else self._spare.tensors

    @property
    def copy_bytes(self) -> int:
        """Size of the store's copy of the shard in bytes; 0 in this class, which has no copy."""
        return 0

    @property
    def log_bytes(self) -> int:
        """Total size in bytes of the row sets, the old states and the ids of the writes in progress.

        Includes memory that is reserved for further old states. Does not wait for the device.
        """
        written = sum(ids.nbytes for ids in self._writes.values() if ids is not None)
        spare = 0 if self._spare is None else self._spare.num_bytes
        return written + spare + sum(segment.num_bytes for segment in self._segments)

    def marked(self, start: int, stop: int | None, extra: Tensor | None = None) -> tuple[RowSet | None, list[_Segment]]:
        """Return a set of the rows marked in ``[start, stop)`` and of the rows with the ids ``extra``.

        Pass the result to :meth:`release` or :meth:`found` after use.

        Args:
            start: as in :meth:`changed`.
            stop: as in :meth:`changed`; None for no upper bound.
            extra: ``[N]`` int64 local ids; None for no ids.

        Returns:
            The set, or None if there are no rows, and the segments with rows that were marked in ``[start, stop)``. The
            set belongs to the segment if there is one segment and ``extra`` is None.
        """
        segments = [
            seg
            for seg in self._segments
            if start <= seg.start and (stop is None or seg.start < stop) and seg.rows is not None
        ]
        if len(segments) <= 1 and extra is None:
            return segments[0].rows if segments else None, segments
        merged = self._union(segments)
        if extra is not None:
            merged.mark(extra)
        return merged, segments

    def found(
        self, rows: RowSet | None, segments: list[_Segment], ids: Tensor | None, *, with_states: bool
    ) -> ChangedRows:
        """Return the rows of a set that was scanned, each with its oldest state in the set's segments.

        Args:
            rows: first result of :meth:`marked` without ``extra``, which is released.
            segments: second result of :meth:`marked`.
            ids: result of the scan of ``rows``; None if there are no rows.
            with_states: as in :meth:`changed`.
        """
        if ids is None:
            ids = torch.empty(0, dtype=torch.int64, device=self._device)
        found = self._with_states(ids, rows, segments) if with_states else ChangedRows(ids)
        if len(segments) > 1:
            self.release(rows, segments)
        return found

    def release(self, rows: RowSet | None, segments: list[_Segment]) -> None:
        """Keep the memory of a result of :meth:`marked` for reuse, unless it belongs to a segment."""
        if rows is not None and not (segments and rows is segments[0].rows):
            self._recycle(rows)

    def _fold_oldest(self) -> None:
        """Merge the oldest half of the writes into one, which remains in progress. Does not wait for the device.

        This bounds the number of writes, because that of a failed backward pass never ends. Every cut marks the rows of
        the merged write again. It has at most ``8 * R`` bytes of ids.
        """
        oldest = sorted(self._writes)[: _MAX_WRITES // 2]
        ids = [self._writes[key] for key in oldest]
        whole = any(each is None for each in ids)
        self._writes[_STUCK] = None if whole else self._distinct(torch.cat([each for each in ids if each is not None]))
        for key in oldest:  # after the merge, which may run out of memory
            if key != _STUCK:
                del self._writes[key]

    def _distinct(self, ids: Tensor) -> Tensor:
        """Return ids of the same rows, at most ``R``, without duplicates on the CPU.

        On a device, one id fills up a fixed size, because only the device has the number of distinct ids.

        Args:
            ids: ``[N]`` integer local ids.
        """
        if not self.pads:
            distinct: Tensor = torch.unique(ids)
            return distinct
        rows = self._take_set()
        padded, _ = rows.mark_new_padded(whole_numbers(ids))
        self._recycle(rows)
        padded = padded[: self.num_rows]
        return torch.where(padded < 0, padded[:1], padded)

    def _union(self, segments: list[_Segment]) -> RowSet:
        """Return a set of all rows that are marked in ``segments``. Pass it to :meth:`_recycle` after use."""
        merged = self._take_set()
        for segment in segments:
            if segment.rows is not None:
                merged.absorb(segment.rows)
        return merged

    @property
    def device_states(self) -> list[DeviceStates]:
        """Old states of the segments, oldest first; empty on the CPU."""
        return [seg.states for seg in self._segments if isinstance(seg.states, DeviceStates)]

    def _settle(self) -> None:
        """Read the numbers of old states that only the device has. Waits for the device at most once."""
        settle(self.device_states)

    def _tend(self) -> None:
        """Update the old states on a device with the copies that are complete, and keep them within their limit.

        Does not wait for the device.
        """
        left = self._max_device_bytes
        for states in reversed(self.device_states):
            states.poll()
            left -= states.spill(max(0, left))

    def _last_rows(self) -> RowSet:
        last = self._segments[-1]
        if last.rows is None:
            last.rows = self._take_set()
        return last.rows

    def _last_states(self) -> OldStates:
        last = self._segments[-1]
        if last.states is None:
            last.states = DeviceStates(self.num_rows) if self.pads else HostStates()
        return last.states

    def _take_set(self) -> RowSet:
        """Return an empty set. Reuses the spare set if there is one."""
        spare, self._spare = self._spare, None
        return self.engine(self.num_rows, self._device) if spare is None else spare

    def _recycle(self, rows: RowSet | None) -> None:
        """On the CPU, if ``rows`` is large and there is no spare set, clear ``rows`` and keep it as the spare set."""
        if rows is not None and self._spare is None and rows.num_bytes >= _SPARE_BYTES and not self.pads:
            rows.clear()
            self._spare = rows

    @retried(replace_engine)
    def _mark(self, ids: Tensor | None, *, keep_states: bool = True) -> None:
        if ids is None:
            self._last_rows().mark_all()
        elif ids.numel() == 0:
            pass
        elif self._old_states is None or not keep_states:
            self._last_rows().mark(whole_numbers(ids))
        else:
            self._last_states().mark_new(self._last_rows(), whole_numbers(ids), self._old_states)
            if self.pads:
                self._tend()

    @retried(replace_engine)
    def _mark_with(self, ids: Tensor, states: Tensor) -> None:
        """Mark the rows ``ids``, which must be unique, with their old states ``states``."""
        if self._old_states is None:
            self._last_rows().mark(ids)
        else:
            self._last_states().mark_with(self._last_rows(), ids, states)
            if self.pads:
                self._tend()

    def _with_states(self, ids: Tensor, merged: RowSet | None, segments: list[_Segment]) -> ChangedRows:
        if self._old_states is None:
            return ChangedRows(ids)
        template = self._old_states(ids[:0])
        states = new_rows(len(ids), template)
        known = torch.zeros_like(ids, dtype=torch.bool)
        # From newest to oldest, so that the oldest segment's states are returned, even if they are unknown.
        for segment in reversed(segments):
            assert segment.rows is not None, "filtered by the caller"
            assert merged is not None, "given with segments"
            if len(segments) > 1:
                known.index_fill_(0, merged.rank(segment.rows.scan()), False)
            marked = [] if segment.states is None else segment.states.ids()
            if segment.states is not None and marked:
                places = merged.rank(torch.cat(marked))
                known.index_fill_(0, places, True)
                put_pieces(states, places, segment.states.states())
        if not bool(known.all()):
            states[~known] = torch.nan if states.is_floating_point() else NO_OWNER
        return ChangedRows(ids, states, known)


def whole_numbers(ids: Tensor) -> Tensor:
    """Return ``ids`` as int64. Skips ``long()`` for int64 ids, because the call is slower than the check."""
    return ids if ids.dtype == torch.int64 else ids.long()
