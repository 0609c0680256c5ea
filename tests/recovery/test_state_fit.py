"""States of optimizers and schedulers that an object of another kind would accept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torchrec.optim.keyed import KeyedOptimizerWrapper

from delta_tracker.errors import InvalidArgumentError, RestoreMismatchError
from delta_tracker.recovery.state_fit import check_objects
from delta_tracker.recovery.training_states import TrainingStates
from delta_tracker.state_tree import pack
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import StateSpec, TableStates
from tests.stream.streams import Writer

_STATES = TableStates("EXACT_TEST", ((0, 4),), (StateSpec("sum", torch.float32, "range"),))


def _layers(count: int = 2) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(count)]
    for each in parameters:
        each.grad = torch.ones(2)
    return parameters


def _keyed(count: int = 2, *, saves: bool = True, steps: bool = True) -> KeyedOptimizerWrapper:
    named = {f"layer{number}": each for number, each in enumerate(_layers(count))}
    optimizer = KeyedOptimizerWrapper(named, lambda these: optim.Adam(these, lr=0.1))
    optimizer.save_param_groups(saves)
    if steps:
        optimizer.step()
    return optimizer


def _adam(count: int = 2, *, steps: bool = False) -> optim.Adam:
    optimizer = optim.Adam(_layers(count))
    if steps:
        optimizer.step()
    return optimizer


def _groups(*counts: int) -> optim.Adam:
    return optim.Adam([{"params": _layers(count)} for count in counts])


def _check(saved: Any, found: Any) -> None:
    writer = Writer(Storage("memory://"), states=_STATES)
    state = saved if isinstance(saved, int | list) else saved.state_dict()
    writer.training.append(pack({"training": {"each": state}, "rank": {}, "data": None}, "state"))
    check_objects("training_state", {"each": found}, TrainingStates(writer.storage, writer.snapshot()), 0, [])


@pytest.mark.parametrize(
    ("saved", "found"),
    [
        (lambda: _adam(steps=True), _adam),
        (lambda: optim.Adam(_layers(), lr=0.5, amsgrad=True), _adam),
        (_keyed, _keyed),
        (lambda: StepLR(_adam(), 2), lambda: StepLR(_adam(), 3)),
        (lambda: StepLR(_adam(), 2).optimizer, _adam),  # the scheduler has added a key
        (_adam, lambda: StepLR(_adam(), 2).optimizer),
        (lambda: optim.AdamW(_layers()), lambda: optim.AdamW(_layers(), lr=0.1)),
        (lambda: 3, lambda: torch.amp.GradScaler("cpu")),
    ],
)
def test_the_state_of_an_equal_object_fits(saved: Callable[[], Any], found: Callable[[], Any]) -> None:
    _check(saved(), found())


@pytest.mark.parametrize(
    ("saved", "found", "words"),
    [
        (_adam, lambda: optim.SGD(_layers()), r"keys that differ in param_groups\[0\] of .* is .*'betas'.*'momentum'"),
        (_adam, lambda: optim.RAdam(_layers()), r"is \['amsgrad', 'fused'\] in the version but \[\]"),
        (_adam, lambda: optim.AdamW(_layers()), r"decoupled_weight_decay in .* is False in the version but True"),
        (_adam, lambda: _groups(1, 1), r"numbers of parameters of each group .* is \[2\] in the version but \[1, 1\]"),
        (_adam, lambda: _adam(3), r"is \[2\] in the version but \[3\]"),
        (lambda: StepLR(_adam(), 2), _adam, r"one, with the keys \['step_size'.* an optimizer \(Adam\)"),
        (
            _adam,
            lambda: StepLR(_adam(), 2),
            r"a StepLR, is \['param_groups', 'state'\] in the version but \['base_lrs'",
        ),
        (lambda: CosineAnnealingLR(_adam(), 2), lambda: StepLR(_adam(), 2), r"'T_max'.*'step_size'"),
        (lambda: 3, _adam, r"another one, with the keys none,"),
        (lambda: [{}], lambda: StepLR(_adam(), 2), r"is \[\] in the version but \['base_lrs'"),
        (lambda: _keyed(2), lambda: _keyed(3), r"parameters with a state .* is \['layer0', 'layer1'\] in the version"),
        (_keyed, lambda: _keyed(steps=False), r"is \['layer0', 'layer1'\] in the version but \[\]"),
        (_keyed, _adam, r"parameters of each group .*'layer0'.*\[\[0, 1\]\]"),
    ],
)
def test_the_state_of_another_object_is_refused(saved: Callable[[], Any], found: Callable[[], Any], words: str) -> None:
    with pytest.raises(RestoreMismatchError, match=words) as caught:
        _check(saved(), found())
    assert "training_state['each']" in str(caught.value)


def test_an_optimizer_that_does_not_load_its_groups_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"training_state\['each'\].*save_param_groups"):
        _check(_keyed(), _keyed(saves=False))
