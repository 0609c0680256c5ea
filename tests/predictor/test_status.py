"""The status of a predictor counts what was applied."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from delta_tracker import Predictor
from tests.stream.histories import Clock, ClockedStorage
from tests.stream.streams import Writer


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    with clock.of_the_log():
        yield clock


def test_the_status_counts_what_was_applied(clock: Clock) -> None:
    writer = Writer(ClockedStorage(clock))
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
