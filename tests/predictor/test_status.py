"""The status of a predictor counts what was applied."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from delta_tracker import Predictor, Storage
from tests.stream.histories import Clock, clocked
from tests.stream.slow_s3 import slow_s3
from tests.stream.streams import Writer


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    with clock.of_the_log():
        yield clock


def test_the_status_counts_what_was_applied(clock: Clock) -> None:
    writer = Writer(clocked(clock))
    manifests = [writer.snapshot(), writer.delta([1, 2, 3])]
    predictor = Predictor(writer.model(), writer.storage)
    status = predictor.status()
    assert (status.stream, status.version, status.rows, status.num_bytes, status.lag_versions) == (None, None, 0, 0, 3)
    predictor.sync()
    manifests.append(writer.delta([4]))
    predictor.sync()
    status = predictor.status()
    assert (status.stream, status.version) == (writer.claim.head.stream, 3)
    assert status.rows == 20 + 3 + 1
    assert status.num_bytes == sum(manifest.num_bytes for manifest in manifests)
    assert (status.lag_versions, status.resyncs, status.last_resync, status.pinned) == (0, 0, "", None)


@pytest.mark.parametrize("ahead", [3600.0, -3600.0])
def test_the_lag_does_not_depend_on_the_publishers_clock(clock: Clock, ahead: float) -> None:
    clock.seconds = time.time()
    with clock.of_the_log(ahead):
        writer = Writer(clocked(clock))
        writer.snapshot()
        predictor = Predictor(writer.model(), writer.storage)
        predictor.sync()
        before = time.monotonic()
        for number in range(4):
            clock.seconds += 10
            writer.delta([number])
        status = predictor.status()
        assert status.lag_versions == 4
        assert 30 < status.lag_seconds <= 30 + time.monotonic() - before
        # Nothing new: the age grows with this process's clock.
        assert status.lag_seconds < predictor.status().lag_seconds <= 30 + time.monotonic() - before
        predictor.sync(limit=3)
        status = predictor.status()
        assert status.lag_versions == 1
        assert 0 < status.lag_seconds <= time.monotonic() - before
        predictor.sync()
        assert (predictor.status().lag_versions, predictor.status().lag_seconds) == (0, 0.0)


def test_the_lag_behind_a_log_that_is_gone_is_unknown(clock: Clock) -> None:
    writer = Writer(clocked(clock))
    writer.snapshot()
    predictor = Predictor(writer.model(), writer.storage)
    predictor.sync()
    for name in writer.storage.names("log"):
        writer.storage.delete(name)
    status = predictor.status()
    assert (status.lag_versions, status.lag_seconds) == (None, None)


def test_a_status_is_few_requests() -> None:
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    with slow_s3(writer.storage) as s3:
        predictor = Predictor(writer.model(), s3.storage())
        predictor.sync()
        for number in range(3):
            writer.delta([number])
            s3.asked.clear()
            assert predictor.status().lag_versions == number + 1
            assert len(s3.asked) <= 7
            assert "GET " not in s3.asked, "a listing"
