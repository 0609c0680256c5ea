"""The job that the guide plans at size has the planned memory and bytes, measured at a hundredth of its rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from delta_tracker.planning.forecast import Forecast, forecast
from delta_tracker.planning.workload import Workload
from delta_tracker.types import TableSpec
from tests.planning.size_cases import CHANGED, DIM, NUM_ROWS
from tests.ranks import RankPool

_SCALE = 100


def _plan(num_rows: int, ranks: int) -> Forecast:
    table = TableSpec("ec.embeddings.user", num_rows, DIM, torch.float32)
    return forecast(Workload(tables=(table,), changed=0.01, seconds=30, ranks=ranks, snapshot_every=1000))


def test_a_hundredth_of_the_planned_job(two_ranks: RankPool, tmp_path: Path) -> None:
    plan = _plan(NUM_ROWS, two_ranks.world_size)
    answers = two_ranks.run("tests.planning.size_cases:measured", url=f"file://{tmp_path}/stream")
    assert answers[0]["snapshot"] == [pytest.approx(plan.snapshot.num_bytes, rel=0.01), NUM_ROWS]
    assert answers[0]["delta"] == [pytest.approx(plan.delta.num_bytes, rel=0.02), CHANGED]
    for answer in answers:
        assert plan.tracker_bytes / 4 <= answer["tracker_bytes"] <= plan.tracker_bytes  # with one of three sets of rows
        assert answer["seconds"] < 5  # 5,000 rows; 20 ms on two idle cores


def test_the_plan_grows_with_the_job() -> None:
    """What is measured at a hundredth of the rows and two ranks holds for 64 ranks."""
    small, large = _plan(NUM_ROWS, 2), _plan(_SCALE * NUM_ROWS, 64)
    for name in ("snapshot", "delta"):
        ratio = getattr(large, name).num_bytes / getattr(small, name).num_bytes
        assert ratio == pytest.approx(_SCALE, rel=0.02), name
    assert large.tracker_bytes / small.tracker_bytes == pytest.approx(_SCALE * 2 / 64, rel=0.02)
