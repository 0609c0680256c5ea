"""States of a rank that other ranks do not have."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from delta_tracker.errors import NotRecoverableError
from delta_tracker.recovery.preparation import names_of_all_ranks
from delta_tracker.recovery.training_states import TrainingStates
from delta_tracker.state_tree import pack
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import StateSpec, TableStates
from tests.stream.streams import Writer

_STATES = TableStates("EXACT_TEST", ((0, 4),), (StateSpec("sum", torch.float32, "range"),))


def states_of(*names: Sequence[str]) -> TrainingStates:
    """Return the training states of ranks with these names."""
    writer = Writer(Storage("memory://"), states=_STATES)
    for rank, each in enumerate(names):
        state = {"rank": {name: rank for name in each if name != "data"}, "data": rank if "data" in each else None}
        writer.training.append(pack(state, "state"))
    return TrainingStates(writer.storage, writer.snapshot())


def test_states_of_all_ranks_are_listed() -> None:
    states = states_of(["a", "data"], ["data", "a"])
    assert names_of_all_ranks(states, [], "memory://", 1) == ["a", "data"]
    assert (states.of_all_ranks("a"), states.of_all_ranks("data")) == ([0, 1], [0, 1])


@pytest.mark.parametrize(("first", "second", "rank"), [(["a"], ["a", "b"], 0), (["b", "a"], ["a"], 1)])
def test_a_state_of_some_ranks_only_is_refused(first: list[str], second: list[str], rank: int) -> None:
    states = states_of(first, second)
    with pytest.raises(
        NotRecoverableError, match=rf"rank {rank} had no states \['b'\]: restore it with 2 ranks, or ignore them"
    ):
        names_of_all_ranks(states, [], "memory://", 1)
    assert names_of_all_ranks(states, ["b"], "memory://", 1) == ["a", "b"]
    assert states.of_all_ranks("b") == [None if each == rank else each for each in range(2)]


def test_a_position_of_some_ranks_only_is_refused() -> None:
    with pytest.raises(NotRecoverableError, match=r"rank 1 had no states \['data'\]"):
        names_of_all_ranks(states_of(["data"], []), [], "memory://", 1)
