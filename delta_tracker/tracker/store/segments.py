"""Row store of one shard that also records the writes in progress.

Notation: ``N`` is the number of ids, ``R`` the number of rows of the shard, ``S`` the number of values in an old state.

A *write* is in progress from just before it changes its rows until it is known to be complete. A read during the write
may return the value of a row from before or after the write. Therefore each cut marks the rows of the writes in
progress again in the new segment, with their states at the cut. The next read then returns these rows again.
"""

from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from delta_tracker.tracker.store.marked_rows import MarkedRows
from delta_tracker.tracker.store.old_states import ReadStates


class SegmentStore(MarkedRows):
    """Row store of a table whose writes are reported by hooks, readable from any pinned position.

    Call :meth:`begin_write` before each write changes rows, and :meth:`end_write` once the write is known to be
    complete. The store also holds the ids of the writes in progress.

    Args:
        num_rows, device, engine, old_states: see :class:`MarkedRows`.
        was_written: function that returns True if the shard was written in place since its previous call. The first
            call covers the time since the function was created. None disables the detection of unreported writes by
            :meth:`notice_writes`.

    Attributes:
        reads_shard: True if :meth:`cut` or the methods that mark rows read the shard.
        writes: local ids ``[N]`` of each write in progress, by key; None for a write of all rows.

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
        """Record a write in progress with a new ``key``, and mark its rows ``ids``: ``[N]`` local ids; None for all."""
        self.writes[key] = ids
        self.mark(ids)

    def end_write(self, key: int) -> None:
        """Remove a write that is complete or was canceled. Does nothing if no write with this key is in progress."""
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
        """Mark all rows, with unknown old states, if the shard was written and no hook reported the write.

        Also mark them after a call of :meth:`mark_all_later`. Call this method before every :meth:`cut`. If old states
        are kept, also call it before each :meth:`begin_write` or :meth:`mark` that captures states: after an unreported
        write, the current states are not the old states.
        """
        if self.has_unmarked_writes():
            try:
                self._has_unmarked = False  # first, because mark_all_later() may be called while the rows are marked
                self.mark(None)
            except BaseException:
                self._has_unmarked = True  # the next call marks the rows
                raise

    def mark_all_later(self, key: int | None = None) -> None:
        """Request that the next :meth:`notice_writes` marks all rows. Allocates no memory. Any thread may call it.

        If ``key`` is given, each call of :meth:`notice_writes` until the write ``key`` ends marks all rows, and so does
        the first call afterwards.
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
        """Make :meth:`notice_writes` ignore earlier writes. Call it if the rows of these writes need not be marked."""
        if self._was_written is not None:
            self._was_written()

    def reset(self) -> None:
        """Drop all marked rows and ignore all earlier writes, except writes in progress."""
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
        """Size in bytes of the row sets, the old states and the ids of pending writes, including reserved memory."""
        return super().log_bytes + sum(ids.nbytes for ids in self.writes.values() if ids is not None)
