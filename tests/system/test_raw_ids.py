"""Trainers with managed collisions and their predictors; ``python -m tests.system.raw_ids`` runs more of them."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.ranks import RankPool
from tests.sweeps import SWEEPS_ARE_WHOLE, num_examples
from tests.system.raw_ids import run


@pytest.mark.sweep("long")
@pytest.mark.promise("equal", "atomic", "independent")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", [1, 2, 4] if SWEEPS_ARE_WHOLE else [2])
def test_no_raw_id_reads_the_row_of_another_id(request: pytest.FixtureRequest, world_size: int) -> None:
    pool: RankPool = request.getfixturevalue({1: "one_rank", 2: "two_ranks", 4: "four_ranks"}[world_size])
    seeds, num_steps = (range(1, 4), 40) if SWEEPS_ARE_WHOLE else (range(2, 2 + num_examples(1)), 12)
    seen: Counter[str] = sum((run(pool, seed, num_steps) for seed in seeds), Counter())
    assert seen["steps"] == len(seeds) * num_steps
    assert seen["evicted"] > 0
    assert seen["checks while applying"] > seen["steps"]
