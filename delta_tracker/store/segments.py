"""The store of one shard: a log of segments, each saying which rows changed between two cuts.

Letters: ``N`` ids, ``R`` rows of the shard.

A position is a count of cuts. A segment covers the positions from its start to the next segment's start and holds
one byte per local row. A batch of ids is *open* from just before its update is written until that update is proven
done; a cut marks open rows again in the new segment, because a read at the cut may have taken them before or after
the write. That is what makes a read at any moment safe: see :meth:`SegmentStore.cut`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class _Segment:
    start: int
    marks: Tensor | None = None  # [R] bool; None while nothing is marked

    def mark(self, ids: Tensor | None, num_rows: int, device: torch.device) -> None:
        if self.marks is None:
            self.marks = torch.zeros(num_rows, dtype=torch.bool, device=device)
        if ids is None:
            self.marks.fill_(True)
        else:
            self.marks.index_fill_(0, ids, True)

    def absorb(self, newer: _Segment) -> None:
        if self.marks is None:
            self.marks = newer.marks
        elif newer.marks is not None:
            self.marks.logical_or_(newer.marks)


class SegmentStore:
    """Changed rows of one shard of ``R`` rows, readable from any pinned position.

    Memory is ``R`` bytes per segment with a change in it. After :meth:`compact` there is at most one segment for each
    distinct pinned position, and one more; beside them the ids of the open batches are kept. Nothing here waits for
    the device except :meth:`changed`.

    The caller serialises the calls, and calls in this order: for a batch :meth:`open_batch` before its update is
    written and :meth:`close_batch` once it is proven written; for a read :meth:`cut` on the training state that the
    reader will see, then :meth:`changed`.

    Args:
        num_rows: ``R``, rows of the shard; 0 is allowed.
        device: where the marks live, the shard's own device.

    Example:
        >>> store = SegmentStore(num_rows=8)
        >>> store.open_batch(0, torch.tensor([5, 2, 5]))
        >>> store.close_batch(0)
        >>> store.cut(1)
        >>> store.changed(0, 1)
        tensor([2, 5])
    """

    def __init__(self, num_rows: int, device: torch.device | str = "cpu") -> None:
        self.num_rows = num_rows
        self._device = torch.device(device)
        self._segments = [_Segment(start=0)]
        self._open: dict[int, Tensor | None] = {}

    def open_batch(self, batch: int, ids: Tensor | None) -> None:
        """Mark the rows of a batch whose update is about to be written, and keep them open.

        Args:
            batch: a key that no open batch has.
            ids: ``[N]`` integer local ids, in any order, duplicates allowed; None for every row. An id outside
                ``[0, R)`` counts as row 0, which is the row that FBGEMM's table-batched embedding updates for it.
        """
        if self.num_rows == 0:
            return
        if ids is not None:
            ids = torch.where((ids >= 0) & (ids < self.num_rows), ids, 0).long()
        self._open[batch] = ids
        self._mark_last(ids)

    def close_batch(self, batch: int) -> None:
        """Forget an open batch: its update is written. A batch that is not open is no error."""
        self._open.pop(batch, None)

    def mark(self, ids: Tensor | None) -> None:
        """Mark rows that are changed already. Same ``ids`` as :meth:`open_batch`."""
        self.open_batch(-1, ids)
        self.close_batch(-1)

    def cut(self, position: int) -> None:
        """Start a segment at ``position``, which is higher than any before; open rows are marked in it again."""
        last = self._segments[-1]
        if last.marks is None:
            last.start = position
        else:
            self._segments.append(_Segment(start=position))
        for ids in self._open.values():
            self._mark_last(ids)

    def changed(self, start: int, stop: int) -> Tensor:
        """``[N]`` int64 local ids marked from position ``start`` up to ``stop``, ascending and unique.

        Both must be pinned since they were cut, or :meth:`compact` may have merged across them. Waits for the device.
        """
        marks = [seg.marks for seg in self._segments if start <= seg.start < stop and seg.marks is not None]
        if not marks:
            return torch.empty(0, dtype=torch.int64, device=self._device)
        merged = marks[0] if len(marks) == 1 else torch.stack(marks).any(dim=0)
        return merged.nonzero().flatten()

    def compact(self, pinned: Collection[int]) -> None:
        """Merge neighbouring segments unless a position in ``pinned`` lies on their boundary."""
        kept = self._segments[:1]
        for segment in self._segments[1:]:
            if any(kept[-1].start < position <= segment.start for position in pinned):
                kept.append(segment)
            else:
                kept[-1].absorb(segment)
        self._segments = kept

    def delete(self, before: int) -> None:
        """Drop what was marked before position ``before``, which must be pinned or newer than every mark."""
        kept = [segment for segment in self._segments if segment.start >= before]
        self._segments = kept or [_Segment(start=before)]

    @property
    def num_segments(self) -> int:
        """Segments now in the log."""
        return len(self._segments)

    @property
    def num_bytes(self) -> int:
        """Bytes of marks and of open ids held now."""
        tensors = [segment.marks for segment in self._segments] + list(self._open.values())
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def _mark_last(self, ids: Tensor | None) -> None:
        if ids is None or ids.numel():
            self._segments[-1].mark(ids, self.num_rows, self._device)
