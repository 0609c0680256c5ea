"""State of a stream in a row store."""

from __future__ import annotations

import json

import pytest
import torch

from delta_tracker.errors import InvalidArgumentError, MalformedSinkError
from delta_tracker.sinks.row_sink import SinkState
from delta_tracker.types import Bucket, Identity, TableSpec

_STATE = SinkState(
    stream="0" * 32,
    version=3,
    xxh3="1" * 32,
    applying=5,
    applying_xxh3="2" * 32,
    applying_generation=4,
    is_mixed=True,
    is_settling=True,
    tables={"user": TableSpec("user", 10, 4, torch.float32), "item": TableSpec("item", 6, 2, torch.bfloat16)},
    identities={"user": Identity(100, (Bucket((0, 4), 3), Bucket((4, 10), 9)))},
    default_slots={"user": (3, 9)},
)


def test_a_state_is_read_back() -> None:
    assert SinkState.from_json(_STATE.to_json()) == _STATE


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"stream": "../x"},
        {"version": -1},
        {"version": None},
        {"xxh3": None},
        {"applying": None},
        {"is_mixed": 1},
        {"extra": 0},
        {"tables": {"user": {"fqn": "user", "num_rows": 10, "dim": 0, "dtype_name": "float32"}}},
        {"tables": {"user": {"fqn": "user", "num_rows": 10, "dim": 4, "dtype_name": "int64"}}},
        {"tables": {}},
        {"tables": {"user": {"num_rows": 10, "dim": 4, "dtype": "I64"}}},
        {"tables": {"user": {"num_rows": 10, "dim": 4, "dtype": []}}},
        {"tables": {"user": {"dim": 4, "dtype": "F32"}}},
        {"tables": {"user": ["dtype"]}},
        {"tables": [1]},
        {"default_slots": {"user": [10]}},
        {"default_slots": {"other": [0]}},
        {"identities": {"user": {"hash_size": 100, "buckets": []}}},
        {"identities": {"item": {"hash_size": 100, "buckets": [{"rows": [0, 5], "default": None}]}}},
    ],
)
def test_an_invalid_state_is_refused(change: dict[str, object]) -> None:
    data = json.dumps({**json.loads(_STATE.to_json()), **change}).encode()
    with pytest.raises(MalformedSinkError, match="its state in the row store is invalid"):
        SinkState.from_json(data)


def test_bytes_that_are_no_state_are_refused() -> None:
    for data in (b"", b"{}", b"\xff", _STATE.to_json()[:-1], b"[" * 100_000):
        with pytest.raises(MalformedSinkError):
            SinkState.from_json(data)


def test_a_table_of_integers_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="Give table 'user' one of"):
        SinkState(stream="0" * 32, tables={"user": TableSpec("user", 10, 4, torch.int64)})
