"""A state can be loaded any number of times: no load, and no update after it, changes the state."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import RankPool

_CASES = "tests.tracker.loaded_thrice_cases"
_UNMERGED = {"ConcordanceCorrCoef", "PearsonCorrCoef", "Pieces", "Average", "Product"}


def _check(answer: dict[str, list[str]], num_kinds: int) -> None:
    assert answer["differing"] == []
    assert answer["changed"] == []
    assert len(answer["names"]) >= num_kinds, answer["names"]


@pytest.mark.parametrize("saver", ["counters", "tracker"])
def test_one_rank_loads_its_own_state(one_rank: RankPool, saver: str) -> None:
    (answer,) = one_rank.run(f"{_CASES}:load", saver=saver)
    _check(answer, 145)
    assert {name.rpartition(".")[2] for name in answer["names"]} > _UNMERGED


def test_each_of_two_ranks_loads_its_own_state(two_ranks: RankPool) -> None:
    for answer in two_ranks.run(f"{_CASES}:load"):
        _check(answer, 145)


def test_one_rank_loads_the_states_of_two(one_rank: RankPool, two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(f"{_CASES}:save", path=str(tmp_path / "saved"))
    (answer,) = one_rank.run(f"{_CASES}:load", path=str(tmp_path / "saved"))
    _check(answer, 135)
