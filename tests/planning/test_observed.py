"""What the entries of a stream show of its workload."""

from __future__ import annotations

from pathlib import Path

import pytest

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.planning.observed import observe
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Storage
from tests.stream.streams import Writer


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
