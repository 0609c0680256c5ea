"""The status of a predictor counts what was applied."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from delta_tracker import ModelTarget, Predictor, Rollout, Storage
from delta_tracker.errors import StreamError
from delta_tracker.stream.pin import PinReader
from delta_tracker.stream.pinning import pin_version, release_pin
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
    assert (status.stream, status.version, status.counts.rows, status.counts.num_bytes, status.lag_versions) == (
        None,
        None,
        0,
        0,
        3,
    )
    predictor.sync()
    manifests.append(writer.delta([4]))
    predictor.sync()
    status = predictor.status()
    assert (status.stream, status.version) == (writer.claim.head.stream, 3)
    assert status.counts.rows == 20 + 3 + 1
    assert status.counts.num_bytes == sum(manifest.num_bytes for manifest in manifests)
    assert (status.lag_versions, status.resyncs, status.last_resync, status.pinned) == (0, 0, "", None)


def test_the_status_says_why() -> None:
    """The rules are in `guide/fleet.md`."""
    writer = Writer(Storage("memory://"))
    predictor = Predictor(ModelTarget(writer.model(), dense=False), writer.storage, rollout=Rollout(follows_pins=True))
    predictor._reader.source.pins = PinReader(seconds=0.0)
    seen = [predictor.status().why]

    def look(limit: int | None = None) -> None:
        with suppress(StreamError):
            predictor.sync(limit)
        seen.append(predictor.status().why)

    look()
    writer.snapshot()
    look(limit=1)
    writer.delta([1])
    look(limit=1)
    look()
    pin_version(writer.storage, 1)
    look(limit=1)
    look()
    writer.snapshot()
    release_pin(writer.storage)
    look(limit=1)
    predictor.rollback(1)
    seen.append(predictor.status().why)
    predictor.release()
    seen.append(predictor.status().why)
    look(limit=1)
    assert seen == [
        "",
        "nothing can be applied: NoSnapshotError",
        "applied version 1: the tables have no rows of the stream yet, or mixed ones",
        "applied version 2: the next version is committed",
        "version 2 is the newest",
        "applied version 1: a pin or a rollback applies",
        "pinned to version 1",
        "applied version 3: a pin was released",
        "pinned to version 1",
        "",
        "applied version 3: a pin was released",
    ]


def test_the_log_says_why_a_predictor_waits_or_leaves_a_pin(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    predictor = Predictor(ModelTarget(writer.model(), dense=False), writer.storage, rollout=Rollout(follows_pins=True))
    predictor._reader.source.pins = PinReader(seconds=0.0)
    pin_version(writer.storage, 1)
    for _ in range(3):
        predictor.sync()
    assert caplog.text.count("reader waits: pinned to version 1") == 1
    writer.snapshot()
    release_pin(writer.storage)
    predictor.sync()
    assert "applied version 2: a pin was released: url=memory:// former=1" in caplog.text


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
            assert len(s3.asked) <= 8
            assert "GET " not in s3.asked, "a listing"
