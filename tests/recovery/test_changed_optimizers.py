"""Optimizers that torch steps, restored into a job whose parameters changed, moved or are ignored."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn, optim
from torchrec.optim.keyed import KeyedOptimizerWrapper

from delta_tracker import ModelDeltaTracker, Publisher, Recovery, Standby, Storage, restore
from delta_tracker.errors import RestoreMismatchError
from delta_tracker.publisher import training

_Build = Callable[[nn.Module], Any]


class _Model(nn.Module):
    """Tables of the sizes that are numbers, and dense layers of the widths that are lists."""

    def __init__(self, sizes: Mapping[str, int | list[int]]) -> None:
        super().__init__()
        for name, size in sizes.items():
            layer = nn.EmbeddingBag(size, 2) if isinstance(size, int) else nn.Linear(*size, bias=False)
            self.add_module(name, layer)

    def states(self, optimizer: optim.Optimizer, name: str = "exp_avg") -> dict[str, Tensor]:
        return {
            key: optimizer.state[parameter][name].clone()
            for key, parameter in self.named_parameters()
            if name in optimizer.state.get(parameter, {})
        }


def _adam(model: nn.Module) -> optim.Optimizer:
    return optim.Adam(model.parameters(), lr=0.1)


def _step(model: nn.Module, optimizer: optim.Optimizer) -> None:
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        parameter.grad = torch.randn(parameter.shape)
    optimizer.step(*([lambda: 0.0] if isinstance(optimizer, optim.LBFGS) else []))


@contextmanager
def _without_names() -> Iterator[None]:
    """Publish as a release that did not save the names of the parameters."""
    with mock.patch.object(training, "group_names", return_value=None):
        yield


def _publish(
    sizes: Mapping[str, int | list[int]], build: _Build = _adam, **options: Any
) -> tuple[Storage, dict[str, Tensor]]:
    """Train and publish; return the stream and the optimizer's states."""
    torch.manual_seed(1)
    storage, model = Storage("memory://"), _Model(sizes)
    optimizer, tracker = build(model), ModelDeltaTracker(model)
    _step(model, optimizer)
    tracker.step()
    recovery = Recovery(training_state={"optimizer": optimizer})
    with Publisher(tracker, storage, recovery=recovery, **options) as publisher:
        publisher.publish()
    tracker.detach()
    return storage, model.states(optimizer)


_SIZES: dict[str, int | list[int]] = {"a": 6, "b": 6, "c": [2, 2], "d": [2, 2]}
_CASES: list[tuple[dict[str, int | list[int]], list[str], list[str]]] = [
    (_SIZES, [], []),
    ({"b": 6, "a": 6, "c": [2, 2], "d": [2, 2]}, [], []),
    ({"d": [2, 2], "b": 6, "c": [2, 2], "a": 6}, [], []),
    (_SIZES, ["a"], ["a"]),
    ({"b": 6, "c": [2, 2], "d": [2, 2]}, ["a"], []),
    ({"new": 6, **_SIZES}, ["new"], ["new"]),
    ({"a": 9, "b": 6, "d": [2, 2], "c": [2, 2]}, ["a"], ["a"]),
    ({"b": 6, "d": [2, 2], "e": [2, 2], "a": 6}, ["c.weight", "e.weight"], ["e"]),
]


@pytest.mark.parametrize(("sizes", "ignore", "kept"), _CASES)
@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("on_model_change", ["stop", "continue"])
def test_states_follow_the_names_of_their_parameters(
    sizes: Mapping[str, int | list[int]],
    ignore: Collection[str],
    kept: Collection[str],
    on_model_change: str,
    *,
    is_trained: bool,
) -> None:
    storage, saved = _publish(_SIZES)
    model = _Model(sizes)
    optimizer = optim.Adam(model.parameters(), lr=0.3)
    if is_trained:
        _step(model, optimizer)
    before = model.states(optimizer)
    recovery = Recovery(training_state={"optimizer": optimizer})
    names = ignore if on_model_change == "stop" else [name for name in ignore if name in ("a", "c.weight")]
    restored = restore(model, storage, recovery=recovery, ignore=names, on_model_change=on_model_change)
    assert "optimizer" not in str(restored.differences)
    expected = {f"{name}.weight": (before if name in kept else saved).get(f"{name}.weight") for name in sizes}
    found = model.states(optimizer)
    assert found.keys() == {name for name, each in expected.items() if each is not None}
    assert all(torch.equal(each, expected[name]) for name, each in found.items())
    assert optimizer.param_groups[0]["lr"] == 0.1
    _step(model, optimizer)


@pytest.mark.parametrize(
    ("sizes", "ignore", "is_same"),
    [
        (_SIZES, [], True),
        (_SIZES, ["a"], True),
        (_CASES[1][0], [], False),
        (_CASES[2][0], [], False),
        ({"a": 9, "b": 6, "c": [2, 2], "d": [2, 2]}, ["a"], False),
        ({"new": 6, "b": 6, "c": [2, 2], "d": [2, 2]}, ["a", "new"], False),
        ({"b": 6, "a": 6, "c": [2, 2], "d": [2, 2]}, ["optimizer"], True),
    ],
)
def test_a_stream_without_names_is_restored_only_where_the_order_is_the_same(
    sizes: Mapping[str, int | list[int]], ignore: Collection[str], *, is_same: bool
) -> None:
    with _without_names():
        storage, saved = _publish(_SIZES)
    model = _Model(sizes)
    optimizer = _adam(model)
    _step(model, optimizer)
    before, recovery = model.states(optimizer), Recovery(training_state={"optimizer": optimizer})
    if not is_same:
        with pytest.raises(RestoreMismatchError, match=r"order of parameters that training_state\['optimizer'\] may"):
            restore(model, storage, recovery=recovery, ignore=ignore)
        restored = restore(model, storage, recovery=recovery, ignore=ignore, on_model_change="continue")
        assert "parameters that training_state['optimizer'] may have" in str(restored.differences)
    else:
        restore(model, storage, recovery=recovery, ignore=ignore)
    expected = saved if is_same and "optimizer" not in ignore else before
    assert all(torch.equal(each, expected[name]) for name, each in model.states(optimizer).items())


@pytest.mark.parametrize("dense", [True, ["d.weight", "c.weight"], ["e.weight", "c.weight"]])
def test_an_unchanged_job_restores_a_stream_without_names(dense: Any) -> None:
    sizes = {"d": [2, 2], "b": 6, "e": [2, 2], "c": [2, 2], "a": 6}
    with _without_names():
        storage, saved = _publish(sizes, dense=dense)
    model = _Model(sizes)
    optimizer = _adam(model)
    restore(model, storage, recovery=Recovery(training_state={"optimizer": optimizer}))
    assert all(torch.equal(each, saved[name]) for name, each in model.states(optimizer).items())


def test_a_standby_matches_states_by_name() -> None:
    storage, saved = _publish(_SIZES)
    model = _Model(_CASES[1][0])
    optimizer = _adam(model)
    standby = Standby(model, storage, recovery=Recovery(training_state={"optimizer": optimizer}))
    standby.take_over(force=True)
    standby.close()
    assert all(torch.equal(each, saved[name]) for name, each in model.states(optimizer).items())


def _grouped(*groups: str) -> _Build:
    """Return a builder of an optimizer with groups of layers, of which each has another weight decay."""

    def build(model: nn.Module) -> optim.Optimizer:
        held = [[model.get_submodule(name).weight for name in group] for group in groups]
        return optim.Adam([{"params": each, "weight_decay": number} for number, each in enumerate(held)])

    return build


def _outside(count: int, *, is_named: bool = False, step: int = 1) -> _Build:
    """Return a builder of an optimizer that also has parameters of a loss, of sizes that tell them apart."""

    def build(model: nn.Module) -> optim.Optimizer:
        others = [(f"loss{number}", nn.Parameter(torch.ones(number + 1))) for number in range(count)][::step]
        named = [*model.named_parameters(), *others]
        return optim.Adam(named if is_named else [each for _, each in named])

    return build


def _keyed(model: nn.Module) -> KeyedOptimizerWrapper:
    optimizer = KeyedOptimizerWrapper(dict(model.named_parameters()), optim.Adam)
    optimizer.save_param_groups(True)
    return optimizer


_MOVED, _LARGER = _CASES[1][0], {**_SIZES, "a": 9}


@pytest.mark.parametrize(
    ("build", "other", "sizes", "ignore", "words"),
    [
        (_grouped("ac", "bd"), _grouped("ca", "db"), _MOVED, [], ""),
        (_grouped("a", "bcd"), _grouped("a", "dcb"), _MOVED, ["a"], ""),
        (_grouped("ac", "bd"), _grouped("bd", "ac"), _SIZES, [], r"the group of 'a.weight' in .* is 0 .* but 1 in"),
        (_grouped("ac", "bd"), _grouped("abcd"), _SIZES, [], r"the number of groups of .* is 2 .* but 1 in"),
        (_adam, _grouped("abc"), _SIZES, [], r"parameters that differ in .* is \['d.weight'\] .* but \[\] in"),
        (_outside(1), _outside(1), _MOVED, [], ""),
        (_outside(2), _outside(2), _SIZES, [], ""),
        (_outside(2), _outside(2), _MOVED, [], "the size or the order of parameters that"),
        (_outside(2), _outside(1), _SIZES, [], r"is \['a parameter outside the model \(2\)'\] in the version"),
        (_outside(2, is_named=True), _outside(2, is_named=True, step=-1), _MOVED, [], ""),
        (optim.LBFGS, optim.LBFGS, _SIZES, [], ""),
        (optim.LBFGS, optim.LBFGS, _MOVED, [], r"the parameters of .* is \['a.weight', .* but \['b.weight', 'a"),
        (_keyed, _keyed, _MOVED, [], ""),
        (_keyed, _keyed, _LARGER, ["a"], "the size or the order of parameters that"),
    ],
)
def test_what_names_cannot_match_is_refused(
    build: _Build, other: _Build, sizes: Mapping[str, int | list[int]], ignore: Collection[str], words: str
) -> None:
    def make(model: nn.Module, what: _Build) -> Any:
        return what(model.parameters() if what is optim.LBFGS else model)

    storage, saved = _publish(_SIZES, lambda model: make(model, build))
    model = _Model(sizes)
    optimizer = make(model, other)
    _step(model, optimizer)
    before, recovery = model.states(optimizer), Recovery(training_state={"optimizer": optimizer})
    if words:
        with pytest.raises(RestoreMismatchError, match=words):
            restore(model, storage, recovery=recovery, ignore=ignore)
    else:
        restore(model, storage, recovery=recovery, ignore=ignore)
    for name, each in model.states(optimizer).items():
        is_kept = words or name.removesuffix(".weight") in ignore
        assert torch.equal(each, (before if is_kept else saved)[name]), name
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            moment = optimizer.state[parameter].get("exp_avg")
            assert moment is None or moment.shape == parameter.shape


@pytest.mark.advice("RestoreMismatchError: _check_match _check_groups")
def test_an_optimizer_with_other_groups_is_ignored() -> None:
    storage, _ = _publish(_SIZES, _grouped("ac", "bd"))
    model = _Model(_SIZES)
    recovery = Recovery(training_state={"optimizer": _grouped("ad", "bc")(model)})
    with pytest.raises(RestoreMismatchError, match=r"Name 'optimizer' in ignore"):
        restore(model, storage, recovery=recovery)
    assert restore(model, storage, recovery=recovery, ignore=["optimizer"]).version == 1
