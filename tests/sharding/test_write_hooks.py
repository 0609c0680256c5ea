"""Rows that are written outside autograd are noticed: loads, and ids that a managed collision evicts."""

from __future__ import annotations

import pytest

from tests.ranks import RankPool

_CASES = "tests.tracker.flows_cases"


@pytest.mark.parametrize("mode", ["id_only", "embedding"])
def test_managed_collisions_are_tracked_by_remapped_row(two_ranks: RankPool, mode: str) -> None:
    for counts in two_ranks.run(f"{_CASES}:managed_collision", mode=mode):
        assert counts["changed"] > counts["evicted"] > 0


@pytest.mark.parametrize("through", ["model", "module", "collection"])
@pytest.mark.parametrize("bag", [False, True], ids=["ec", "ebc"])
def test_a_load_is_noticed(two_ranks: RankPool, bag: bool, through: str) -> None:
    two_ranks.run(f"{_CASES}:loaded", bag=bag, through=through)
