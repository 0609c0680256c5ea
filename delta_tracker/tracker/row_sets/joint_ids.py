"""Ids of several sets whose marks are in one tensor, so that one operation marks the rows of all sets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class JointIds:
    """Ids of ``T`` sets of rows, as indices of one tensor in which the marks of all sets are.

    The constructor takes a fixed number of operations and does not wait for the device. Notation: ``N`` is the number
    of ids of all sets.

    Args:
        ids: ``[N_t]`` int64 local ids of each set. An id outside the set counts as row 0.
        begins: index of the first row of each set in the tensor, ascending.
        sizes: number of rows of each set, 1 or more.

    Attributes:
        lengths: number of ids of each set.
        sets: ``[N]`` int64, position of the set of each id in ``ids``.
        indices: ``[N]`` int64, index of the row of each id. The ids of a set are together, in the order of the sets.

    Example:
        >>> joint = JointIds([torch.tensor([1, 9]), torch.tensor([2])], begins=[0, 4], sizes=[4, 3])
        >>> joint.indices
        tensor([1, 0, 6])
    """

    def __init__(self, ids: Sequence[Tensor], begins: Sequence[int], sizes: Sequence[int]) -> None:
        device = ids[0].device
        self.lengths = [len(each) for each in ids]
        numbers = torch.tensor([self.lengths, begins, sizes])
        # Pinned memory is reused only after the copy. On other devices than the CPU and CUDA, FBGEMM has no lookups.
        numbers = (numbers.pin_memory() if device.type == "cuda" else numbers).to(device, non_blocking=True)
        lengths, self._begins, self._sizes = numbers
        self.sets = torch.repeat_interleave(lengths, output_size=sum(self.lengths))
        joined = torch.cat(list(ids))
        is_within = (joined >= 0) & (joined < self._sizes[self.sets])
        self.indices = torch.where(is_within, joined, 0) + self._begins[self.sets]

    def new_padded(self, is_marked: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return the ids of the unmarked rows.

        Args:
            is_marked: ``[N]`` bool, True for each index whose row is marked.

        Returns:
            For each set, ``[N_t]`` int64, the unique ids of its unmarked rows in ascending order, followed by -1 as
            padding; and, for each set, ``[1]`` int64, the number of these ids.
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
