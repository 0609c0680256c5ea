"""States that an outside loader fills are the saved ones, or are refused with an error that helps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankPool

_CASES = "tests.tracker.outside_loads_cases"
_FINE = "nothing was raised"


@pytest.mark.advice("CheckpointError: _SavedParts.loaded")
@pytest.mark.parametrize("kind", ["tracker", "counters"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_planner_that_skips_tensors_is_found_out(
    one_rank: RankPool, two_ranks: RankPool, tmp_path: Path, kind: str, world_size: int
) -> None:
    ranks = one_rank if world_size == 1 else two_ranks
    for messages in ranks.run(f"{_CASES}:planners", path=str(tmp_path), kind=kind):
        for what in ("another key", "another checkpoint"):
            assert messages[what].startswith("CheckpointError: "), messages[what]
            assert f"'{kind}.rank0of{ranks.world_size}/header'" in messages[what]
            assert f"Pass it to dcp.load under the key '{kind}', with the checkpoint" in messages[what]
        assert messages["the same key"] == _FINE
        assert "its values are not the saved ones: a loader skipped it" in messages["a tensor"]


@pytest.mark.parametrize("kind", ["tracker", "counters"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_each_tensor_has_its_saved_bytes(
    one_rank: RankPool, two_ranks: RankPool, tmp_path: Path, kind: str, world_size: int
) -> None:
    ranks = one_rank if world_size == 1 else two_ranks
    answers: list[dict[str, Any]] = ranks.run(f"{_CASES}:patterns", path=str(tmp_path), kind=kind)
    for counts in answers:
        assert counts["exact"] > 10
        assert counts["refused"] > 10
