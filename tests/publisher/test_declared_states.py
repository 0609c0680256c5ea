"""The states of whole tables, from those that each rank declares of its column ranges."""

from __future__ import annotations

import json

import pytest
import torch
from msgspec import to_builtins

from delta_tracker.errors import RankFailedError
from delta_tracker.publisher.coordinator import declared_states
from delta_tracker.types import StateSpec, TableSpec, TableStates

_MOMENTUM = StateSpec("momentum1", torch.float32, "range")
_TABLES = {fqn: TableSpec(fqn, 10, 8, torch.float32) for fqn in ("a", "b", "unfused")}


def _declared(*ranks: dict[str, TableStates]) -> dict[str, TableStates]:
    return declared_states([json.loads(json.dumps(to_builtins(rank))) for rank in ranks], _TABLES)


def _states(*columns: tuple[int, int], optimizer: str = "EXACT_ROWWISE_ADAGRAD") -> TableStates:
    return TableStates(optimizer, columns, (_MOMENTUM,))


def test_the_column_ranges_of_all_ranks_are_united() -> None:
    first, last = _states((0, 4)), _states((4, 6), (6, 8))
    found = _declared({"b": first}, {}, {"b": last, "a": _states((0, 8))}, {"b": first})
    assert found == {"a": _states((0, 8)), "b": _states((0, 4), (4, 6), (6, 8))}
    assert list(found) == ["a", "b"]
    assert _declared({}, {}) == {}


@pytest.mark.parametrize(
    "other",
    [
        _states((4, 8), optimizer="EXACT_ADAGRAD"),
        TableStates("EXACT_ROWWISE_ADAGRAD", ((4, 8),), ()),
        TableStates("EXACT_ROWWISE_ADAGRAD", ((4, 8),), (StateSpec("momentum1", torch.float16, "range"),)),
        _states((4, 7)),
        _states((2, 8)),
    ],
)
def test_ranks_that_do_not_fit_together_are_refused(other: TableStates) -> None:
    with pytest.raises(RankFailedError, match=r"optimizer|column"):
        _declared({"a": _states((0, 4))}, {"a": other})
