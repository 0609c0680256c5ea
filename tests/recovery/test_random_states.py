"""RandomStates: the next random numbers after a restore, and states that are refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.recovery.random_states import RandomStates
from delta_tracker.stream.format.state_tree import pack, unpack


@pytest.fixture(autouse=True)
def _same_states_afterwards() -> Iterator[None]:
    states = RandomStates().state_dict()
    yield
    RandomStates().load_state_dict(states)


def _numbers() -> list[float]:
    """Return the next numbers of each generator, also the second of a pair, which is kept in a state."""
    gauss = [random.gauss(0, 1), float(np.random.standard_normal())]  # noqa: NPY002
    return [*gauss, *torch.rand(3).tolist(), random.random(), *np.random.rand(2).tolist()]  # noqa: NPY002


def test_the_same_numbers_follow_after_a_restore() -> None:
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)  # noqa: NPY002
    _numbers()  # the second number of each pair is held
    saved = unpack(pack(RandomStates().state_dict(), "random"))
    expected = _numbers()
    _numbers()
    RandomStates().load_state_dict(saved)
    assert _numbers() == expected


def test_a_dropout_is_repeated() -> None:
    layer, ones = torch.nn.Dropout(), torch.ones(50)
    saved = RandomStates().state_dict()
    expected = layer(ones)
    assert not torch.equal(layer(ones), expected)
    RandomStates().load_state_dict(saved)
    assert torch.equal(layer(ones), expected)


@pytest.mark.advice("InvalidArgumentError: RandomStates.load_state_dict")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("torch", torch.zeros(5, dtype=torch.uint8)),
        ("torch", torch.zeros(5056)),
        ("torch", None),
        ("cuda", [torch.zeros(16, dtype=torch.uint8)] * 99),
        ("cuda", None),
        ("random", (3, (1, 2), None)),
        ("random", (3, tuple([1] * 624 + [700]), None)),
        ("random", (9, (), None)),
        ("random", None),
        ("random", ()),
        ("numpy", {"bit_generator": "PCG64", "state": {}}),
        ("numpy", {"bit_generator": "MT19937"}),
        ("numpy", {"bit_generator": "MT19937", "state": {"key": np.zeros(3), "pos": 1}, "has_gauss": 0, "gauss": 0.0}),
        ("numpy", None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_state_that_a_generator_rejects_changes_no_generator(name: str, value: Any) -> None:
    before = RandomStates().state_dict()
    expected = _numbers()
    RandomStates().load_state_dict(before)
    torch.manual_seed(5)
    now = RandomStates().state_dict()
    with pytest.raises(InvalidArgumentError, match=rf"^state\['{name}'\]="):
        RandomStates().load_state_dict(before | {name: value})
    assert pack(RandomStates().state_dict(), "") == pack(now, "")
    RandomStates().load_state_dict(before)
    assert _numbers() == expected


@pytest.mark.parametrize("state", [None, {}, {"torch": 1}, []])
def test_other_fields_are_refused(state: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="state_dict"):
        RandomStates().load_state_dict(state)


def test_another_generator_of_numpy() -> None:
    held = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(5))
        saved = unpack(pack(RandomStates().state_dict(), "random"))
        expected = _numbers()
        RandomStates().load_state_dict(saved)
        assert _numbers() == expected
    finally:
        np.random.set_bit_generator(held)
