"""TorchRec's train pipelines are tracked exactly: ids and rows after each step are those that the step changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import RankPool
from tests.sharding.pipelines_cases import LOSES_STASHES, loses_stashes
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


@pytest.mark.parametrize("seed", range(3))
def test_published_optimizer_states_are_exact_while_they_are_moved(
    two_ranks: RankPool, tmp_path: Path, seed: int
) -> None:
    if "TrainPipelineSparseDistOptStash" not in installed("pipelines"):
        pytest.skip("this torchrec moves no optimizer states")
    if loses_stashes():
        pytest.skip(LOSES_STASHES)
    for num_moved in two_ranks.run(f"{_CASES}:stashed", url=f"file://{tmp_path}", seed=seed):
        assert num_moved == 9


@pytest.mark.advice("UnsupportedModelError: _check_allocated")
def test_states_of_a_fused_optimizer_that_a_pipeline_frees_are_refused(one_rank: RankPool, tmp_path: Path) -> None:
    (error,) = one_rank.run(f"{_CASES}:freed", url=f"file://{tmp_path}")
    assert "optimizer states are freed: 'ec.embedding_bags.wide' (a pipeline moved them" in error


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
