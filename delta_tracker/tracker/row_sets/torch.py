"""Row sets on any device, implemented with torch. This is the reference implementation."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from delta_tracker.tracker.row_sets.row_set import RowSet, within

_JOINED_BYTES = 64 << 20  # temporary memory of a scan of several sets


class JointIds:
    """Ids of ``T`` row sets that share one tensor of marks, converted to indices of this tensor.

    One operation can then mark the rows of all sets. The constructor runs a fixed number of operations and does not
    wait for the device. Notation: ``N`` is the total number of ids.

    Args:
        ids: ``[N_t]`` int64 local ids of each set. An id outside the set counts as row 0.
        begins: index of the first row of each set in the tensor, ascending.
        sizes: number of rows of each set, 1 or more.

    Attributes:
        lengths: number of ids of each set.
        sets: ``[N]`` int64, index of the set that each id belongs to, from 0 to ``T - 1``.
        indices: ``[N]`` int64, index in the tensor of each id's row, in the order of the concatenated ``ids``.

    Example:
        >>> joint = JointIds([torch.tensor([1, 9]), torch.tensor([2])], begins=[0, 4], sizes=[4, 3])
        >>> joint.indices
        tensor([1, 0, 6])
    """

    def __init__(self, ids: Sequence[Tensor], begins: Sequence[int], sizes: Sequence[int]) -> None:
        device = ids[0].device
        self.lengths = [len(each) for each in ids]
        numbers = torch.tensor([self.lengths, begins, sizes], device="cpu")
        # Pinned memory is reused only after the copy. On other devices than the CPU and CUDA, FBGEMM has no lookups.
        numbers = (numbers.pin_memory() if device.type == "cuda" else numbers).to(device, non_blocking=True)
        lengths, self._begins, self._sizes = numbers
        self.sets = torch.repeat_interleave(lengths, output_size=sum(self.lengths))
        joined = torch.cat(list(ids))
        is_within = (joined >= 0) & (joined < self._sizes[self.sets])
        self.indices = torch.where(is_within, joined, 0) + self._begins[self.sets]

    def new_padded(self, is_marked: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return, for each set, the ids whose rows are not marked.

        Args:
            is_marked: ``[N]`` bool, True for each of :attr:`indices` whose row is marked.

        Returns:
            Two sequences with one tensor for each set: ``[N_t]`` int64, the unique ids of unmarked rows in ascending
            order, followed by -1 as padding; and ``[1]`` int64, the number of these ids.
        """
        # A set of R rows has R + 1 keys here. The last key is greater than those of its rows and less than those of the
        # next set. Therefore sorting moves no key to the keys of another set.
        first_keys = self._begins + torch.arange(len(self.lengths), device=self._begins.device)
        last_key = (first_keys + self._sizes)[self.sets]
        keys = torch.where(is_marked, last_key, self.indices + self.sets).sort().values
        is_new = keys < last_key
        is_new[1:] &= keys[1:] != keys[:-1]
        keys = torch.where(is_new, keys, last_key).sort().values
        ids = torch.where(keys < last_key, keys - first_keys[self.sets], -1)
        counts = torch.zeros_like(self._begins).index_add_(0, self.sets, is_new.long())
        return torch.split(ids, self.lengths), torch.split(counts, 1)


class TorchRows(RowSet):
    """Row set with one byte for each row of the shard. Each scan reads all bytes.

    :meth:`mark_new` returns ids in ascending order. :meth:`rank` waits for the device. On devices other than the CPU,
    :meth:`create_each` stores the sets in one tensor, and :meth:`mark_each` and :meth:`mark_new_padded_each` run a
    fixed number of operations for these sets. :meth:`count_each` waits once for all sets. :meth:`scan_each` waits once
    for all counts and once for each 64 MiB of sets.

    Args:
        num_rows: ``R``, 1 or more.
        device: device of the set and of all ids.
        shared: ``[S]`` bool tensor for the marks of several sets. The ``R`` marks of this set must be False. None to
            allocate a tensor for this set only.
        begin: index of this set's first mark in ``shared``.

    Attributes:
        shared: tensor of the marks of this set, and of all sets that the same call of :meth:`create_each` returned.
        begin: index of this set's first mark in ``shared``.

    Example:
        >>> rows = TorchRows(8, torch.device("cpu"))
        >>> rows.mark(torch.tensor([5, 2, 5]))
        >>> rows.mark_new(torch.tensor([7, 2, 7, 1]))
        tensor([1, 7])
        >>> rows.scan()
        tensor([1, 2, 5, 7])
    """

    row_bits = 8

    def __init__(self, num_rows: int, device: torch.device, *, shared: Tensor | None = None, begin: int = 0) -> None:
        super().__init__(num_rows, device)
        self.shared = _no_marks(num_rows, device) if shared is None else shared
        self.begin = begin
        self._marks = self.shared if shared is None else shared[begin : begin + num_rows]

    @classmethod
    def serves(cls, device: torch.device) -> bool:  # noqa: ARG003  torch supports every device
        """Return True: torch supports all devices."""
        return True

    @classmethod
    def create_each(cls, nums_rows: Sequence[int], device: torch.device) -> list[Self]:
        """Return an empty set for each number of rows. Except on the CPU, the sets share one tensor."""
        if len(nums_rows) < 2 or device.type == "cpu":  # noqa: PLR2004  one set shares nothing
            return super().create_each(nums_rows, device)
        shared = _no_marks(sum(nums_rows), device)
        ranges = zip(nums_rows, accumulate(nums_rows, initial=0), strict=False)
        return [cls(num_rows, device, shared=shared, begin=begin) for num_rows, begin in ranges]

    @classmethod
    def mark_each(cls, sets: Sequence[Self], ids: Sequence[Tensor]) -> None:
        """Add rows to each set. Marks all sets that share a tensor together."""
        for group, own in _sharing(sets, ids):
            if len(group) == 1:
                group[0].mark(own[0])
            else:
                group[0].shared.index_fill_(0, cls._joint(group, own).indices, True)

    @classmethod
    def mark_new_padded_each(cls, sets: Sequence[Self], ids: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return the result of :meth:`mark_new_padded` for each set. Marks all sets that share a tensor together."""
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for group, own in _sharing(sets, ids):
            if len(group) == 1:
                found[id(group[0])] = group[0].mark_new_padded(own[0])
                continue
            shared, joint = group[0].shared, cls._joint(group, own)
            new = joint.new_padded(shared.index_select(0, joint.indices))
            shared.index_fill_(0, joint.indices, True)
            found |= zip(map(id, group), zip(*new, strict=True), strict=True)
        return [found[id(each)] for each in sets]

    @classmethod
    def scan_each(cls, sets: Sequence[Self]) -> list[Tensor]:
        """Return the result of :meth:`scan` for each set."""
        if len(sets) < 2 or sets[0].device.type == "cpu":  # noqa: PLR2004  one set needs no counts
            return super().scan_each(sets)
        found: list[Tensor] = []
        counts = cls.count_each(sets)
        for group in _joined(sets):
            (marks,) = group[0].tensors
            if len(group) > 1:
                marks = torch.cat([marks for each in group for marks in each.tensors])
            sizes, counts = counts[: len(group)], counts[len(group) :]
            begin = 0
            for each, ids in zip(group, torch.split(marks.nonzero().flatten(), sizes), strict=True):
                found.append(ids - begin)
                begin += each.num_rows
        return found

    @classmethod
    def count_each(cls, sets: Sequence[Self]) -> list[int]:
        """Return the result of :meth:`count` for each set."""
        if len(sets) < 2 or sets[0].device.type == "cpu":  # noqa: PLR2004  one set needs no stack
            return super().count_each(sets)
        counts: list[int] = torch.stack([marks.count_nonzero() for each in sets for marks in each.tensors]).tolist()
        return counts

    @staticmethod
    def _joint(sets: "Sequence[TorchRows]", ids: Sequence[Tensor]) -> JointIds:
        return JointIds(ids, [each.begin for each in sets], [each.num_rows for each in sets])

    @property
    def num_bytes(self) -> int:
        """Size of the set in bytes: one byte for each row of the shard."""
        return self._marks.nbytes

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensor of the set's marks, ``[R]`` bool."""
        return (self._marks,)

    def mark(self, ids: Tensor) -> None:
        """Add the rows with the given ids. See :meth:`RowSet.mark`."""
        self._marks.index_fill_(0, within(ids, self.num_rows), True)

    def mark_all(self) -> None:
        """Add all rows. See :meth:`RowSet.mark_all`."""
        self._marks.fill_(True)

    def clear(self) -> None:
        """Remove all rows. See :meth:`RowSet.clear`."""
        self._marks.zero_()

    def mark_new(self, ids: Tensor) -> Tensor:
        """Add rows and return the ids that were not in the set. See :meth:`RowSet.mark_new`."""
        ids = within(ids, self.num_rows)
        fresh = torch.unique(ids.masked_select(~self._marks.index_select(0, ids)))
        self._marks.index_fill_(0, fresh, True)
        return fresh

    def mark_new_padded(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Add rows and return the padded ids that were not in the set. See :meth:`RowSet.mark_new_padded`."""
        ids = within(ids, self.num_rows)
        none = self.num_rows  # sorts after every row
        ordered = torch.where(self._marks.index_select(0, ids), none, ids).sort().values
        first = ordered < none
        first[1:] &= ordered[1:] != ordered[:-1]
        self._marks.index_fill_(0, ids, True)
        ordered = torch.where(first, ordered, none).sort().values
        return torch.where(ordered < none, ordered, -1), first.sum(0, keepdim=True)

    def contains(self, ids: Tensor) -> Tensor:
        """Return ``[N]`` bool, True for each id whose row is in the set. See :meth:`RowSet.contains`."""
        return self._marks.index_select(0, within(ids, self.num_rows))

    def merge(self, other: Self) -> None:
        """Add all rows of another set. See :meth:`RowSet.merge`."""
        self._marks |= other._marks

    def scan(self) -> Tensor:
        """Return the ids of all marked rows, ascending. See :meth:`RowSet.scan`."""
        return self._marks.nonzero().flatten()

    def count(self) -> int:
        """Return the number of marked rows. See :meth:`RowSet.count`."""
        return int(self._marks.count_nonzero())


def _no_marks(num_rows: int, device: torch.device) -> Tensor:
    # A tensor created in inference mode cannot be written in place outside it.
    with torch.inference_mode(mode=False):
        return torch.zeros(num_rows, dtype=torch.bool, device=device)


def _sharing(
    sets: Sequence[TorchRows], ids: Sequence[Tensor]
) -> Iterator[tuple[Sequence[TorchRows], Sequence[Tensor]]]:
    """Yield each group of sets that share a tensor, ordered by ``begin``, together with the ids of the sets."""
    groups: dict[int, list[int]] = {}
    for number, each in enumerate(sets):
        groups.setdefault(id(each.shared), []).append(number)
    for numbers in groups.values():
        numbers.sort(key=lambda number: sets[number].begin)
        yield [sets[number] for number in numbers], [ids[number] for number in numbers]


def _joined(sets: Sequence[TorchRows]) -> Iterator[Sequence[TorchRows]]:
    """Yield the sets in groups of at most 64 MiB. A larger set is a group of its own."""
    first = num_bytes = 0
    for number, each in enumerate(sets):
        if number > first and num_bytes + each.num_bytes > _JOINED_BYTES:
            yield sets[first:number]
            first, num_bytes = number, 0
        num_bytes += each.num_bytes
    yield sets[first:]
