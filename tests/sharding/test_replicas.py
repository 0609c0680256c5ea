"""2D parallelism: the rows that ``DMPCollection.sync`` changes are reported on every replica, and published once."""

from __future__ import annotations

import pytest

from tests.ranks import RankPool
from tests.sweeps import SWEEPS_ARE_WHOLE

_CASES = "tests.sharding.replicas_cases"


@pytest.mark.xfail(strict=True, reason="DMPCollection is refused, because its sync() writes rows without a hook")
@pytest.mark.parametrize("mode", ["id_only", "embedding"])
def test_the_rows_that_a_sync_changes_are_reported(two_ranks: RankPool, mode: str) -> None:
    seeds = list(range(20 if SWEEPS_ARE_WHOLE else 2))
    for answer in two_ranks.run(f"{_CASES}:reported", num_replicas=2, mode=mode, seeds=seeds):
        assert all(counts["synced"] for counts in answer)
