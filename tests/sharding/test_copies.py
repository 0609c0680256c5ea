"""A copy of a tracked model works and is not tracked; the tracker of the original reports only the original's rows."""

from __future__ import annotations

import pytest

from tests.ranks import RankPool

_CASES = "tests.sharding.copies_cases"


@pytest.mark.parametrize("pool", ["one_rank", "two_ranks"])
@pytest.mark.parametrize("how", ["deepcopy", "twice", "average", "torchrec"])
@pytest.mark.parametrize("mode", ["id_only", "embedding"])
def test_a_copy_of_a_sharded_model(request: pytest.FixtureRequest, how: str, mode: str, pool: str) -> None:
    ranks: RankPool = request.getfixturevalue(pool)
    for answer in ranks.run(f"{_CASES}:copied", how=how, mode=mode):
        assert answer["errors"] == 0
        assert answer["is_shared"] == (how == "torchrec")


@pytest.mark.parametrize("pool", ["one_rank", "two_ranks"])
def test_a_copy_with_managed_collisions(request: pytest.FixtureRequest, pool: str) -> None:
    ranks: RankPool = request.getfixturevalue(pool)
    for num_rows, num_evicted in ranks.run(f"{_CASES}:copied_collisions"):
        assert num_rows > 0
        assert num_evicted > 0


def test_a_copy_in_2d_parallelism(two_ranks: RankPool) -> None:
    for num_rows in two_ranks.run(f"{_CASES}:copied_replicas"):
        assert num_rows > 0
