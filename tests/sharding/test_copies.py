"""A copy of a tracked model works and is not tracked; the tracker of the original reports only the original's rows."""

from __future__ import annotations

import pytest

from tests.ranks import RankPool

_CASES = "tests.sharding.copies_cases"


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("how", ["deepcopy", "twice", "average", "torchrec"])
@pytest.mark.parametrize("mode", ["id_only", "embedding"])
def test_a_copy_of_a_sharded_model(
    one_rank: RankPool, two_ranks: RankPool, how: str, mode: str, world_size: int
) -> None:
    ranks = one_rank if world_size == 1 else two_ranks
    for answer in ranks.run(f"{_CASES}:copied", how=how, mode=mode):
        assert answer["errors"] == 0
        assert answer["is_shared"] == (how == "torchrec")


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_copy_with_managed_collisions(one_rank: RankPool, two_ranks: RankPool, world_size: int) -> None:
    ranks = one_rank if world_size == 1 else two_ranks
    for num_rows, num_evicted in ranks.run(f"{_CASES}:copied_collisions"):
        assert num_rows > 0
        assert num_evicted > 0


def test_a_copy_in_2d_parallelism(two_ranks: RankPool) -> None:
    for num_rows in two_ranks.run(f"{_CASES}:copied_replicas"):
        assert num_rows > 0
