"""States that an outside loader fills are the saved ones, or are refused with an error that helps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankPool

_CASES = "tests.tracker.outside_loads_cases"
_FINE = "nothing was raised"


@pytest.mark.parametrize("kind", ["tracker", "counters"])
@pytest.mark.parametrize("pool", ["one_rank", "two_ranks"])
def test_a_planner_that_skips_tensors_is_found_out(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, pool: str
) -> None:
    ranks: RankPool = request.getfixturevalue(pool)
    for messages in ranks.run(f"{_CASES}:planners", path=str(tmp_path), kind=kind):
        for what in ("another key", "another checkpoint"):
            assert messages[what].startswith("PartialStateError: "), messages[what]
            assert f"'{kind}.rank0of{ranks.world_size}/header'" in messages[what]
            assert f"Pass it to dcp.load under the key '{kind}', with the checkpoint" in messages[what]
        assert messages["the same key"] == _FINE
        assert "its values are not the saved ones: a loader skipped it" in messages["a tensor"]


@pytest.mark.parametrize("kind", ["tracker", "counters"])
@pytest.mark.parametrize("pool", ["one_rank", "two_ranks"])
@pytest.mark.parametrize("has_digests", [True, False])
def test_each_tensor_has_its_saved_bytes(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, pool: str, has_digests: bool
) -> None:
    ranks: RankPool = request.getfixturevalue(pool)
    answers: list[dict[str, Any]] = ranks.run(
        f"{_CASES}:patterns", path=str(tmp_path), kind=kind, has_digests=has_digests
    )
    for counts in answers:
        assert counts["exact"] > 10
        assert counts["refused"] > (10 if has_digests else 2)
