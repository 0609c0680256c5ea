"""Value types of the tracker validate their fields."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.types import Delta, DeltaRows, ShardSpec, TableSpec

_TABLE = TableSpec("ec.user", num_rows=10, dim=8, dtype=torch.float32)


@pytest.mark.parametrize(("num_rows", "dim"), [(-1, 8), (10, 0), (10, -1)])
def test_a_table_has_rows_and_columns(num_rows: int, dim: int) -> None:
    with pytest.raises(InvalidArgumentError, match="TableSpec"):
        TableSpec("t", num_rows, dim, torch.float32)
    assert str(_TABLE) == "10 x 8 float32"


@pytest.mark.parametrize(
    ("offset", "num_rows", "columns"),
    [
        (-1, 5, ((0, 8),)),
        (6, 5, ((0, 8),)),
        (0, -1, ()),
        (0, 5, ((0, 9),)),
        (0, 5, ((4, 8), (0, 4))),
        (0, 5, ((4, 2),)),
    ],
)
def test_a_shard_lies_inside_its_table(offset: int, num_rows: int, columns: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(InvalidArgumentError, match="ShardSpec"):
        ShardSpec(_TABLE, offset, num_rows, columns)


def test_ids_are_local_ids_of_the_shard() -> None:
    shard = ShardSpec(_TABLE, 5, 5, ((0, 2), (4, 8)))
    assert shard.num_columns == 6
    shard.check_ids(torch.tensor([0, 4]))
    for ids in (torch.tensor([5]), torch.tensor([-1]), torch.tensor([[0]]), torch.tensor([0.0]), torch.tensor([True])):
        with pytest.raises(InvalidArgumentError, match="ids"):
            shard.check_ids(ids)


def test_rows_of_a_delta_have_one_state_and_one_value_each() -> None:
    ids, shard = torch.tensor([0, 3]), ShardSpec(_TABLE, 5, 5, ((0, 8),))
    rows = DeltaRows(ids, torch.zeros(2, 8), torch.ones(2, 8), shard=shard)
    assert (len(rows), rows.global_ids.tolist()) == (2, [5, 8])
    assert DeltaRows(ids).global_ids.tolist() == [0, 3]
    for name in ("states", "values"):
        with pytest.raises(InvalidArgumentError, match=name):
            DeltaRows(ids, **{name: torch.zeros(3, 8)})
    for bad in (ids.float(), ids.view(2, 1)):
        with pytest.raises(InvalidArgumentError, match="ids"):
            DeltaRows(bad)


def test_a_delta_is_a_mapping_of_its_tables() -> None:
    rows = DeltaRows(torch.tensor([0, 3]))
    delta = Delta({"a": rows, "b": DeltaRows(torch.tensor([1]))}, consumer="c", start=0, stop=1, batches=(0, 1))
    assert (list(delta), len(delta), delta["a"] is rows, delta.num_rows, delta.pending_rows) == (
        ["a", "b"],
        2,
        True,
        3,
        0,
    )


def test_a_table_is_changed_by_replace() -> None:
    assert replace(_TABLE, num_rows=5) == TableSpec("ec.user", 5, 8, torch.float32)
    assert replace(_TABLE, dtype=torch.float16).dtype is torch.float16
    with pytest.raises(InvalidArgumentError, match="dtype"):
        TableSpec("ec.user", 5, 8)
