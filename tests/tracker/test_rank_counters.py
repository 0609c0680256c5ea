"""Counters that are saved without a tracker: their totals are the same after a restore at any number of ranks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankPool
from tests.sweeps import SWEEPS_ARE_WHOLE

_CASES = "tests.tracker.rank_counters_cases"


@pytest.fixture(scope="module")
def saved(
    one_rank: RankPool, two_ranks: RankPool, four_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, tuple[RankPool, str, list[Any]]]:
    """Number of ranks to their pool, the folder of what they saved in every way, and what each rank held."""
    found = {}
    for pool in (one_rank, two_ranks, four_ranks):
        path = str(tmp_path_factory.mktemp("counters"))
        found[pool.world_size] = (pool, path, pool.run(f"{_CASES}:save", path=path))
    return found


_PAIRS = list(itertools.product((1, 2, 4), (1, 2, 4))) if SWEEPS_ARE_WHOLE else [(1, 4), (2, 2), (4, 1), (4, 2)]


@pytest.mark.sweep("short")
@pytest.mark.parametrize(("before", "after"), _PAIRS)
def test_the_totals_are_the_same_at_any_number_of_ranks(saved: Any, before: int, after: int) -> None:
    _, path, answers = saved[before]
    pool = saved[after][0]
    total = answers[0][1]
    loaded = pool.run(f"{_CASES}:load", path=path)
    for rank, ways in enumerate(loaded):
        for way, (held, totals, later) in ways.items():
            assert totals == total, (way, rank)
            assert later["sum"][0] == total["sum"][0] + 1000 * after, (way, rank)
            assert later["total"] == total["total"] + after, (way, rank)
            if before == after and way != "merged":
                assert held == answers[rank][0], (way, rank)


@pytest.mark.advice("StateMismatchError: CounterSet.check_world_size")
def test_each_rank_has_its_own_states_again_if_they_cannot_be_merged(two_ranks: RankPool) -> None:
    for answer in two_ranks.run(f"{_CASES}:unmerged"):
        assert answer["after"] == answer["before"]
        assert answer["merged"].startswith("StateMismatchError"), answer
        assert "'pearson' (state 'mean_x'" in answer["merged"]


def test_what_cannot_be_exact_is_refused_by_name(two_ranks: RankPool, tmp_path: Path) -> None:
    expected = {
        "nothing": ("CheckpointError", "it has no counters"),
        "another rank's part": ("CheckpointError", "missing parts of ranks: {rank}"),
        "no header": ("CheckpointError", "it has no header"),
        "another header": ("CheckpointError", "its header says that it is 'rank0of2/'"),
        "a tracker's state": ("StateMismatchError", "mode id_only, where rank_counters is expected"),
        "into a tracker": ("StateMismatchError", "mode rank_counters, where id_only is expected"),
        "other counters": ("StateMismatchError", "counters ['cat', 'max', 'mean', 'min', 'sum', 'total']"),
        "a lost tensor": ("CheckpointError", "rank{rank}of2/counters/sum/sum_value"),
        "no counters in a checkpoint": ("CheckpointError", "it has no counters"),
        "two in a checkpoint": ("InvalidArgumentError", "['a', 'b']"),
        "a wrong key": ("InvalidArgumentError", "key='c'"),
        "strategy": ("InvalidArgumentError", "'gather_or_local', 'merge'"),
        "no counter": ("InvalidArgumentError", "at least one"),
        "a number": ("InvalidArgumentError", "clicks=3"),
        "a slash": ("InvalidArgumentError", "name='a/b'"),
        "a list": ("InvalidArgumentError", "Pass a dict"),
        "a synchronized metric": ("InvalidArgumentError", "unsync()"),
        "into a synchronized metric": ("InvalidArgumentError", "unsync()"),
    }
    for rank, messages in enumerate(two_ranks.run(f"{_CASES}:refusals", path=str(tmp_path))):
        assert messages.keys() == expected.keys()
        for name, (kind, words) in expected.items():
            assert messages[name].startswith(f"{kind}: "), (name, messages[name])
            assert words.format(rank=rank) in messages[name], (name, messages[name])


def test_a_checkpoint_has_a_tracker_and_counters(two_ranks: RankPool, tmp_path: Path) -> None:
    for before, after in two_ranks.run(f"{_CASES}:beside_a_tracker", path=str(tmp_path)):
        assert after == before
