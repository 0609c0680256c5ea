"""Row store that also records the writes in progress.

Notation: ``N`` is the number of ids, ``R`` the number of rows of the shard, ``S`` the number of values in an old state.

A *write* is in progress between :meth:`SegmentStore.begin_write` and :meth:`SegmentStore.end_write`. A read during the
write may return the values of rows from before or after the write. Therefore, each cut marks these rows again in the
new segment, with their states at the cut. The next read then returns these rows again.
"""

from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from delta_tracker.tracker.store.marked_rows import MarkedRows
from delta_tracker.tracker.store.old_states import ReadStates


class SegmentStore(MarkedRows):
    """Row store for a table whose writes are reported by hooks.

    Call :meth:`begin_write` before a write changes rows, and :meth:`end_write` when the write is complete.

    Args:
        num_rows, device, engine, old_states: see :class:`MarkedRows`.
        was_written: function that returns True if the shard was written in place since the function was last called or
            created. If it is None, :meth:`notice_writes` does not detect unreported writes.

    Attributes:
        reads_shard: True if :meth:`cut` or the methods that mark rows read the shard.
        writes: local ids ``[N]`` of the rows of each write in progress, by the key of the write; None for all rows.

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
        old_states: ReadStates | None = None,
        was_written: Callable[[], bool] | None = None,
    ) -> None:
        super().__init__(num_rows, device, engine=engine, old_states=old_states)
        self.reads_shard = self.keeps_states
        self._was_written = was_written
        self._has_unmarked = False  # the shard was written without a report, and its rows are not marked yet
        self._lost: deque[int] = deque()  # writes in progress whose rows are unknown
        self.writes: dict[int, Tensor | None] = {}

    def begin_write(self, key: int, ids: Tensor | None) -> None:
        """Start a write with the new key ``key``, and mark its rows ``ids``, ``[N]`` local ids or None for all rows."""
        self.writes[key] = ids
        self.mark(ids)

    def end_write(self, key: int) -> None:
        """End a write that is complete or was canceled. Does nothing if no write with this key is in progress."""
        self.writes.pop(key, None)
        if key in self._lost:
            self._has_unmarked = True  # the write may have changed rows since the last cut marked them
            self._lost.remove(key)

    def cut(self, position: int) -> None:
        """Start a segment at ``position``, see :meth:`MarkedRows.cut`, and mark the rows of the writes in progress."""
        super().cut(position)
        for ids in self.writes.values():
            self.mark(ids)

    def catch_up(self) -> None:
        """Mark the rows that differ from a copy of the shard. No-op in this class, which makes no copy."""

    # Writes without a report

    def notice_writes(self) -> None:
        """Mark all rows, with unknown old states, after an unreported write or a call of :meth:`mark_all_later`.

        Call this method before each :meth:`cut`. If old states are kept, also call it before :meth:`begin_write` and
        before a :meth:`mark` that saves current states: after an unreported write, these are not the old states.
        """
        if self.has_unmarked_writes():
            try:
                self._has_unmarked = False  # first, because mark_all_later() may be called while the rows are marked
                self.mark(None)
            except BaseException:
                self._has_unmarked = True  # the next call marks the rows
                raise

    def mark_all_later(self, key: int | None = None) -> None:
        """Make the next :meth:`notice_writes` mark all rows. Allocates no memory. May be called from any thread.

        If ``key`` is given, each :meth:`notice_writes` marks all rows until the write ``key`` ends. The first call
        after the end of the write also marks all rows.
        """
        self._has_unmarked = True
        if key is not None and key not in self._lost:
            self._lost.append(key)

    def has_unmarked_writes(self) -> bool:
        """Return True if the next :meth:`notice_writes` will mark all rows. Does no work on the device."""
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
        """Make :meth:`notice_writes` ignore all earlier unreported writes. Call it if their rows need not be marked."""
        if self._was_written is not None:
            self._was_written()

    def reset(self) -> None:
        """Drop all marked rows and ignore all earlier unreported writes. Writes in progress remain in progress."""
        self.acknowledge_writes()
        self._has_unmarked = False
        self.delete(None)

    # Memory

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors of the store, including the ids of writes in progress."""
        yield from super().tensors()
        yield from (ids for ids in self.writes.values() if ids is not None)

    @property
    def log_bytes(self) -> int:
        """Size in bytes of the row sets, old states and ids of writes in progress, including reserved memory."""
        return super().log_bytes + sum(ids.nbytes for ids in self.writes.values() if ids is not None)
