"""Agreement of ranks on a version: every rank reports one that disagrees, fails or never joins."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import RankPool

_CASES = "tests.publisher.publishing_cases"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/stream"


@pytest.mark.advice("RankFailedError: check_alike")
def test_ranks_at_different_batches_publish_nothing(two_ranks: RankPool, url: str) -> None:
    for (message,) in two_ranks.run(f"{_CASES}:out_of_step", url=url):
        assert "rank 1 failed with batch 1 where rank 0 has batch 0" in message


def test_a_rank_that_cannot_read_is_reported_to_the_others(two_ranks: RankPool, url: str) -> None:
    first, second = two_ranks.run(f"{_CASES}:detached_rank", url=url)
    assert all(message.startswith("RankFailedError") and "rank 1" in message for message in first)
    assert all(message.startswith("DetachedError") for message in second)


@pytest.mark.advice("RankLostError: RankGroup._typed_errors RankGroup.leave")
def test_a_rank_that_never_joins_is_reported(two_ranks: RankPool, url: str) -> None:
    messages, _ = two_ranks.run(f"{_CASES}:lost_rank", url=url)
    assert all(message.startswith("RankLostError") and "restart the job" in message for message in messages)
    two_ranks.stop()
    two_ranks.run("tests.publisher.publishing_cases:equal", url=url, spec={})
