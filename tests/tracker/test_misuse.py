"""Misuse of tensors, weights, backward passes and reads by callers loses no row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankPool

_CASES = "tests.tracker.misuse_cases"


@pytest.mark.parametrize("what", ["carried", "left out before", "left out after", "score"])
def test_tensors_of_a_delta_are_the_callers_own(one_rank: RankPool, what: str) -> None:
    one_rank.run(f"{_CASES}:spoiled", what=what)


@pytest.mark.parametrize("case", ["one_score_buffer", "live_counter"])
def test_tensors_that_a_caller_returns_may_be_used_again(one_rank: RankPool, case: str) -> None:
    one_rank.run(f"{_CASES}:{case}")


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_ids_may_be_written_to_between_forward_and_backward(one_rank: RankPool, dtype: str) -> None:
    assert one_rank.run(f"{_CASES}:narrow_ids", dtype=dtype) == [2 if dtype == "int32" else 1]


@pytest.mark.promise("lossless")
@pytest.mark.parametrize("mode", ["id_only", "embedding"])
@pytest.mark.parametrize("how", ["shard", "index", "dcp.load"])
def test_in_place_writes_to_weights_are_seen(two_ranks: RankPool, tmp_path: Path, how: str, mode: str) -> None:
    for counts in two_ranks.run(
        f"{_CASES}:written_in_place",
        how=how,
        spec={"bag": mode == "embedding"},
        mode=mode,
        path=str(tmp_path),
    ):
        assert counts["edited"] > 0
        assert counts["later"] == 0


@pytest.mark.parametrize("bag", [False, True], ids=["ec", "ebc"])
@pytest.mark.parametrize("kernel", ["fused", "fused_uvm", "fused_uvm_caching"])
def test_training_does_not_count_as_an_in_place_write(one_rank: RankPool, kernel: str, bag: bool) -> None:
    spec: dict[str, Any] = {"kernel": kernel, "bag": bag}
    one_rank.run(f"{_CASES}:nothing_written", spec=spec)


def test_loading_the_tracker_after_the_model_forgets_the_in_place_writes(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(f"{_CASES}:restored_in_place", path=str(tmp_path))


@pytest.mark.parametrize("how", ["ids", "before", "after"])
def test_rows_of_a_backward_that_raised_are_sent_once_more(one_rank: RankPool, how: str) -> None:
    (counts,) = one_rank.run(f"{_CASES}:failed_backwards", how=how, num_failures=400 if how == "ids" else 20)
    assert counts["first"] > 0
    assert (counts["second"], counts["bytes"]) == (0, 0)


@pytest.mark.parametrize("how", ["nan", "raises"])
def test_reads_that_raise_leave_the_log_as_it_was(one_rank: RankPool, how: str) -> None:
    _check_failed_reads(one_rank.run(f"{_CASES}:failed_reads", how=how))


def test_reads_that_raise_on_another_rank_leave_the_log_as_it_was(two_ranks: RankPool) -> None:
    _check_failed_reads(two_ranks.run(f"{_CASES}:failed_reads", how="other rank"))


def _check_failed_reads(answers: list[dict[str, int]]) -> None:
    for counts in answers:
        assert counts["after"] <= 2 * counts["before"] + 100_000
        assert 0 < counts["a"] < counts["b"]
        assert counts["held"] > 0
