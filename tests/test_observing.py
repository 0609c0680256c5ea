"""What publisher and predictor count, on real streams."""

from __future__ import annotations

from pathlib import Path

import pytest

from delta_tracker import Predictor, Storage
from delta_tracker.errors import CorruptPartError, FencedError
from delta_tracker.monitor.default import MONITOR
from delta_tracker.monitor.stat import Kind
from delta_tracker.observing import count_failure, count_published
from tests.streams import FQN, Writer


def _counts() -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every counter of the library, by name and labels."""
    return {
        (stat.name.removeprefix("delta_tracker_"), tuple(sorted(cell.labels))): cell.collect_total()
        for stat in MONITOR.find("delta_tracker_*", kind=Kind.COUNTER)
        for cell in stat.cells
    }


@pytest.fixture
def grown() -> object:
    before = _counts()

    def since(name: str, **labels: str) -> float:
        key = name, tuple(sorted(labels.items()))
        return _counts().get(key, 0.0) - before.get(key, 0.0)

    return since


def test_a_predictor_counts_what_it_applies_and_goes_around(tmp_path: Path, grown) -> None:
    writer = Writer(Storage(f"file://{tmp_path}", create=True))
    writer.snapshot()
    predictor = Predictor(writer.model(), writer.storage)
    predictor.sync()
    damaged = writer.delta([1, 2])
    (tmp_path / damaged.parts[0].name).write_bytes(b"x")
    with pytest.raises(CorruptPartError):
        predictor.sync()
    writer.snapshot()
    predictor.sync()
    assert grown("applied_versions", kind="snapshot") == 2
    assert grown("applied_rows", table=FQN) == 40
    assert grown("resyncs", reason="CorruptPartError") == 1
    assert grown("refused_parts", reason="corrupt") == 1


def test_versions_and_failures_of_a_publisher_are_counted(grown) -> None:
    writer = Writer(Storage("memory://"))
    count_published(writer.snapshot())
    manifest = writer.delta([1, 5, 7])
    count_published(manifest)
    count_failure(FencedError(1, 2, 3))
    assert grown("published_versions", kind="delta") == 1
    assert grown("published_rows", table=FQN) == 23
    assert grown("published_bytes", kind="delta") == manifest.num_bytes
    assert (grown("fences"), grown("publish_failures", reason="FencedError")) == (1, 1)
