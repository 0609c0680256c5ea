"""Streams of models with managed collisions: raw ids in versions, and the answers of predictors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import RankPool
from tests.sweeps import SWEEPS_ARE_WHOLE

_CASES = "tests.publisher.identities_cases"
_PATHS = "tests.publisher.identity_paths_cases"


@pytest.mark.sweep("short")
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
        assert "RankFailedError: the version was not published: rank 1 failed with the tables" in message
        assert "2 buckets of 61 ids" in message
        assert "2 buckets of 60 ids" in message


@pytest.mark.sweep("short")
@pytest.mark.parametrize(
    ("encoding", "is_bag", "is_hashed"),
    [("INT8", False, False), ("F16", True, True), ("BF16", False, True), ("INT8", True, False), ("INT4", True, True)]
    if SWEEPS_ARE_WHOLE
    else [("INT8", False, True), ("F16", True, True), ("BF16", True, False)],
)
def test_each_raw_id_gets_the_trainers_answer_within_the_error_of_the_encoding(
    two_ranks: RankPool, tmp_path: Path, encoding: str, is_bag: bool, is_hashed: bool
) -> None:
    arguments = {"encoding": encoding, "is_bag": is_bag, "is_hashed": is_hashed}
    for found in two_ranks.run(f"{_PATHS}:served", root=str(tmp_path), **arguments):
        assert found["evicted"] > 10
        assert len(found["known"]) > 10


def test_a_hash_function_that_only_an_unsharded_module_calls_is_refused(one_rank: RankPool) -> None:
    (message,) = one_rank.run(f"{_PATHS}:unapplied_hash")
    assert "need_preprocess=False" in message
    assert "mc._embedding_module.embeddings.a" in message


def test_a_trainer_with_other_buckets_publishes_a_snapshot(two_ranks: RankPool, tmp_path: Path) -> None:
    for found in two_ranks.run(f"{_PATHS}:reattached", root=str(tmp_path)):
        assert [kind for kind, _ in found] == [
            "snapshot",
            *["delta"] * 2,
            "snapshot",
            *["delta"] * 2,
            "snapshot",
            "delta",
        ]
        assert [rows for _, rows in found[2:4]] == [[[0, 8], [8, 16]], [[0, 12], [12, 16]]]


def test_a_model_that_is_sharded_as_in_the_trainer_answers_like_it(four_ranks: RankPool, tmp_path: Path) -> None:
    assert sum(four_ranks.run(f"{_PATHS}:sharded_served", root=str(tmp_path))) > 8
