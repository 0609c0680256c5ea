"""Which dense tensors a publisher sends, and the warnings on both sides if some are left out."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from delta_tracker import ModelDeltaTracker, ModelTarget, Predictor, Publisher, Storage
from delta_tracker.errors import InvalidArgumentError


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(10, 4, sparse=True)
        self.over = nn.Linear(4, 2)
        self.out = nn.Linear(2, 1)


def _published(model: nn.Module, dense: Any) -> tuple[Storage, list[str]]:
    """Publish a snapshot; return the stream and the names of its dense tensors."""
    storage = Storage("memory://")
    with ModelDeltaTracker(model) as tracker, Publisher(tracker, storage, dense=dense) as publisher:
        return storage, sorted(publisher.snapshot().dense)


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_both_sides_say_that_dense_parameters_are_not_sent(caplog) -> None:
    storage, sent = _published(_Model(), None)
    (said,) = _warnings(caplog)
    assert sent == []
    assert "not published" in said
    assert "out.bias, out.weight, over.bias, over.weight. Pass dense=True" in said
    caplog.clear()
    Predictor(_Model(), storage).sync()
    (said,) = _warnings(caplog)
    assert "['out.bias', 'out.weight', 'over.bias', 'over.weight']" in said
    assert "Publisher(dense=True)" in said


def test_tied_weights_are_not_named_as_missing(caplog) -> None:
    model = _Model()
    model.over = nn.Linear(4, 10, bias=False)
    model.over.weight = model.bag.weight
    _published(model, None)
    (said,) = _warnings(caplog)
    assert "over" not in said
    assert "out.bias, out.weight." in said


@pytest.mark.parametrize("kind", ["declined", "sent", "set elsewhere"])
def test_neither_side_warns_of_a_choice(kind: str, caplog) -> None:
    storage, _ = _published(_Model(), kind == "sent")
    served = _Model()
    Predictor(served if kind == "sent" else ModelTarget(served, dense=False), storage).sync()
    assert _warnings(caplog) == []


def test_true_is_the_whole_model() -> None:
    trained, served = _Model(), _Model()
    storage, _ = _published(trained, dense=True)
    Predictor(served, storage).sync()
    assert all(torch.equal(each, trained.state_dict()[name]) for name, each in served.state_dict().items())


@pytest.mark.parametrize(
    ("choose", "sent"),
    [
        (lambda model: [model.over, "out.bias"], ["out.bias", "over.bias", "over.weight"]),
        (lambda model: {"any": model.over}, ["over.bias", "over.weight"]),
        (
            lambda _: {"left": nn.Linear(1, 1), "right": nn.Linear(1, 1)},
            ["left.bias", "left.weight", "right.bias", "right.weight"],
        ),
        (
            lambda model: (each for each in (model.over, model.out)),
            ["out.bias", "out.weight", "over.bias", "over.weight"],
        ),
    ],
    ids=["a list", "a dict", "a dict of modules outside the model", "a generator"],
)
def test_modules_and_names_are_combined(choose, sent: list[str]) -> None:
    model = _Model()
    assert _published(model, choose(model))[1] == sent


def test_two_modules_outside_the_model_need_names() -> None:
    with pytest.raises(InvalidArgumentError, match="Pass a mapping of names to modules"):
        _published(_Model(), [nn.Linear(1, 1), nn.Linear(1, 1)])


def test_a_name_of_a_table_is_refused_for_a_module_outside_the_model() -> None:
    with pytest.raises(InvalidArgumentError, match=r"'bag.weight'.*Pass another name"):
        _published(_Model(), {"bag": nn.Linear(4, 4)})


@pytest.mark.parametrize("wrong", ["over", ["over.weight", 3], {"over": "over.weight"}])
def test_other_choices_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="Pass a module, a list of names or modules, or a dict of modules"):
        _published(_Model(), wrong)
