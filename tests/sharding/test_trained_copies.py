"""A job that trains a copy of the tracked model is warned; other ways to write to the tracked tables are exact."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel

from delta_tracker import ModelDeltaTracker, Publisher
from delta_tracker.errors import UntrackedTrainingWarning
from tests.ranks import RankPool

_CASES = "tests.sharding.trained_copies_cases"
_Forward = Callable[[Tensor], Tensor]


def _model(is_sparse: bool) -> nn.Sequential:
    return nn.Sequential(nn.EmbeddingBag(20, 4, sparse=is_sparse), nn.Linear(4, 1))


def _train(forward: _Forward, parameters: Iterable[Tensor], *ids: int) -> None:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.zero_grad()
    forward(torch.tensor([ids])).sum().backward()
    optimizer.step()


def _saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def _call(model: nn.Module, change: Callable[[Tensor], Tensor]) -> tuple[_Forward, list[Tensor]]:
    parameters = {name: change(each) for name, each in model.named_parameters()}
    return lambda ids: functional_call(model, parameters, (ids,)), [*parameters.values()]


_COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy of a copy": lambda model: copy.deepcopy(copy.deepcopy(model)),
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": _saved,
    "compiled copy": lambda model: torch.compile(copy.deepcopy(model), backend="eager"),
}
_READS: dict[str, Callable[[ModelDeltaTracker], object]] = {
    "get_delta": ModelDeltaTracker.get_delta,
    "get_delta_ids": ModelDeltaTracker.get_delta_ids,
    "reserved": lambda tracker: tracker.reserve().read(),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method.:DeprecationWarning")  # the compiler's own code
@pytest.mark.parametrize("read", _READS)
@pytest.mark.parametrize("how", _COPIES)
@pytest.mark.parametrize("is_sparse", [True, False])
def test_a_read_warns_of_a_copy_that_is_trained(how: str, is_sparse: bool, read: str) -> None:
    model = _model(is_sparse)
    tracker = ModelDeltaTracker(model)
    copied = _COPIES[how](model)
    tracker.get_delta()
    _train(copied, copied.parameters(), 1, 2)
    tracker.step()
    with pytest.warns(UntrackedTrainingWarning, match="tables '0' are tracked, but not trained") as caught:
        _READS[read](tracker)
    assert caught[0].filename == __file__
    _train(copied, copied.parameters(), 1, 2)
    tracker.step()  # it warns once


@pytest.mark.parametrize("is_sparse", [True, False])
def test_a_publisher_warns_of_a_copy_that_is_trained(is_sparse: bool, tmp_path: Path) -> None:
    model = _model(is_sparse)
    tracker = ModelDeltaTracker(model)
    with Publisher(tracker, f"file://{tmp_path}/stream", dense=True) as publisher:
        publisher.snapshot()
        copied = copy.deepcopy(model)
        _train(copied, copied.parameters(), 1, 2)
        tracker.step()
        with pytest.warns(UntrackedTrainingWarning):
            publisher.publish()


@pytest.mark.parametrize("is_sparse", [True, False])
def test_the_tenth_batch_warns(is_sparse: bool) -> None:
    model = _model(is_sparse)
    tracker, copied = ModelDeltaTracker(model), copy.deepcopy(model)
    _train(model, model.parameters(), 1)
    for _ in range(9):
        _train(copied, copied.parameters(), 1, 2)
        tracker.step()
    _train(copied, copied.parameters(), 1, 2)
    with pytest.warns(UntrackedTrainingWarning, match=r"\(10 so far\)") as caught:
        tracker.step()
    assert (caught[0].filename, caught[0].message.tables) == (__file__, ("0",))
    assert pickle.loads(pickle.dumps(caught[0].message)).num_updates == 10


@pytest.mark.parametrize("is_sparse", [True, False])
def test_other_parameters_in_a_functional_call(is_sparse: bool) -> None:
    model = _model(is_sparse)
    tracker = ModelDeltaTracker(model)
    for change in (lambda each: each, lambda each: nn.Parameter(each.data)):
        _train(*_call(model, change), 1, 2)  # the tables' own memory
        assert tracker.get_delta()["0"].ids.tolist() == [1, 2]
    _train(*_call(model, lambda each: each.detach().requires_grad_()), 3)
    assert 3 in tracker.get_delta()["0"].ids.tolist()
    other = _model(is_sparse)
    tracker = ModelDeltaTracker(other)
    _train(*_call(other, lambda each: nn.Parameter(each.detach().clone())), 1, 2)
    with pytest.warns(UntrackedTrainingWarning):
        tracker.get_delta()


def test_an_optimizer_of_former_parameters_is_noticed() -> None:
    model = _model(is_sparse=True)
    tracker, former = ModelDeltaTracker(model), [*model.parameters()]
    model.load_state_dict({name: each.clone() for name, each in model.state_dict().items()}, assign=True)
    for _ in range(100):
        _train(model, former, 1)
        tracker.step()
    _train(model, former, 1)
    with pytest.warns(UntrackedTrainingWarning, match="no batch has updated them"):
        tracker.step()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("is_sparse", [True, False])
@pytest.mark.parametrize("how", ["lerp_", "copy_", "AveragedModel", "frozen"])
def test_an_average_of_the_trained_model_may_be_tracked(how: str, is_sparse: bool) -> None:
    trained = _model(is_sparse)
    average: Any = AveragedModel(trained) if how == "AveragedModel" else copy.deepcopy(trained)
    average.requires_grad_(how != "frozen")
    tracker = ModelDeltaTracker(average)
    for number in range(30):
        _train(trained, trained.parameters(), 1, 2)
        with torch.no_grad():
            for own, its in zip(average.parameters(), trained.parameters(), strict=True):
                if how in ("lerp_", "copy_"):
                    own.lerp_(its, 0.5) if how == "lerp_" else own.copy_(its)
        if how == "AveragedModel" and number == 25:
            average.update_parameters(trained)
        tracker.step()
    delta = tracker.get_delta()
    assert delta.num_rows == 0 if how == "frozen" else {1, 2} <= {*next(iter(delta.values())).ids.tolist()}


@pytest.mark.parametrize("is_sparse", [True, False])
def test_other_trained_modules_are_no_copies(is_sparse: bool) -> None:
    model, other = _model(is_sparse), nn.Sequential(nn.EmbeddingBag(20, 3), nn.Linear(3, 1))
    tracker = ModelDeltaTracker(model)
    for _ in range(20):
        _train(other, other.parameters(), 1)
        tracker.step()
    tracker.get_delta()
    copied = copy.deepcopy(model)
    for _ in range(20):  # both are trained
        for each in (model, copied):
            _train(each, each.parameters(), 1)
        tracker.step()
    assert tracker.get_delta()["0"].ids.tolist() == [1]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_copy_of_a_sharded_model(one_rank: RankPool, two_ranks: RankPool, world_size: int) -> None:
    ranks = one_rank if world_size == 1 else two_ranks
    for tables in ranks.run(f"{_CASES}:trained"):
        assert tables


def test_a_copy_that_was_made_before_the_model_was_sharded(one_rank: RankPool) -> None:
    assert all(ranks == ["ec.embedding_bags.row"] for ranks in one_rank.run(f"{_CASES}:trained_unsharded"))
