"""A workload is refused by name if it is invalid, and is read from the entries of a stream."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.planning.workload import Workload, observe
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import TableSpec
from tests.stream.streams import Writer

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


def test_what_a_stream_shows(tmp_path: Path) -> None:
    writer = Writer(Storage(tmp_path.as_uri(), create=True), num_rows=100, encoding=Encoding.INT8)
    for number in range(9):
        writer.delta([number, 50 + number]) if number % 3 else writer.snapshot()
    found = observe(StreamLog(writer.storage))
    assert (found.encoding, found.ranks, found.snapshot_every, found.tables) == (Encoding.INT8, 1, 3, (writer.spec,))
    assert list(found.changed.values()) == [pytest.approx(0.02 * 60 / found.seconds)]
    assert found.dense_bytes == 0


def test_a_stream_without_rates_is_refused(tmp_path: Path) -> None:
    writer = Writer(Storage(tmp_path.as_uri(), create=True))
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="two deltas or more"):
            observe(StreamLog(writer.storage))
        writer.delta([1])
