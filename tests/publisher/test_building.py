"""Publishers and top-k reads in which a rank is missing raise typed errors in bounded time and leave nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import forked
from tests.ranks import RankPool

_CASES = "tests.publisher.building_cases"


@pytest.mark.advice("RankLostError: _Rendezvous._join")
def test_a_publisher_that_one_rank_builds_alone_is_refused(two_ranks: RankPool, tmp_path: Path) -> None:
    alone, other = two_ranks.run(f"{_CASES}:lone", url=f"file://{tmp_path}/stream")
    *alone["messages"], differing = alone["messages"]
    assert len(alone["messages"]) == 2
    assert "RankFailedError" in differing
    assert "no top_k where rank 0 has top_k" in differing
    assert other["messages"] == [differing]
    for message in alone["messages"]:
        assert message.startswith("RankLostError: ")
        assert "rank 1 " in message
        assert "on every rank" in message
    assert alone["versions"] == other["versions"] == [1, 2]


def test_a_rank_that_is_interrupted_while_it_waits_does_not_count_as_present(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    assert two_ranks.run(f"{_CASES}:interrupted", url=f"file://{tmp_path}/stream") == [1, 1]


def test_an_error_of_a_callback_during_a_wait_does_not_lose_the_group(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(f"{_CASES}:failed_callback")
    assert first == "RuntimeError: cannot schedule new futures, then 1.0"
    assert second == "0.0"


def test_a_rank_killed_while_it_builds_a_publisher_is_reported() -> None:
    done = forked.run(_CASES, "--seeds", "2", timeout_seconds=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["RankLostError"] >= 3
