"""Publishing during training: cadence, back-pressure, snapshots of changing tables, encodings, dense tensors."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from delta_tracker import Encoding
from tests.ranks import RankPool

_CASES = "tests.publisher.background_cases"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/stream"


def test_versions_are_cut_at_the_same_batch_on_all_ranks(two_ranks: RankPool, url: str) -> None:
    for answer in two_ranks.run(f"{_CASES}:cadence", url=url):
        assert answer["kinds"][0] == "snapshot"
        assert set(answer["kinds"][1:]) == {"delta"}
        assert len(answer["kinds"]) >= 4
        ends = [end for _, end in answer["cuts"]]
        assert ends == sorted(ends)
        assert all(later >= earlier + 3 for earlier, later in itertools.pairwise(ends[1 : answer["stepped"]]))


def test_a_slow_store_slows_publishing_and_not_training(two_ranks: RankPool, url: str) -> None:
    for answer in two_ranks.run(f"{_CASES}:slow_store", url=url):
        assert answer["waited"] == 0
        assert max(end - first for first, end in answer["cuts"]) >= 25


def test_a_snapshot_is_copied_while_training_continues(two_ranks: RankPool, url: str) -> None:
    for answer in two_ranks.run(f"{_CASES}:copied_while_training", url=url):
        assert answer["kinds"][:2] == ["snapshot", "delta"]
        assert answer["first"][1] > 6, "it was cut after the copy"
        assert answer["listed"] > 0, "rows changed meanwhile"
        assert answer["consumers"] == ["default"]


def test_a_store_failure_does_not_affect_training(two_ranks: RankPool, url: str) -> None:
    first, last = two_ranks.run(f"{_CASES}:broken_store", url=url)
    assert "rank 1 failed with StorageError" in first["error"]
    assert "the network is unreachable" in last["error"]
    assert all(answer["flushed"].startswith("FencedError") for answer in (first, last))


def test_versions_are_announced_merged_and_removed_during_training(two_ranks: RankPool, url: str) -> None:
    for answer in two_ranks.run(f"{_CASES}:kept_up", url=url):
        claim, *versions = answer["versions"]
        assert claim == 0, "claims are kept"
        assert versions == list(range(versions[0], versions[-1] + 1))
        assert versions[0] > 1, "old versions are gone"
        assert answer["merged"] > 0
        assert answer["beats"] == ["rank-0", "rank-1"]


@pytest.mark.parametrize("encoding", Encoding)
def test_every_encoding(two_ranks: RankPool, url: str, encoding: Encoding) -> None:
    two_ranks.run(f"{_CASES}:encoded", url=url, encoding=encoding)


def test_unsupported_models_and_arguments_are_refused_by_the_constructor(one_rank: RankPool, url: str) -> None:
    (said,) = one_rank.run(f"{_CASES}:refused", url=url)
    assert said.keys() == {"top_k", "dense", "cadence", "name taken", "close"}
    assert all(message.startswith("InvalidArgumentError") for message in said.values()), said
