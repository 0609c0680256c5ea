"""The post-lookup hook: checkpointed lookups, backward passes that raise, other hooks, and CUDA graphs."""

from __future__ import annotations

import itertools

import pytest

from tests.ranks import RankPool

_CASES = "tests.tracker.flows_cases"


@pytest.mark.promise("lossless")
@pytest.mark.parametrize("bag", [False, True], ids=["ec", "ebc"])
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["no reentrance", "reentrant"])
@pytest.mark.parametrize("around", ["lookup", "rest"])
def test_activation_checkpointing(two_ranks: RankPool, around: str, use_reentrant: bool, bag: bool) -> None:
    two_ranks.run(f"{_CASES}:checkpointed", around=around, use_reentrant=use_reentrant, bag=bag)


@pytest.mark.promise("lossless", "minimal")
@pytest.mark.parametrize("where", ["before", "at", "after"])
def test_a_backward_that_raises(two_ranks: RankPool, where: str) -> None:
    for counts in two_ranks.run(f"{_CASES}:raising", where=where):
        assert (counts[0] > 0) == (where != "before")
        assert all(counts[1:])


@pytest.mark.parametrize("order", list(itertools.permutations(["before", "ours", "after"])), ids=str)
def test_other_hooks_go_on_working(two_ranks: RankPool, order: tuple[str, ...]) -> None:
    two_ranks.run(f"{_CASES}:chained", order=order)


@pytest.mark.parametrize("mode", ["ID_ONLY", "EMBEDDING"])
def test_replays_of_a_captured_step_are_not_lost(one_rank: RankPool, mode: str) -> None:
    one_rank.run("tests.sharding.capture_cases:captured_step", mode=mode)


def test_a_captured_lookup_marks_rows_only_if_lookups_are_recorded(one_rank: RankPool) -> None:
    one_rank.run("tests.sharding.capture_cases:captured_lookup")
