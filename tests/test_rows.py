"""Functions on changed rows."""

from __future__ import annotations

import torch

from delta_tracker.rows import ChangedRows, first_per_id, last_per_id, merge_first, split_by_mask
from tests.syncs import find_syncs, held, on_device


def test_first_last_and_merge() -> None:
    ids, states = torch.tensor([5, 1, 5, 1, 0]), torch.tensor([50, 10, 51, 11, 0])
    assert [each.tolist() for each in first_per_id(ids, states)] == [[0, 1, 5], [0, 10, 50]]
    assert [each.tolist() for each in last_per_id(ids, states)] == [[0, 1, 5], [0, 11, 51]]
    some, none = ChangedRows(torch.tensor([1, 2])), ChangedRows(torch.empty(0, dtype=torch.int64))
    assert merge_first(some, none) is some
    assert merge_first(none, some) is some
    merged = merge_first(some.aged(), ChangedRows(torch.tensor([2, 3])))
    assert (merged.ids.tolist(), merged.ages.tolist()) == ([1, 2, 3], [1, 1, 0])


def test_masks_on_a_device_are_split_with_one_wait() -> None:
    """A top-k read once waited twice for each table."""
    generator = torch.Generator().manual_seed(0)
    masks = {str(size): torch.rand(size, generator=generator) < 0.3 for size in (0, 1, 5, 100)}
    with find_syncs() as found:
        split = split_by_mask({name: on_device(mask) for name, mask in masks.items()})
    assert len(found) == 1
    for name, mask in masks.items():
        chosen, others = split[name]
        assert torch.equal(held(chosen), mask.nonzero().flatten())
        assert torch.equal(held(others), (~mask).nonzero().flatten())


def test_former_owners_are_kept() -> None:
    older = ChangedRows(torch.tensor([2, 5]), former=torch.tensor([20, 50]))
    newer = ChangedRows(torch.tensor([1, 5]), former=torch.tensor([11, 51]))
    merged = merge_first(older.aged(), newer)
    assert merged.former is not None
    assert merged.former.tolist() == [11, 20, 50]
    for rows in (merged.copy(), merged.aged(), merged.without_states(), merged.take(torch.arange(3))):
        assert rows.former is not None
        assert rows.former.tolist() == [11, 20, 50]
    assert merged.num_bytes == 3 * (8 + 4 + 8)
