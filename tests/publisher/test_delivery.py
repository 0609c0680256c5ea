"""After its cut, a version needs no call of the training thread; lost ranks are noticed, and a slow store is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import RankPool

_CASES = "tests.publisher.delivery_cases"
_SLACK_SECONDS = 3.0  # on a busy machine


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/stream"


@pytest.mark.parametrize("pool", ["one_rank", "two_ranks"])
def test_a_version_is_committed_in_a_pause_after_its_cut(request: pytest.FixtureRequest, pool: str, url: str) -> None:
    request.getfixturevalue(pool).run(f"{_CASES}:paused", url=url)


@pytest.mark.promise("lossless")
@pytest.mark.parametrize("top_k", [None, 2])
@pytest.mark.parametrize("pool", ["one_rank", "two_ranks"])
def test_a_flush_publishes_all_that_changed_and_nothing_else(
    request: pytest.FixtureRequest, pool: str, url: str, top_k: int | None
) -> None:
    for versions in request.getfixturevalue(pool).run(f"{_CASES}:flushed", url=url, top_k=top_k):
        assert versions[5] == versions[4], "without changed rows"
        others = versions[:5] + versions[6:]
        assert others == sorted(set(others))


def test_a_flush_compares_tables_of_ordinary_optimizers(two_ranks: RankPool, url: str) -> None:
    for versions in two_ranks.run(f"{_CASES}:flushed_tables_of_ordinary_optimizers", url=url):
        assert versions == [1, 2, 2, 3]


@pytest.mark.promise("fenced")
def test_a_flush_of_a_fenced_publisher_raises(two_ranks: RankPool, url: str) -> None:
    for messages in two_ranks.run(f"{_CASES}:fenced_flush", url=url):
        assert [message.partition(":")[0] for message in messages] == ["FencedError", "FencedError"]


def test_a_store_that_is_slower_than_the_timeout_is_no_lost_rank(two_ranks: RankPool, url: str) -> None:
    for answer in two_ranks.run(f"{_CASES}:slower_than_the_timeout", url=url):
        assert answer == {"version": 2, "error": "None"}


def test_a_commit_that_ends_between_two_rounds_loses_no_rank(two_ranks: RankPool, url: str) -> None:
    assert two_ranks.run(f"{_CASES}:committed_between_rounds", url=url) == [3, 3]


@pytest.mark.parametrize("call", ["publish", "step"])
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_rank_that_is_lost_while_it_writes_is_noticed(url: str, tmp_path: Path, how: str, call: str) -> None:
    pool = RankPool(3)
    dies = 2 if how == "killed" else None
    try:
        answers = pool.run(f"{_CASES}:lost_while_writing", url=url, root=str(tmp_path), how=how, call=call, dies=dies)
    finally:
        pool.stop()
    for answer in answers[:2]:
        assert answer["lost"], answer
        assert answer["pending"] > 0, answer
        assert answer["second"].startswith("RankLostError")
        assert answer["seconds"] < (0.0 if how == "killed" else 4.0) + _SLACK_SECONDS
        assert answer["again"] < _SLACK_SECONDS


def test_a_single_rank_publishes_after_each_batch(one_rank: RankPool, url: str) -> None:
    (batches,) = one_rank.run(f"{_CASES}:every_batch", url=url)
    assert batches == [[number, number + 1] for number in range(6)]


@pytest.mark.parametrize(("pool", "vote_every", "calls"), [("one_rank", 1, 0), ("one_rank", 3, 2), ("two_ranks", 2, 3)])
def test_a_bound_is_late_by_as_many_calls_as_documented(
    request: pytest.FixtureRequest, pool: str, url: str, vote_every: int, calls: int
) -> None:
    for late in request.getfixturevalue(pool).run(f"{_CASES}:late_bounds", url=url, vote_every=vote_every):
        assert late == calls
