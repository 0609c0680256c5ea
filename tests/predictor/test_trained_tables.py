"""A predictor never writes to tables that a tracker of its process tracks, whichever of the two was built first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from delta_tracker import ModelDeltaTracker, Predictor
from delta_tracker.errors import InvalidArgumentError, WaitTimeoutError
from tests.advice.jobs import Job, refused, small_model
from tests.ranks import RankPool

_REFUSED = "Pass a copy of the model, or detach the tracker"
_CASES = "tests.predictor.trained_tables_cases"


def _model(is_sparse: bool) -> nn.Sequential:
    return nn.Sequential(nn.EmbeddingBag(20, 4, sparse=is_sparse))


def _values(model: nn.Module) -> list[Tensor]:
    return [each.detach().clone() for each in model.parameters()]


@pytest.mark.parametrize("is_sparse", [True, False])
@pytest.mark.parametrize(
    "target",
    [
        lambda model: model,
        lambda model: {"0": model[0].weight.data},
        lambda model: {"0.weight": model[0].weight.view(20, 4)},
    ],
    ids=["module", "data", "view"],
)
def test_a_tracker_is_noticed(tmp_path: Path, is_sparse: bool, target: Callable[[nn.Module], Any]) -> None:
    job = Job(tmp_path)
    trained = _model(is_sparse)
    tracker = ModelDeltaTracker(trained)
    predictor, before = Predictor(target(trained), job.url), _values(trained)
    error = refused(InvalidArgumentError, predictor.sync, _REFUSED)
    assert error.value == ["0"]
    assert all(map(torch.equal, _values(trained), before))
    tracker.detach()
    assert predictor.sync() == 1
    tracker.reattach()
    job.publish(3)
    refused(InvalidArgumentError, predictor.sync, _REFUSED)


@pytest.mark.parametrize("is_sparse", [True, False])
@pytest.mark.filterwarnings("ignore::delta_tracker.errors.UntrackedTrainingWarning")  # the job trains its own tables
def test_a_tracker_that_is_built_later_is_noticed(tmp_path: Path, is_sparse: bool) -> None:
    job, model = Job(tmp_path), _model(is_sparse)
    predictor = job.serve(model)
    for row in (3, 4):  # the tables are looked up once, and then kept
        job.publish(row)
        predictor.sync()
    tracker, before = ModelDeltaTracker(model), _values(model)
    job.publish(5)
    refused(InvalidArgumentError, predictor.sync, _REFUSED)
    refused(InvalidArgumentError, predictor.follow, _REFUSED)
    assert all(map(torch.equal, _values(model), before))
    assert tracker.get_delta().num_rows == 0
    del tracker
    assert job.is_served_by(model, predictor.sync())


def test_a_tracker_that_is_built_while_a_predictor_follows_is_noticed(tmp_path: Path) -> None:
    job, model = Job(tmp_path), small_model()
    with job.serve(model) as predictor:
        predictor.follow(poll_seconds=0.01)
        predictor.wait(1, timeout=60)
        tracker, before = ModelDeltaTracker(model), _values(model)
        job.publish(5)
        with pytest.raises(WaitTimeoutError, match=_REFUSED):
            predictor.wait(2, timeout=1)
        assert all(map(torch.equal, _values(model), before))
        tracker.detach()
        assert job.is_served_by(model, predictor.wait(2, timeout=60))


def test_a_table_that_is_not_tracked_follows_a_stream(tmp_path: Path) -> None:
    job = Job(tmp_path)
    trained = nn.ModuleDict({"frozen": small_model(), "learned": small_model()})
    ModelDeltaTracker(trained, fqns_to_skip=["frozen"])
    with job.serve(trained["frozen"]) as predictor:
        assert job.is_served_by(trained["frozen"], predictor.sync())


@pytest.mark.parametrize(
    ("bag", "kernel"), [(True, "fused"), (False, "fused"), (True, "fused_uvm_caching"), (True, "dense")]
)
def test_kernels_of_a_trainer_are_noticed(two_ranks: RankPool, tmp_path: Path, bag: bool, kernel: str) -> None:
    answers = two_ranks.run(f"{_CASES}:kernels", url=f"file://{tmp_path}/stream", bag=bag, kernel=kernel)
    for messages in answers:
        for message in messages:
            assert message.startswith("model=['ec.embedding")
            assert _REFUSED in message
