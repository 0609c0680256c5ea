"""Restores of models with managed collisions, at the same and at other numbers of ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankPool
from tests.sweeps import SWEEPS_ARE_WHOLE

_CASES = "tests.recovery.collision_cases"
_PATHS = "tests.recovery.collision_paths_cases"
_CUTS = [*range(1, 29, 2)] if SWEEPS_ARE_WHOLE else [4, 11]
_END = 34 if SWEEPS_ARE_WHOLE else 17


@pytest.fixture(scope="module")
def continued(two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Publish versions from two ranks and train on from each; return the stream and the differences on each rank."""
    path = tmp_path_factory.mktemp("collisions")
    return path, two_ranks.run(f"{_CASES}:continued", path=str(path), cuts=_CUTS, end=_END)


@pytest.fixture(scope="module")
def stream(continued: tuple[Path, list[Any]]) -> Path:
    return continued[0]


def check_continued(found: list[Any], end: int) -> None:
    for rank in found:
        assert rank["wrong"] == []
        assert rank["iteration"] == end
        assert max(rank["history"]) > 0, "at some cuts, ids wait for the next eviction"


@pytest.mark.sweep("long")
@pytest.mark.promise("resumed")
def test_training_with_evictions_continues_bit_for_bit(continued: tuple[Path, list[Any]]) -> None:
    check_continued(continued[1], _END)


@pytest.mark.sweep("long")
def test_one_rank_keeps_the_raw_ids_of_two(one_rank: RankPool, stream: Path) -> None:
    (found,) = one_rank.run(f"{_CASES}:resharded", path=str(stream), before=2)
    assert min(found[str(_CUTS[-1])].values()) > 8


@pytest.mark.sweep("long", only=True)
def test_two_ranks_keep_the_raw_ids_of_four_bit_for_bit(
    two_ranks: RankPool, four_ranks: RankPool, tmp_path: Path
) -> None:
    check_continued(four_ranks.run(f"{_CASES}:continued", path=str(tmp_path), cuts=[10, 15], end=18), 18)
    for found in two_ranks.run(f"{_CASES}:resharded", path=str(tmp_path), before=4):
        assert all(min(known.values()) > 4 for known in found.values())


@pytest.mark.sweep("long")
def test_more_ranks_are_refused_before_any_write(four_ranks: RankPool, stream: Path) -> None:
    for rank, (message,) in enumerate(four_ranks.run(f"{_CASES}:refused", path=str(stream))):
        slots = f"{4 * rank} to {4 * rank + 4}"
        assert "RestoreMismatchError: the collision module of 'mc._embedding_module.embeddings.a' is" in message
        assert f"in the slots 0 to 8, 8 to 16 in the version but in the slots {slots}, which are not" in message


@pytest.mark.sweep("long")
def test_a_table_that_is_ignored_keeps_its_raw_ids(two_ranks: RankPool, stream: Path, tmp_path: Path) -> None:
    shutil.copytree(stream, tmp_path / "stream")
    two_ranks.run(f"{_CASES}:ignored", path=str(tmp_path / "stream"))


@pytest.mark.sweep("long")
@pytest.mark.parametrize("policy", ["LFU", "LRU", "DistanceLFU"] if SWEEPS_ARE_WHOLE else ["LFU", "LRU"])
def test_each_policy_and_consumer_continues(two_ranks: RankPool, tmp_path: Path, policy: str) -> None:
    ranks = two_ranks.run(f"{_PATHS}:continued", path=str(tmp_path), policy=policy)
    assert all(found["evicted"] > 0 for found in ranks)


def test_a_restore_that_ends_before_the_raw_ids_leaves_a_model_that_raises(two_ranks: RankPool, tmp_path: Path) -> None:
    for restored, trained, published in two_ranks.run(f"{_PATHS}:interrupted", path=str(tmp_path)):
        assert restored.startswith(("RankFailedError", "StorageError"))
        assert trained.startswith("IncompleteModelError: the model is incomplete")
        assert published.startswith("IncompleteModelError: the model is incomplete")
