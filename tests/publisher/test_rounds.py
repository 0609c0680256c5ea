"""Letters of the workers arrive whole, and a rank at another version is reported."""

from __future__ import annotations

import pytest

from tests.ranks import RankPool

_CASES = "tests.publisher.rounds_cases"


@pytest.mark.parametrize("pool", ["two_ranks", "four_ranks"])
def test_letters_of_any_length_arrive(request: pytest.FixtureRequest, pool: str) -> None:
    request.getfixturevalue(pool).run(f"{_CASES}:lengths")


@pytest.mark.advice("RankLostError: MessageRounds._opened")
def test_a_rank_at_another_version_is_reported(two_ranks: RankPool) -> None:
    first, _ = two_ranks.run(f"{_CASES}:different_versions")
    assert len(first) == 1
    assert "rank 1 is at cut 5 of this publisher, and rank 0 at cut 4" in first[0]
    assert "restart the job on all ranks" in first[0]
