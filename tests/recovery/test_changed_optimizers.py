"""Optimizers that torch steps, restored into a job whose parameters may have changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest
import torch
from torch import nn

from delta_tracker import ModelDeltaTracker, Publisher, Recovery, Storage, restore


def _job(sizes: Mapping[str, int]) -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
    model = nn.ModuleDict({name: nn.EmbeddingBag(size, 2, sparse=True) for name, size in sizes.items()})
    return model, torch.optim.Adagrad(model.parameters(), lr=0.1)


def _sums(model: nn.ModuleDict, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {name: optimizer.state[bag.weight]["sum"].clone() for name, bag in model.items()}


@pytest.mark.parametrize(
    ("sizes", "ignore", "is_same"),
    [
        ({"a": 6, "b": 6}, (), True),
        ({"a": 6, "b": 6}, ["a"], True),
        ({"b": 6, "a": 6}, (), False),
        ({"a": 6, "b": 9}, ["b"], False),
        ({"a": 6, "c": 6}, ["b", "c"], False),
    ],
)
def test_states_are_restored_only_if_the_parameters_are_the_same(
    sizes: Mapping[str, int], ignore: Collection[str], is_same: bool
) -> None:
    storage = Storage("memory://")
    model, optimizer = _job({"a": 6, "b": 6})
    tracker, recovery = ModelDeltaTracker(model), Recovery(training_state={"optimizer": optimizer})
    (model["a"](torch.tensor([[1]])).sum() + model["b"](torch.tensor([[2]])).sum()).backward()
    optimizer.step()
    tracker.step()
    with Publisher(tracker, storage, recovery=recovery) as publisher:
        publisher.publish()
    tracker.detach()
    saved = _sums(model, optimizer)
    model, optimizer = _job(sizes)
    before, recovery = _sums(model, optimizer), Recovery(training_state={"optimizer": optimizer})
    restored = restore(model, storage, recovery=recovery, ignore=ignore, on_model_change="continue")
    assert ("optimizer" in str(restored.differences)) != is_same
    expected = saved if is_same else before
    assert all(torch.equal(each, expected[name]) for name, each in _sums(model, optimizer).items())
