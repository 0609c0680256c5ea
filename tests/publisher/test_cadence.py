"""Cadences validate their bounds, and a version is cut once one bound is reached."""

from __future__ import annotations

from pathlib import Path

import pytest

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.publisher.cadence import Cadence
from tests.publisher.background_cases import NUM_VOTES
from tests.ranks import RankPool

_CASES = "tests.publisher.background_cases"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/stream"


def test_bounds_on_what_is_pending(two_ranks: RankPool, url: str) -> None:
    for cuts in two_ranks.run(f"{_CASES}:bounds", url=url):
        assert cuts["never"] == 1
        assert abs(cuts["rows"] - cuts["num_bytes"]) <= 2  # the worker's speed varies
        assert 2 <= cuts["rows"] < 20
        assert cuts["seconds"] >= 4


@pytest.mark.parametrize(
    "bounds", [{}, {"batches": 0}, {"seconds": float("nan")}, {"rows": 1.5}, {"batches": True}, {"snapshot_every": 3}]
)
def test_a_cadence_checks_itself(bounds: dict[str, int]) -> None:
    with pytest.raises(InvalidArgumentError):
        Cadence(**bounds)


@pytest.mark.parametrize(
    ("world_size", "calls"), [(1, 1), (2, 1), (16, 1), (17, 2), (64, 4), (250, 16), (256, 16), (4096, 16)]
)
def test_large_jobs_vote_less_often_within_a_bound(world_size: int, calls: int) -> None:
    assert Cadence(batches=1).calls_per_vote(world_size) == calls
    assert Cadence(batches=1, vote_every=3).calls_per_vote(world_size) == 3


@pytest.mark.parametrize("pool", ["two_ranks", "four_ranks"])
def test_votes_at_every_fourth_call(request: pytest.FixtureRequest, pool: str, url: str) -> None:
    """Versions appear, and the other calls send nothing. Before, every call sent a vote."""
    answers = request.getfixturevalue(pool).run(f"{_CASES}:seldom_votes", url=url, fails=False)
    for answer in answers:
        assert answer["calls"] == list(range(4, 4 * NUM_VOTES + 1, 4))
        assert answer["cuts"] == answers[0]["cuts"]
        assert len(answer["cuts"]) >= 4
        assert all(end % 4 == 0 for _, end in answer["cuts"][:-1])
        assert answer["error"] == "None"


def test_a_rank_that_fails_to_vote_votes_at_its_next_call(two_ranks: RankPool, url: str) -> None:
    first, last = two_ranks.run(f"{_CASES}:seldom_votes", url=url, fails=True)
    assert first["cuts"] == last["cuts"]
    assert len(first["cuts"]) >= 4
    extra = [batch for batch in last["calls"] if batch % 4]
    assert len(extra) == 2
    assert len(last["calls"]) == len(first["calls"]) + 2


def test_ranks_that_would_vote_at_different_calls_are_refused(two_ranks: RankPool, url: str) -> None:
    for answer in two_ranks.run(f"{_CASES}:different_votes", url=url):
        assert "rank 1 failed with vote_every=2 where rank 0 has vote_every=1" in answer


@pytest.mark.promise("refused")
def test_ranks_with_different_arguments_are_refused(two_ranks: RankPool, url: str) -> None:
    first, last = two_ranks.run(f"{_CASES}:different_arguments", url=url)
    assert first == last
    assert first.pop("equal") == "nothing was raised"
    assert len(first) == 4
    for name, answer in first.items():
        assert f"rank 1 failed with {name.partition(' ')[0]}=" in answer
        assert "where rank 0 has" in answer


def test_a_restarted_trainer_counts_from_the_last_snapshot(two_ranks: RankPool, tmp_path: Path) -> None:
    """Claims count, and no row is lost: each version equals the trainer, also where a snapshot is needed earlier."""
    for answer in two_ranks.run("tests.publisher.restarts_cases:restarts", root=str(tmp_path)):
        assert answer == {
            "new": [[1, "snapshot"], [2, "delta"], [3, "delta"]],
            "resumed": [[5, "delta"], [6, "snapshot"], [7, "delta"]],
            "by hand": [[9, "delta"], [10, "snapshot"], [11, "delta"], [12, "delta"], [13, "delta"]],
            "without tracker state": [[15, "snapshot"], [16, "delta"]],
            "from before a later snapshot": [[18, "snapshot"], [19, "delta"]],
            "overdue": [[21, "delta"], [22, "delta"], [23, "snapshot"], [24, "delta"]],
        }
