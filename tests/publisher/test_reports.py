"""Metrics of publishers."""

from __future__ import annotations

from pathlib import Path

from tests.ranks import RankPool

_CASES = "tests.publisher.reports_cases"


def test_versions_and_failures_are_counted(one_rank: RankPool, tmp_path: Path) -> None:
    one_rank.run(f"{_CASES}:counts", url=f"file://{tmp_path}/stream")


def test_a_failed_retention_and_a_skewed_clock_are_shown(one_rank: RankPool, tmp_path: Path) -> None:
    one_rank.run(f"{_CASES}:failing_upkeep", url=f"file://{tmp_path}/stream")


def test_two_publishers_have_separate_metrics(one_rank: RankPool, tmp_path: Path) -> None:
    one_rank.run(f"{_CASES}:two_publishers", folder=tmp_path.as_uri())


def test_rank_0_counts_the_versions(two_ranks: RankPool, tmp_path: Path) -> None:
    answers = two_ranks.run(f"{_CASES}:counts", url=f"file://{tmp_path}/stream")
    assert [answer["counts versions"] for answer in answers] == [True, False]
