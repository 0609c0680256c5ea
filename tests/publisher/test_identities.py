"""Streams of models with managed collisions: raw ids in versions, and the answers of predictors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import RankPool
from tests.sweeps import SWEEPS_ARE_WHOLE

_CASES = "tests.publisher.identities_cases"


@pytest.mark.parametrize("world_size", [1, 2, 4] if SWEEPS_ARE_WHOLE else [2])
def test_each_raw_id_gets_the_trainers_answer(request: pytest.FixtureRequest, tmp_path: Path, world_size: int) -> None:
    pool: RankPool = request.getfixturevalue({1: "one_rank", 2: "two_ranks", 4: "four_ranks"}[world_size])
    ranks = pool.run(f"{_CASES}:served", root=str(tmp_path))
    counted = 0
    for number, published in enumerate(ranks[0]["published"]):
        changes = [each["changes"][number] for each in ranks]
        expected = {fqn: [sum(each[fqn][place] for each in changes) for place in (0, 1)] for fqn in published}
        assert published == expected
        counted += sum(evicted for _, evicted in published.values())
    assert counted > 20, "ids were evicted"


def test_a_snapshot_is_copied_while_ids_are_evicted(two_ranks: RankPool, tmp_path: Path) -> None:
    kinds = two_ranks.run(f"{_CASES}:copied_while_training", root=str(tmp_path))
    assert kinds[0] == kinds[1]
    assert kinds[0].count("snapshot") > 1
    assert kinds[0].count("delta") > 2


def test_a_resumed_trainer_takes_later_raw_ids_back(two_ranks: RankPool, tmp_path: Path) -> None:
    versions, _ = two_ranks.run(f"{_CASES}:resumed", root=str(tmp_path))
    # The raw ids that the first version takes back are not those of the tracker's last read, so none are counted.
    assert versions == [["delta", False], ["delta", True], ["delta", True]]


def test_ranks_that_divide_raw_ids_in_different_ways_publish_nothing(two_ranks: RankPool, tmp_path: Path) -> None:
    for message in two_ranks.run(f"{_CASES}:differing", root=str(tmp_path)):
        assert "PublishError: the version was not published: rank 1 failed with the tables" in message
        assert "2 buckets of 61 ids" in message
        assert "2 buckets of 60 ids" in message
