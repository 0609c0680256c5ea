"""Two publishers on one tracker: a recovery stream with states, and a serving stream in INT8 with top-k."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import RankPool
from tests.sweeps import SWEEPS_ARE_WHOLE

_CASES = "tests.publisher.two_publishers_cases"
_TABLES = [
    {"name": "row", "rows": 17, "sharding": "row"},
    {"name": "table", "rows": 10, "sharding": "table:1"},
    {"name": "column", "rows": 9, "sharding": "column:0,1"},
]


@pytest.mark.sweep("long")
@pytest.mark.parametrize("seed", range(30 if SWEEPS_ARE_WHOLE else 1))
def test_two_streams_of_one_tracker_have_all_rows(two_ranks: RankPool, tmp_path: Path, seed: int) -> None:
    arguments = {"path": str(tmp_path), "spec": {"tables": _TABLES}, "seed": seed}
    num_turns = 20 if SWEEPS_ARE_WHOLE else 8
    assert min(two_ranks.run(f"{_CASES}:interleaved", **arguments, num_turns=num_turns)) >= 1
