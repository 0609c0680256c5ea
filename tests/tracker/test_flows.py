"""When a row counts as changed, whatever the way to train."""

from __future__ import annotations

import itertools
from importlib.metadata import version

import pytest

from tests.ranks import RankPool

_CASES = "tests.tracker.flows_cases"


@pytest.mark.promise("lossless")
@pytest.mark.parametrize("bag", [False, True], ids=["ec", "ebc"])
def test_reads_between_the_steps_of_a_pipeline(two_ranks: RankPool, bag: bool) -> None:
    for counts in two_ranks.run(f"{_CASES}:pipeline", bag=bag):
        assert all(counts)


@pytest.mark.promise("lossless")
@pytest.mark.parametrize("case", ["accumulation", "second_backward", "reattached"])
def test_case(two_ranks: RankPool, case: str) -> None:
    two_ranks.run(f"{_CASES}:{case}")


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


@pytest.mark.parametrize("mode", ["id_only", "embedding"])
def test_managed_collisions_are_tracked_by_remapped_row(two_ranks: RankPool, mode: str) -> None:
    for counts in two_ranks.run(f"{_CASES}:managed_collision", mode=mode):
        assert counts["changed"] > counts["evicted"] > 0


@pytest.mark.parametrize("through", ["model", "module", "collection"])
@pytest.mark.parametrize("bag", [False, True], ids=["ec", "ebc"])
def test_a_load_is_noticed(two_ranks: RankPool, bag: bool, through: str) -> None:
    two_ranks.run(f"{_CASES}:loaded", bag=bag, through=through)


@pytest.mark.skipif(version("torchrec").startswith("1.3."), reason="its reshard hangs on gloo")
@pytest.mark.parametrize("trains_between", [False, True])
def test_a_table_that_torchrec_moved(two_ranks: RankPool, trains_between: bool) -> None:
    first, second = two_ranks.run(f"{_CASES}:resharded", trains_between=trains_between)
    assert first["shards"] == {"moves": 0, "stays": 12}
    assert second["shards"] == {"moves": 12, "stays": 0}
    assert first["rows"] > 0
    assert second["rows"] > 0


@pytest.mark.parametrize("order", list(itertools.permutations(["before", "ours", "after"])), ids=str)
def test_other_hooks_go_on_working(two_ranks: RankPool, order: tuple[str, ...]) -> None:
    two_ranks.run(f"{_CASES}:chained", order=order)
