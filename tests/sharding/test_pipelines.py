"""TorchRec's train pipelines are tracked exactly: ids and rows after each step are those that the step changed."""

from __future__ import annotations

import pytest

from tests.ranks import RankPool
from tests.sharding.upstream import PIPELINES, TRACKED, installed

_CASES = "tests.sharding.pipelines_cases"
_COMPILED = {"TrainPipelinePT2", "TrainPipelineSparseDistCompAutograd"}
_STAGED = "StagedTrainPipeline"
_OTHERS = {name for name, outcome in PIPELINES.items() if outcome == TRACKED} - {_STAGED, *_COMPILED}


@pytest.mark.parametrize(
    "name", [*sorted(_OTHERS), *(f"{_STAGED} {stage}" for stage in ("input", "lookup", "prefetch"))]
)
def test_each_step_is_reported_exactly(two_ranks: RankPool, name: str) -> None:
    if name.partition(" ")[0] not in installed("pipelines"):
        pytest.skip(f"this torchrec has no {name}")
    for found in two_ranks.run(f"{_CASES}:exact", name=name):
        if found is None:
            pytest.skip("this torchrec has not all stages")
        assert found[0] > 150


@pytest.mark.sweep("long", only=True)
@pytest.mark.parametrize("name", sorted(_COMPILED))
def test_each_compiled_step_is_reported_exactly(name: str) -> None:
    """On processes of their own, because one of the pipelines changes torch's configuration."""
    ranks = RankPool(1)
    try:
        ((num_rows, num_graphs),) = ranks.run(f"{_CASES}:exact", name=name)
    finally:
        ranks.stop()
    assert num_rows > 20
    assert num_graphs > 0
