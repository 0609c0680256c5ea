"""The post-lookup hook: checkpointed lookups, backward passes that raise, other hooks, CUDA graphs, compilers."""

from __future__ import annotations

import itertools

import pytest

from tests.ranks import RankPool
from tests.sweeps import SWEEPS_ARE_WHOLE

_CASES = "tests.tracker.flows_cases"


# The short form has each two settings together once.
_EVERY_PART = list(itertools.product(["lookup", "rest"], [False, True], [False, True]))
_EACH_PAIR = [("lookup", False, False), ("lookup", True, True), ("rest", False, True), ("rest", True, False)]


@pytest.mark.sweep("short")
@pytest.mark.promise("lossless")
@pytest.mark.parametrize(("around", "use_reentrant", "bag"), _EVERY_PART if SWEEPS_ARE_WHOLE else _EACH_PAIR)
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


_COMPILED = [
    {"what": "forward", "fullgraph": True},
    {"autograd": True, "backend": "eager"},
]
_ALL_COMPILED = [
    *({"what": what, "bag": bag} for what in ("tbe", "forward", "kernel", "lookup", "model") for bag in (False, True)),
    *({"what": what, "fullgraph": True, "bag": bag} for what in ("tbe", "forward") for bag in (False, True)),
    {"what": "kernel", "autograd": True},
]


@pytest.mark.sweep("short")
@pytest.mark.parametrize("kwargs", [*_COMPILED, *(_ALL_COMPILED if SWEEPS_ARE_WHOLE else [])], ids=str)
def test_a_compiled_lookup_reports_the_rows_that_change(one_rank: RankPool, kwargs: dict[str, object]) -> None:
    (found,) = one_rank.run("tests.sharding.compile_cases:compiled", **kwargs)
    assert found["reported"] == found["changed"]
    assert found["errors"] == 0


def test_a_lookup_in_a_graph_without_breaks_reports_all_rows(one_rank: RankPool) -> None:
    (found,) = one_rank.run("tests.sharding.compile_cases:compiled", what="kernel", backend="eager", fullgraph=True)
    assert found["reported"] == [[50, 50]] * 3
    assert found["errors"] == 0


def test_a_tracker_sees_lookups_that_were_compiled_with_another(one_rank: RankPool) -> None:
    (found,) = one_rank.run(
        "tests.sharding.compile_cases:compiled", what="kernel", backend="eager", fullgraph=True, num_warm=1
    )
    assert found["reported"] == [[50, 50]] * 3


@pytest.mark.promise("lossless")
def test_changes_of_tables_in_a_compiled_module_are_reported(one_rank: RankPool) -> None:
    (found,) = one_rank.run("tests.sharding.compile_cases:compiled_tables")
    assert found == {"synced": list(range(5)), "written": list(range(5))}
