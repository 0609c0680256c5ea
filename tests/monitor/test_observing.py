"""What publisher and predictor count, on real streams."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from delta_tracker import Predictor, Storage
from delta_tracker.errors import CorruptPartError, FencedError
from delta_tracker.monitor.default import MONITOR, metrics
from delta_tracker.monitor.stat import Kind
from delta_tracker.predictor.observing import count_failure, count_published, watch_publisher
from tests.ranks import RankPool
from tests.stream.streams import FQN, Writer


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


def test_a_collection_during_a_long_read_waits_for_it_a_moment_only(one_rank: RankPool) -> None:
    (answer,) = one_rank.run("tests.monitor.monitoring_cases:figures_during_a_read")
    assert answer == {"left out": 4, "errors": 0}


def test_a_tracker_tells_what_it_sees_and_holds(two_ranks: RankPool) -> None:
    answers = two_ranks.run("tests.monitor.monitoring_cases:tracker_figures")
    looked_up = {
        name: sum(answer["looked up"][name] for answer in answers) for name in ("row", "first", "second", "last")
    }
    counted = {name: sum(answer["counted"][name] for answer in answers) for name in answers[0]["counted"]}
    assert counted == {
        "row": looked_up["row"],
        "first": looked_up["first"] + looked_up["second"],
        "last": looked_up["last"],
        "shared": looked_up["row"],
    }
    assert all(answer["faults"] >= 4 for answer in answers)


def test_the_lag_of_a_predictor_is_read_while_it_lives(tmp_path: Path, monkeypatch) -> None:
    writer = Writer(Storage(f"file://{tmp_path}", create=True))
    writer.snapshot()
    predictor = Predictor(writer.model(), writer.storage)
    predictor.sync()
    MONITOR.collect()
    assert metrics.predictor_lag_versions.cell().lifetime().last == 0
    for _ in range(3):
        writer.delta([1])
    MONITOR.collect()
    assert metrics.predictor_lag_versions.cell().lifetime().last == 3
    assert metrics.predictor_lag_seconds.cell().lifetime().last > 0
    predictor.sync()
    MONITOR.collect()
    assert metrics.predictor_lag_versions.cell().lifetime().last == 0
    monkeypatch.setattr(predictor._follower, "lag", lambda: None)
    MONITOR.collect()
    assert metrics.predictor_lag_versions.cell().lifetime().count == 0, "a store that does not answer is no lag of 0"


def test_faults_are_exposed_as_zero_before_they_happen() -> None:
    watch_publisher(counts_versions=True)
    predictor = Predictor({FQN: torch.zeros(3, 2)}, Storage("memory://"))
    names = {name for name, _ in _counts()}
    assert {"fences", "publish_failures", "resyncs", "refused_parts"} <= names
    assert ("resyncs", (("reason", "CorruptPartError"),)) in _counts()
    assert ("publish_failures", (("reason", "StorageError"),)) in _counts()
    assert ("published_versions", (("kind", "delta"),)) in _counts()
    assert predictor.version is None


def test_lookups_that_nobody_counts_are_not_told_as_zero(one_rank: RankPool) -> None:
    assert one_rank.run("tests.monitor.monitoring_cases:compared_lookups") == [[False, True]]
