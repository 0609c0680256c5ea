"""Cadences validate their bounds, and a version is cut once one bound is reached."""

from __future__ import annotations

from pathlib import Path

import pytest

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.publisher.cadence import Cadence
from tests.ranks import RankPool

_CASES = "tests.publisher.background_cases"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/stream"


def test_bounds_on_what_is_pending(two_ranks: RankPool, url: str) -> None:
    for cuts in two_ranks.run(f"{_CASES}:bounds", url=url):
        assert cuts["never"] == 1
        assert abs(cuts["rows"] - cuts["num_bytes"]) <= 2  # the worker's speed varies
        assert 2 <= cuts["rows"] < 20
        assert cuts["seconds"] >= 4


@pytest.mark.parametrize(
    "bounds", [{}, {"batches": 0}, {"seconds": float("nan")}, {"rows": 1.5}, {"batches": True}, {"snapshot_every": 3}]
)
def test_a_cadence_checks_itself(bounds: dict[str, int]) -> None:
    with pytest.raises(InvalidArgumentError):
        Cadence(**bounds)
