"""Old states of the rows of one segment: :class:`OldStates` on the CPU, :class:`DeviceStates` on other devices.

Notation: ``N`` is the number of ids of a call, ``R`` the number of rows of the shard, ``S`` the number of values in an
old state, ``C`` the capacity of a block.

On the CPU, the number of rows that a batch marks for the first time is known immediately. On other devices, reading
this number would make the training step wait. The states are therefore written to blocks of preallocated memory on the
device, at indices that the device computes. The host keeps an upper bound of the number of rows in a block, and
allocates a new block before this bound exceeds the capacity. Asynchronous copies of the number update the bound.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Self

import torch
from torch import Tensor

from delta_tracker.buffers.host_copy import HostCopy, side_stream
from delta_tracker.tracker.row_sets.row_set import RowSet

# Blocks have at least the first size, in bytes, so that a read takes few operations. If the ids of two batches need no
# more, they have at most the second one, which bounds the memory that is reserved on the device.
_MIN_BYTES, _MAX_BYTES = 1 << 20, 8 << 20
# A block that is closed is copied to memory of the exact size if it is filled to less than this fraction.
_FULL = 0.875


ReadStates = Callable[[Tensor], Tensor]
"""Function that takes local ids ``[N]`` and returns the current states ``[N, S]`` of the rows."""


class OldStates:
    """Old states of a segment's marked rows, in CPU memory. If a marked row has no entry, its old state is unknown.

    Memory from the :class:`~delta_tracker.buffers.pool.BufferPool` may be up to 1.5 times as large as the states. Other
    memory has the size of the states.

    Attributes:
        pieces: pairs of ids ``[N]`` and old states ``[N, S]``. Each call that saves states adds pairs. Ids are unique.
    """

    def __init__(self) -> None:
        self.pieces: list[tuple[Tensor, Tensor]] = []

    def empty(self) -> "OldStates":
        """Return a new object of this class that contains no states."""
        return OldStates()

    def mark_new(self, marked: RowSet, ids: Tensor, read: ReadStates) -> None:
        """Mark the rows ``ids`` in ``marked``. Save the current states of those rows that were not marked before.

        ``ids`` is ``[N]`` int64, local ids in any order. Duplicates are allowed. ``read`` returns the current states.
        """
        new = marked.mark_new(ids)
        self.pieces.append((new, read(new)))

    def mark_and_save(self, marked: RowSet, ids: Tensor, states: Tensor) -> None:
        """Mark the rows ``ids`` in ``marked``. Save the given states of those rows that were not marked before.

        ``ids`` is ``[N]`` int64, unique local ids in any order. ``states`` is ``[N, S]``.
        """
        self.pieces += _unmarked(marked, [(ids, states)])
        marked.mark(ids)

    def merge(self, newer: Self, marked: RowSet) -> None:
        """Add the old states of a newer segment, except for rows in ``marked``. Do not use ``newer`` afterwards.

        On devices other than the CPU, call :func:`read_row_counts` first. Waits for the device.
        """
        self.pieces += _unmarked(marked, newer.pieces)  # all or none, because this may run out of memory

    def ids(self) -> list[Tensor]:
        """Return the ids of the rows with old states, one tensor for each tensor of :meth:`states`. No id occurs twice.

        On devices other than the CPU, call :func:`read_row_counts` first.
        """
        return [ids for ids, _ in self.pieces]

    def states(self) -> Iterator[Tensor]:
        """Yield the old states on the device of the shard, in the order of :meth:`ids`."""
        return (states for _, states in self.pieces)

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors that are on the device of the shard."""
        for pair in self.pieces:
            yield from pair

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the memory on the device and on the host. Does not wait for the device."""
        return sum(ids.nbytes + states.nbytes for ids, states in self.pieces)


def _unmarked(marked: RowSet, pieces: Iterable[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    found = []
    for ids, states in pieces:
        is_new = ~marked.contains(ids)
        if bool(is_new.any()):
            found.append((ids[is_new], states[is_new]))
    return found


class StateBlock:
    """Old states of up to ``C`` rows, in the order in which the rows were marked.

    A block is open until :meth:`close` is called. An open block has memory for ``C + 1`` rows. The last row receives
    padding that does not fit. When the block is closed and the host has its number of rows, the memory is trimmed to
    these rows, unless the block is nearly full. :meth:`spill` moves the states to pinned host memory.

    Args:
        capacity: ``C``, at least 1.
        ids: a tensor with the dtype and device of the ids.
        states: a tensor ``[N, S]`` with the dtype and device of the states.

    Attributes:
        capacity: ``C``.
        lowest: lower bound of the number of rows.
        highest: upper bound of the number of rows. If it equals ``lowest``, the number of rows is known.
        is_open: True if rows may be appended.
        count: number of rows, ``[1]`` int64 on the device.
    """

    def __init__(self, capacity: int, ids: Tensor, states: Tensor) -> None:
        # A tensor created in inference mode cannot be written in place outside it.
        with torch.inference_mode(mode=False):
            self._ids = ids.new_empty(capacity + 1)
            self._states: Tensor | None = states.new_empty((capacity + 1, *states.shape[1:]))
            self.count = ids.new_zeros(1)
        self.capacity = capacity
        self.lowest = self.highest = 0
        self.is_open = True
        self._appended = 0  # sum of the sizes of all appended tensors
        self._copy: HostCopy | None = None  # of the count
        self._at_copy = 0  # value of _appended when _copy was started
        self._spilled: HostCopy | None = None  # of the states

    def append(self, ids: Tensor, states: Tensor, count: Tensor) -> None:
        """Append rows. Does not wait for the device.

        Args:
            ids: ``[N]`` int64. The first ``count`` elements are the ids of the rows. The other elements are padding.
            states: ``[N, S]``, with the same padding.
            count: ``[1]`` int64. The block must have room for this number of rows.
        """
        assert self.is_open, "closed blocks are not written"
        assert self._states is not None, "only closed blocks are spilled"
        indices = torch.arange(len(ids), device=ids.device).add_(self.count).clamp_(max=self.capacity)
        self._appended += len(ids)  # the bounds first: they hold even if this call fails or is interrupted
        self.highest = min(self.capacity, self.highest + len(ids))
        self._ids.index_copy_(0, indices, ids)
        self._states.index_copy_(0, indices, states)
        self.count.add_(count)

    @property
    def is_known(self) -> bool:
        """True if the exact number of rows is available on the host."""
        return self.lowest == self.highest

    @property
    def is_pending(self) -> bool:
        """True if :meth:`poll` must be called again: the block is open, being spilled, or has an unknown row count."""
        return self.is_open or not self.is_known or (self._spilled is not None and self._states is not None)

    @property
    def is_resident(self) -> bool:
        """True if :meth:`spill` can be called: the block is closed and not spilled yet, and its row count is known."""
        return not self.is_open and self.is_known and self._spilled is None

    def start_copy(self) -> None:
        """Start an asynchronous copy of the number of rows to the host, unless it is known or being copied."""
        if self._copy is None and not self.is_known:
            self._copy, self._at_copy = HostCopy(self.count), self._appended

    def poll(self) -> None:
        """Check for complete copies. Update the bounds, and free the device memory of spilled states. Does not wait."""
        if self._spilled is not None and self._states is not None and self._spilled.is_done:
            self._states = None
        if self._copy is not None and self._copy.is_done:
            lowest, since = int(self._copy.result()), self._appended - self._at_copy
            self._copy = None
            self.set_bounds(lowest, min(self.highest, lowest + since))
            if not self.is_open:
                self.start_copy()

    def set_bounds(self, lowest: int, highest: int) -> None:
        """Set the bounds of the number of rows. If they are equal and the block is closed, trim the block."""
        self.lowest, self.highest = lowest, highest
        if self.is_known:
            self._copy = None
            if not self.is_open and lowest < _FULL * len(self._ids):
                self._resize(lowest)

    def close(self) -> None:
        """Stop accepting rows. Trim the block if its number of rows is known. Does not wait for the device."""
        if self.is_open:
            self.is_open = False
            self.set_bounds(self.lowest, self.highest)
            self.start_copy()

    def shrink(self) -> None:
        """Reduce the capacity of an open block to the upper bound of its number of rows."""
        if self.is_open and self.highest < self.capacity:
            self.capacity = self.highest
            self._resize(self.highest + 1)

    def spill(self) -> None:
        """Start moving the states of a resident block to pinned host memory. The ids stay on the device.

        Does not wait for the device. :meth:`poll` frees the memory on the device once the copy is complete.
        """
        assert self.is_resident, "selected by the caller"
        self._spilled = HostCopy(self.states, stream=side_stream(self._ids.device))

    @property
    def ids(self) -> Tensor:
        """Ids of the rows, ``[N]`` int64. The number of rows must be known."""
        assert self.is_known, "known by the caller"
        return self._ids[: self.lowest]

    @property
    def states(self) -> Tensor:
        """Old states of the rows, ``[N, S]``, on the device. The number of rows must be known."""
        assert self.is_known, "known by the caller"
        if self._states is not None:
            return self._states[: self.lowest]
        assert self._spilled is not None, "the states are on the device or spilled"
        return self._spilled.result().to(self._ids.device, non_blocking=True)

    def take(self, index: Tensor) -> None:
        """Remove all rows except those at the unique indices ``index``. The block must be closed and its size known."""
        num_rows, ids, states = len(index), self.ids[index], self.states[index]
        # In one statement, so that an interrupted call has no effect.
        self._ids, self._states, self._spilled, self.lowest, self.highest, self.capacity = (
            ids, states, None, num_rows, num_rows, num_rows
        )  # fmt: skip

    def tensors(self) -> Iterator[Tensor]:
        """Yield the block's tensors on the device."""
        yield from (each for each in (self._ids, self._states, self.count) if each is not None)

    @property
    def device_bytes(self) -> int:
        """Size in bytes of the memory on the device."""
        return sum(each.nbytes for each in self.tensors())

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the memory on the device and of the copies in host memory."""
        return self.device_bytes + sum(copy.num_bytes for copy in (self._copy, self._spilled) if copy is not None)

    def _resize(self, num_rows: int) -> None:
        if self._states is not None:
            self._ids, self._states = self._ids[:num_rows].clone(), self._states[:num_rows].clone()


class DeviceStates(OldStates):
    """Old states of a segment's marked rows, stored in blocks of device memory.

    Only :meth:`merge` waits for the device, and :meth:`states` if a spill is running. The newest block may be open. Its
    capacity is at least two batches of ids and 1 MiB, but at most ``R`` rows. It is closed when the next batch might
    not fit. A closed block is trimmed to its rows when the host has received their number. On CUDA, this usually takes
    one or two batches. On other devices, it happens at the next :func:`read_row_counts`.

    Args:
        num_rows: ``R``.
    """

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self._num_rows = num_rows
        self._blocks: list[StateBlock] = []  # oldest first; only the last one may be open
        self._pending: list[StateBlock] = []  # blocks that have to be polled
        self._resident: deque[StateBlock] = deque()  # oldest first
        self._resident_bytes = 0
        self._num_known = self._known_bytes = 0  # rows and bytes of the blocks that are not pending
        self._holds_all = False  # True if the open block has room for all rows that may still be marked

    def empty(self) -> "DeviceStates":
        """Return a new object that contains no states, for the same number of rows."""
        return DeviceStates(self._num_rows)

    @property
    def unknown(self) -> list[StateBlock]:
        """Blocks whose exact number of rows is not available on the host."""
        return [block for block in self._pending if not block.is_known]

    def mark_new(self, marked: RowSet, ids: Tensor, read: ReadStates) -> None:
        """Mark rows and save the current states of newly marked rows, see :meth:`OldStates.mark_new`.

        ``read`` may also receive ids of other rows. Their states are ignored.
        """
        if self._lowest < self._num_rows:  # otherwise all rows are marked
            new, count = marked.mark_new_padded(ids)
            self.append(new, count, read)

    def append(self, ids: Tensor, count: Tensor, read: ReadStates) -> None:
        """Save the states of newly marked rows. Does not wait for the device.

        Args:
            ids: ``[N]`` int64. The first ``count`` elements are the ids of the rows. The other elements are padding.
            count: ``[1]`` int64, the number of rows.
            read: function that takes the first ``M`` elements of ``ids``, in which 0 replaces the padding -1, and
                returns the states ``[M, S]`` to save.
        """
        num_ids = min(len(ids), self._num_rows - self._lowest)
        if num_ids <= 0:
            return
        ids = ids[:num_ids]
        states = read(ids.clamp(min=0))
        block = self._room(num_ids, ids, states)
        block.append(ids, states, count)
        if 2 * block.highest >= block.capacity:
            block.start_copy()

    def mark_and_save(self, marked: RowSet, ids: Tensor, states: Tensor) -> None:
        """Mark rows and save the given states of newly marked rows, see :meth:`OldStates.mark_and_save`."""
        is_new = ~marked.contains(ids)
        marked.mark(ids)
        order = is_new.logical_not().byte().sort(stable=True).indices  # new rows first
        self.append(ids[order], is_new.sum(0, keepdim=True), lambda kept: states[order[: len(kept)]])

    def poll(self) -> None:
        """Call :meth:`StateBlock.poll` for each block that needs it. Does not wait for the device."""
        for block in self._pending:
            block.poll()
        self._update_totals()

    def close(self) -> None:
        """Close the open block. The next :meth:`append` starts a new block."""
        if self._blocks:
            self._blocks[-1].close()
            self._update_totals()

    def shrink(self) -> None:
        """Free the unused memory of the open block."""
        if self._blocks:
            self._holds_all = False
            self._blocks[-1].shrink()

    def spill(self, max_bytes: int) -> int:
        """Start moving the oldest closed blocks to pinned host memory. The other ones take at most ``max_bytes``.

        Returns the size in bytes of the closed blocks that stay on the device. Blocks with an unknown number of rows
        are neither moved nor counted.
        """
        while self._resident and self._resident_bytes > max_bytes:
            block = self._resident[0]
            num_bytes = block.num_bytes
            if block.is_resident:  # False if an earlier call was interrupted in the next statements
                block.spill()
            # In one statement, so that no row is counted twice: rows beyond their number are not marked.
            self._resident, self._pending, self._resident_bytes, self._num_known, self._known_bytes = (
                deque(list(self._resident)[1:]),
                [*self._pending, block],
                self._resident_bytes - num_bytes,
                self._num_known - block.lowest,
                self._known_bytes - num_bytes,
            )
        return self._resident_bytes

    def merge(self, newer: Self, marked: RowSet) -> None:
        """Add the old states of a newer segment, except for rows in ``marked``. Waits for the device once."""
        self.close()
        newer.close()
        blocks = [block for block in newer._blocks if block.lowest]
        kept = []
        if blocks:
            is_marked = marked.contains(torch.cat([block.ids for block in blocks]))
            is_new = torch.split(~is_marked, [block.lowest for block in blocks])
            counts: list[int] = torch.stack([mask.sum() for mask in is_new]).tolist()
            for block, mask, count in zip(blocks, is_new, counts, strict=True):
                if 0 < count < block.lowest:
                    # A stable sort puts the kept rows first. Unlike nonzero(), it does not wait for the device.
                    block.take(mask.logical_not().byte().sort(stable=True).indices[:count])
                if count:
                    kept.append(block)
        newer._blocks, self._blocks = [], self._blocks + kept  # in one statement, so that no block is moved twice
        self._pending += kept
        self._update_totals()

    def ids(self) -> list[Tensor]:
        """Return the ids of the rows, one tensor for each block. Call :func:`read_row_counts` first."""
        return [block.ids for block in self._blocks]

    def states(self) -> Iterator[Tensor]:
        """Yield the old states on the device, in the order of :meth:`ids`. Call :func:`read_row_counts` first.

        The iterator copies a spilled block to the device when it yields the block's states. It does not keep the copy.
        """
        return (block.states for block in self._blocks)

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors on the device."""
        for block in self._blocks:
            yield from block.tensors()

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the memory on the device and of the copies in host memory."""
        return self._known_bytes + sum(block.num_bytes for block in self._pending)

    @property
    def _lowest(self) -> int:
        return self._num_known + sum(block.lowest for block in self._pending)

    def _room(self, num_ids: int, ids: Tensor, states: Tensor) -> StateBlock:
        """Return an open block with room for ``num_ids`` rows, or for all rows that may still be marked."""
        if self._blocks and self._blocks[-1].is_open:
            block = self._blocks[-1]
            if self._holds_all or block.highest + num_ids <= block.capacity:
                return block
            self.close()
        known = self._lowest
        row_bytes = ids.element_size() + states.element_size() * states[:1].numel()
        most, least = _MAX_BYTES // row_bytes, _MIN_BYTES // row_bytes
        capacity = max(2 * num_ids, min(most, known // 8), least)
        self._holds_all = capacity >= self._num_rows - known
        block = StateBlock(min(capacity, self._num_rows - known), ids, states)
        self._blocks, self._pending = [*self._blocks, block], [*self._pending, block]
        return block

    def _update_totals(self) -> None:
        """Remove each block that need not be polled again from the pending blocks, and add its size to the totals."""
        known = [block for block in self._pending if not block.is_pending]
        if known:
            resident = [block for block in known if block.is_resident]
            # In one statement, so that no row is counted twice: rows beyond their number are not marked.
            self._pending, self._num_known, self._known_bytes, self._resident, self._resident_bytes = (
                [block for block in self._pending if block.is_pending],
                self._num_known + sum(block.lowest for block in known),
                self._known_bytes + sum(block.num_bytes for block in known),
                deque([*self._resident, *resident]),
                self._resident_bytes + sum(block.num_bytes for block in resident),
            )


def read_row_counts(segments: Iterable[DeviceStates]) -> None:
    """Copy the unknown row counts of all blocks in several segments to the host. Waits for the device at most once."""
    segments = list(segments)
    blocks = [block for states in segments for block in states.unknown]
    if blocks:
        counts: list[int] = torch.cat([block.count for block in blocks]).tolist()
        for block, count in zip(blocks, counts, strict=True):
            block.set_bounds(count, count)
    for states in segments:
        states.poll()
