"""Functions on changed rows."""

from __future__ import annotations

import torch

from delta_tracker.rows import ChangedRows, first_per_id, last_per_id, merge_first


def test_first_last_and_merge() -> None:
    ids, states = torch.tensor([5, 1, 5, 1, 0]), torch.tensor([50, 10, 51, 11, 0])
    assert [each.tolist() for each in first_per_id(ids, states)] == [[0, 1, 5], [0, 10, 50]]
    assert [each.tolist() for each in last_per_id(ids, states)] == [[0, 1, 5], [0, 11, 51]]
    some, none = ChangedRows(torch.tensor([1, 2])), ChangedRows(torch.empty(0, dtype=torch.int64))
    assert merge_first(some, none) is some
    assert merge_first(none, some) is some
    merged = merge_first(some.aged(), ChangedRows(torch.tensor([2, 3])))
    assert (merged.ids.tolist(), merged.ages.tolist()) == ([1, 2, 3], [1, 1, 0])
