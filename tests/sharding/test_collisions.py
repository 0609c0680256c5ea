"""Owners that are read from managed-collision modules, and models whose owners cannot be read."""

from __future__ import annotations

import pytest

from tests.ranks import RankPool

_CASES = "tests.tracker.collision_cases"


def test_hash_zch_has_one_owner_per_slot(one_rank: RankPool) -> None:
    (answer,) = one_rank.run(f"{_CASES}:hash_zch")
    assert answer["identity"] == [60, [[0, 4], [4, 8], [8, 12], [12, 16]], [None] * 4]
    assert answer["refused"]["reserved"].startswith("UnsupportedModelError")
    assert "which marks empty slots in the format, owns a slot" in answer["refused"]["reserved"]
    assert "the raw id 31 owns two slots" in answer["refused"]["twice"]
    assert "row 0 has the raw id 16, which belongs to another bucket" in answer["refused"]["bucket"]
    assert answer["refused"]["valid"] == "nothing was raised"


def test_the_buckets_are_those_of_the_plan(two_ranks: RankPool) -> None:
    for answer in two_ranks.run(f"{_CASES}:buckets"):
        assert answer == [60, [[0, 8], [8, 16]], [7, 15]]


@pytest.mark.advice(
    "UnsupportedModelError: local_owners _check_apart", "UnsupportedModelError: _local_owners LogSegments.check_owners"
)
def test_other_collision_modules_are_refused_unless_skipped(one_rank: RankPool) -> None:
    (answer,) = one_rank.run(f"{_CASES}:other_modules")
    assert answer["refused"].startswith("UnsupportedModelError: the model has sharded parts whose managed collisions")
    assert "'mc._embedding_module.embeddings.a' (_Constant)" in answer["refused"]
    assert answer["skipped"] == ["mc._embedding_module.embeddings.b"]
    assert "do not fit its shard (0, 16)" in answer["ranges"]
    assert "in a module of their own: 'mc._embedding_module.embeddings.a' (table)" in answer["apart"]
    assert answer["apart, skipped"] == ["mc._embedding_module.embeddings.b"]
