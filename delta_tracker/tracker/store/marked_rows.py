""":class:`MarkedRows`, the base class of row stores. It contains one segment for each interval between two cuts.

Notation: ``N`` is the number of ids, ``R`` the number of rows of the shard, ``S`` the number of values in an old state.

A position is the number of cuts since the log was created. It is *pinned* while a consumer's cursor is at this position
or an uncommitted read ends at it. A segment covers the positions from its start to the next segment's start.
"""

import logging
from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from delta_tracker.buffers import new_rows
from delta_tracker.raw_ids import NO_OWNER
from delta_tracker.rows import ChangedRows, put_pieces, to_device
from delta_tracker.tracker.row_sets.engines import choose_engine, is_engine_fault, retried
from delta_tracker.tracker.row_sets.row_set import RowSet
from delta_tracker.tracker.row_sets.torch import TorchRows
from delta_tracker.tracker.store.old_states import DeviceStates, OldStates, ReadStates, read_row_counts

_logger = logging.getLogger(__name__)

# On the CPU, sets of at least this size are reused, because page faults in new memory take longer than a small read.
_SPARE_BYTES = 1 << 20


@dataclass(slots=True)
class Segment:
    """Rows that were marked between two cuts.

    Args:
        start: position of the first cut.
        rows: set of the marked rows; None until a row is marked.
        states: old state of each row, before its first change in the segment; None until the first one is saved.
    """

    start: int
    rows: RowSet | None = None
    states: OldStates | None = None

    def merged(self, newer: "Segment") -> "Segment":
        """Return the union of this segment and a newer one. Rows in both segments keep the states of this segment.

        The result may reuse both segments: do not use them afterwards. A failed or interrupted call can be repeated.
        """
        if self.rows is None:
            return Segment(self.start, newer.rows, newer.states)
        if newer.rows is not None:
            if newer.states is not None:
                if self.states is None:
                    self.states = newer.states.empty()
                self.states.merge(newer.states, self.rows)
                newer.states = None  # if the next line runs out of memory, the next call moves the rows alone
            self.rows.merge(newer.rows)
        return self

    @property
    def num_bytes(self) -> int:
        """Size of the row set and the old states in bytes."""
        return sum(each.num_bytes for each in (self.rows, self.states) if each is not None)


class MarkedRows:
    """Base class of row stores. It records which rows of one shard changed, and can be read from any pinned position.

    Each segment with marked rows contains one row set and, if old states are kept, at most one old state per row. After
    :meth:`compact`, the number of segments is at most the number of distinct pinned positions plus one. On the CPU, one
    large empty row set is kept for reuse.

    To read, call :meth:`cut` while the shard has the values that the read must return, and then :meth:`changed`.
    Callers must serialize all calls.

    Args:
        num_rows: ``R``, number of rows of the shard; 0 is allowed.
        device: device of the shard and of all ids.
        engine: name of the row set implementation, see :func:`~delta_tracker.tracker.row_sets.engines.choose_engine`.
        old_states: function that takes local ids ``[N]`` and returns the current states ``[N, S]`` of these rows; None
            to keep no states.

    Attributes:
        max_device_bytes: maximum size in bytes of the closed blocks of old states on a CUDA device, see
            :class:`~delta_tracker.tracker.store.old_states.DeviceStates`. If they are larger, the oldest blocks are
            moved to pinned host memory. Has no effect on other devices.
        engine: class of the row sets.
        pads: True if the shard is not on the CPU. The ids of newly marked rows are then padded to a fixed size.
        keeps_states: True if old states are kept.
        copy: copy of the shard or of its owners, which a subclass compares to find changes; empty in other classes.
    """

    max_device_bytes = 64 << 20

    def __init__(
        self,
        num_rows: int,
        device: torch.device | str = "cpu",
        *,
        engine: str | None = None,
        old_states: ReadStates | None = None,
    ) -> None:
        self.num_rows = num_rows
        self.device = torch.device(device)
        self.engine = choose_engine(engine, self.device)
        self.engine.warm_up(self.device)  # the first set is created in a backward pass
        self.pads = self.device.type != "cpu"
        self.keeps_states = old_states is not None
        self.copy = torch.empty(0, device="cpu")
        self._old_states = old_states
        self._segments = [Segment(start=0)]
        self._spare: RowSet | None = None

    def replace_engine(self, error: Exception) -> bool:
        """Switch to the torch engine if the current engine raised ``error``. Return True if the engine was replaced.

        The failed engine cannot list its marked rows. Therefore, all rows of each segment with marked rows are marked.
        """
        if self.engine is TorchRows or not is_engine_fault(error):
            return False
        marked = [segment for segment in self._segments if segment.rows is not None]
        every = [TorchRows(self.num_rows, self.device) for _ in marked]
        for rows, segment in zip(every, marked, strict=True):
            rows.mark_all()
            segment.rows = rows
        _logger.error("engine failed and was replaced by torch: engine=%s", self.engine.__name__, exc_info=error)
        self.engine, self._spare = TorchRows, None
        return True

    # Marking

    @retried(replace_engine)
    def mark(self, ids: Tensor | None, *, states: Tensor | None = None, is_written: bool = False) -> None:
        """Mark rows as changed.

        Args:
            ids: ``[N]`` integer local ids in any order. Duplicates are allowed unless ``states`` is given. None marks
                all rows, with unknown old states. An id outside ``[0, R)`` counts as row 0, see
                :class:`~delta_tracker.tracker.row_sets.row_set.RowSet`.
            states: ``[N, S]`` states before the change; None to save the current states. Ignored if ``ids`` is None.
            is_written: True if the rows have already been written. In this case, their old states are unknown unless
                ``states`` is given.
        """
        if self.num_rows == 0 or (ids is not None and ids.numel() == 0):
            return
        if ids is None:
            self._newest_rows().mark_all()
        elif self._old_states is None or (is_written and states is None):
            self._newest_rows().mark(whole_numbers(ids))
        else:
            kept, rows = self._newest_states(), self._newest_rows()
            if states is None:
                kept.mark_new(rows, whole_numbers(ids), self._old_states)
            else:
                kept.mark_and_save(rows, whole_numbers(ids), states)
            if self.pads:
                self._spill_excess()

    @property
    def newest(self) -> Segment:
        """Segment with the rows that were marked since the last cut.

        Callers may add rows to its row set. If old states are kept, they must then call :meth:`keep_states`.
        """
        return self._segments[-1]

    def keep_states(self, ids: Tensor, count: Tensor) -> None:
        """Save the current states of rows that were added to :attr:`newest`. Does not wait for the device.

        Pass the result of :meth:`~delta_tracker.tracker.row_sets.row_set.RowSet.mark_new_padded` for its row set.
        """
        states = self._newest_states()
        assert self._old_states is not None, "checked by the caller"
        assert isinstance(states, DeviceStates), "the ids are padded on a device only"
        states.append(ids, count, self._old_states)
        self._spill_excess()

    def cut(self, position: int) -> None:
        """Start a new segment at ``position``. The position must be higher than in the previous call."""
        last = self._segments[-1]
        if last.rows is None:
            last.start = position
        else:
            self._segments.append(Segment(start=position))
            if isinstance(last.states, DeviceStates):
                last.states.close()

    # Reading

    def unknown(self, ids: Tensor | None = None) -> ChangedRows:
        """Return the rows ``ids``, ``[N]`` int64 or None for all rows, with unknown old states. Does not mark rows."""
        if ids is None:
            found = torch.arange(self.num_rows, device=self.device)
        else:
            found = torch.unique(to_device(ids, self.device))
        return self.found(None, [], found, with_states=True)

    @retried(replace_engine)
    def changed(self, start: int, stop: int, *, with_states: bool = True) -> ChangedRows:
        """Return the rows marked in ``[start, stop)``, each with its oldest state in that range.

        Waits for the device.

        Args:
            start: position that has been pinned since :meth:`cut` was called for it. At other positions,
                :meth:`compact` may have merged the segments.
            stop: pinned position as for ``start``, the position of the last cut, or a higher position.
            with_states: True to return a copy of the old states if they are kept.
        """
        if with_states and self.pads:
            read_row_counts(self.device_states)
        rows, segments = self.marked(start, stop)
        return self.found(rows, segments, None if rows is None else rows.scan(), with_states=with_states)

    def marked(self, start: int, stop: int | None, extra: Tensor | None = None) -> tuple[RowSet | None, list[Segment]]:
        """Return a row set that contains the rows marked in ``[start, stop)`` and the rows ``extra``.

        After use, pass the result to :meth:`release` or :meth:`found`.

        Args:
            start: pinned position, see :meth:`changed`.
            stop: end of the range, see :meth:`changed`; None for no upper bound.
            extra: ``[N]`` int64 local ids; None for no ids.

        Returns:
            The row set (None if it is empty), and the segments of ``[start, stop)`` that have marked rows. For one
            segment and no ``extra``, the row set belongs to the segment and is not a copy.
        """
        segments = [
            seg
            for seg in self._segments
            if start <= seg.start and (stop is None or seg.start < stop) and seg.rows is not None
        ]
        if len(segments) <= 1 and extra is None:
            return segments[0].rows if segments else None, segments
        merged = self._take_set()
        for segment in segments:
            if segment.rows is not None:
                merged.merge(segment.rows)
        if extra is not None:
            merged.mark(extra)
        return merged, segments

    def found(
        self, rows: RowSet | None, segments: list[Segment], ids: Tensor | None, *, with_states: bool
    ) -> ChangedRows:
        """Return the rows of a :meth:`marked` result with their oldest states in ``segments``. Release the result.

        ``rows`` and ``segments`` are the result of :meth:`marked` without ``extra``. ``ids`` is the result of
        ``rows.scan()``, or None if ``rows`` is None.
        """
        if ids is None:
            ids = torch.empty(0, dtype=torch.int64, device=self.device)
        found = ChangedRows(ids)
        if with_states and self._old_states is not None:
            found = ChangedRows(ids, *self._states_of(ids, rows, segments, self._old_states))
        if len(segments) > 1:
            self.release(rows, segments)
        return found

    def _states_of(
        self, ids: Tensor, rows: RowSet | None, segments: list[Segment], read: ReadStates
    ) -> tuple[Tensor, Tensor]:
        """Return the oldest state of each row in ``segments``, ``[N, S]``, and ``[N]`` bool, True for known states.

        ``rows`` is the row set that contains the rows ``ids``. It may be None if there are no segments.
        """
        states = new_rows(len(ids), read(ids[:0]))
        known = torch.zeros_like(ids, dtype=torch.bool)
        # From newest to oldest, so that the oldest segment's states are returned, even if they are unknown.
        for segment in reversed(segments):
            assert segment.rows is not None, "filtered by marked()"
            assert rows is not None, "given with segments"
            if len(segments) > 1:
                known.index_fill_(0, rows.rank(segment.rows.scan(), ids), False)
            marked = [] if segment.states is None else segment.states.ids()
            if segment.states is not None and marked:
                indices = rows.rank(torch.cat(marked), ids)
                known.index_fill_(0, indices, True)
                put_pieces(states, indices, segment.states.states())
        if not bool(known.all()):
            states[~known] = torch.nan if states.is_floating_point() else NO_OWNER
        return states, known

    def release(self, rows: RowSet | None, segments: list[Segment]) -> None:
        """Release a result of :meth:`marked`. Its row set may be reused unless the set belongs to a segment."""
        if not (segments and rows is segments[0].rows):
            self._recycle(rows)

    # Memory

    @property
    def compact_waits(self) -> bool:
        """True if :meth:`compact` waits for the device: old states are kept, and the device is not the CPU."""
        return self.pads and self.keeps_states

    def compact(self, pinned: Collection[int]) -> None:
        """Merge neighboring segments that are not separated by a position in ``pinned``."""
        if self.pads:
            read_row_counts(self.device_states)
        index = 1
        while index < len(self._segments):
            older, newer = self._segments[index - 1], self._segments[index]
            if any(older.start < position <= newer.start for position in pinned):
                index += 1
            else:
                merged = older.merged(newer)
                self._segments[index - 1 : index + 1] = [merged]  # before the next merge, which may run out of memory
                if merged is older:
                    self._recycle(newer.rows)

    def delete(self, before: int | None) -> None:
        """Drop the segments that start before the pinned position ``before``. None drops all segments."""
        segments = self._segments
        number = len(segments) if before is None else bisect_left(segments, before, key=attrgetter("start"))
        dropped, kept = segments[:number], segments[number:]
        self._segments = kept or [Segment(start=self._segments[-1].start if before is None else before)]
        for segment in dropped:
            self._recycle(segment.rows)

    def drop_states(self, before: int | None) -> None:
        """Drop the old states of segments that start before ``before``. None drops all old states. Rows stay marked."""
        for segment in self._segments:
            if before is None or segment.start < before:
                segment.states = None

    def drop_spare(self) -> None:
        """Free the empty row set that is kept for reuse, and the memory that is reserved for later old states."""
        self._spare = None
        for states in self.device_states:
            states.shrink()

    @property
    def num_segments(self) -> int:
        """Number of segments."""
        return len(self._segments)

    @property
    def device_states(self) -> list[DeviceStates]:
        """Old states of the segments, oldest first; empty on the CPU."""
        return [seg.states for seg in self._segments if isinstance(seg.states, DeviceStates)]

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors of the store on the shard's device."""
        if self.copy.numel():
            yield self.copy
        for segment in self._segments:
            yield from () if segment.rows is None else segment.rows.tensors
            yield from () if segment.states is None else segment.states.tensors()
        yield from () if self._spare is None else self._spare.tensors

    @property
    def log_bytes(self) -> int:
        """Size in bytes of the row sets and old states, including reserved memory. Does not wait for the device."""
        return sum(each.num_bytes for each in self._segments) + (0 if self._spare is None else self._spare.num_bytes)

    def _newest_rows(self) -> RowSet:
        last = self._segments[-1]
        if last.rows is None:
            last.rows = self._take_set()
        return last.rows

    def _newest_states(self) -> OldStates:
        last = self._segments[-1]
        if last.states is None:
            last.states = DeviceStates(self.num_rows) if self.pads else OldStates()
        return last.states

    def _spill_excess(self) -> None:
        """Poll old states. Move the oldest to host memory if they exceed :attr:`max_device_bytes`. Does not wait."""
        left = self.max_device_bytes
        for states in reversed(self.device_states):
            states.poll()
            left -= states.spill(max(0, left))

    def _take_set(self) -> RowSet:
        """Return an empty set: the spare set if there is one, otherwise a new set."""
        spare, self._spare = self._spare, None
        return self.engine(self.num_rows, self.device) if spare is None else spare

    def _recycle(self, rows: RowSet | None) -> None:
        """On the CPU, if ``rows`` is large and there is no spare set, clear ``rows`` and keep it as the spare set."""
        if rows is not None and self._spare is None and rows.num_bytes >= _SPARE_BYTES and not self.pads:
            rows.clear()
            self._spare = rows


def whole_numbers(ids: Tensor) -> Tensor:
    """Return ``ids`` converted to int64. Faster than ``ids.long()`` if ``ids`` is already int64."""
    return ids if ids.dtype == torch.int64 else ids.long()
