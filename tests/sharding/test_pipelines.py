"""TorchRec's train pipelines are tracked exactly: ids and rows after each step are those that the step changed."""

from __future__ import annotations

import pytest

from tests.ranks import RankPool
from tests.sharding.upstream import PIPELINES, TRACKED, installed

_CASES = "tests.sharding.pipelines_cases"
_INSTALLED = installed("pipelines")
_TRACKED = {name for name, outcome in PIPELINES.items() if outcome == TRACKED}
_STAGED = "StagedTrainPipeline"


_COMPILED = {"TrainPipelinePT2", "TrainPipelineSparseDistCompAutograd"}


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        *(
            (name, "")
            for name, outcome in PIPELINES.items()
            if outcome == TRACKED and name not in {_STAGED, *_COMPILED}
        ),
        *((_STAGED, stage) for stage in ("input", "lookup", "prefetch")),
    ],
)
def test_each_step_is_reported_exactly(two_ranks: RankPool, name: str, stage: str) -> None:
    if name not in _INSTALLED:
        pytest.skip(f"this torchrec has no {name}")
    for num_rows, _ in two_ranks.run(f"{_CASES}:exact", name=name, stage=stage):
        assert num_rows > 200


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
