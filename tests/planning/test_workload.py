"""A workload is refused by name if it is invalid."""

from __future__ import annotations

import pytest
import torch

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.planning.workload import Workload
from delta_tracker.types import TableSpec

_TABLE = TableSpec("t", 1000, 4, torch.float32)


def _load(**options) -> Workload:
    return Workload(**({"tables": (_TABLE,), "changed": 0.01, "seconds": 60.0} | options))


@pytest.mark.parametrize(
    "options",
    [
        {"tables": ()},
        {"tables": (_TABLE, _TABLE)},
        {"changed": -0.1},
        {"changed": float("nan")},
        {"changed": {"other": 0.1}},
        {"seconds": 0.0},
        {"seconds": float("inf")},
        {"poll_seconds": True},
        {"ranks": 0},
        {"ranks": 1.0},
        {"ranks": 200_001},
        {"predictors": -1},
        {"consumers": 0},
        {"snapshot_every": 0},
        {"retained_versions": 0},
        {"dense_bytes": -1},
    ],
)
def test_an_invalid_workload_is_refused_by_name(options: dict) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(options))):
        _load(**options)


def test_rates_may_differ_by_table() -> None:
    other = TableSpec("u", 500, 4, torch.float32)
    load = _load(tables=(_TABLE, other), changed={"t": 0.5, "u": 8.0})
    assert (load.rows_per_version(_TABLE), load.rows_per_version(other)) == (500, 500), "at most all rows"
