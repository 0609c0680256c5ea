"""Objects with hooks, locks or threads are neither pickled nor copied, and the error says what to save instead."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from delta_tracker import DataPosition, ModelDeltaTracker, Predictor, Publisher, RankCounters, Standby
from delta_tracker.errors import UncopyableError
from delta_tracker.stream.mirroring import Mirror
from delta_tracker.tracker.consumer_handle import ConsumerHandle


def _torch_save(value: object) -> None:
    torch.save(value, io.BytesIO())


_COPIES: list[Callable[[Any], object]] = [pickle.dumps, _torch_save, copy.copy, copy.deepcopy]


def _model() -> nn.Module:
    return nn.Sequential(nn.Embedding(10, 4, sparse=True))


@pytest.mark.parametrize("copies", _COPIES)
@pytest.mark.parametrize(
    "kind", [ConsumerHandle, DataPosition, Mirror, ModelDeltaTracker, Predictor, Publisher, Standby]
)
def test_the_error_names_the_class_and_what_to_do(kind: type, copies: Callable[[Any], object]) -> None:
    for value in (kind.__new__(kind), {"config": [kind.__new__(kind)]}):
        if copies is copy.copy and isinstance(value, dict):
            continue  # the same objects
        with pytest.raises(UncopyableError, match=rf"{kind.__name__} cannot .*(state_dict\(\)|[Bb]uild)") as caught:
            copies(value)
        assert isinstance(caught.value, TypeError), "frameworks expect the error that pickle raises for a lock"


@pytest.mark.advice("UncopyableError: Uncopied.__reduce_ex__")
def test_states_can_be_saved_instead(tmp_path: Path) -> None:
    with ModelDeltaTracker(_model()) as tracker, Publisher(tracker, tmp_path / "stream") as publisher:
        publisher.snapshot()
        predictor = Predictor(_model(), tmp_path / "stream")
        predictor.sync()
        for value in (tracker, predictor):
            with pytest.raises(UncopyableError, match="Save or copy its state_dict"):
                torch.save(value, tmp_path / "state")
            torch.save(value.state_dict(), tmp_path / "state")
            loaded = torch.load(tmp_path / "state")
            assert loaded.keys() == value.state_dict().keys()
            assert copy.deepcopy(value.state_dict()).keys() == loaded.keys()
        with ModelDeltaTracker(_model()) as again:
            again.load_state_dict(tracker.state_dict())


class _Total:
    def __init__(self) -> None:
        self.total = 0

    def state_dict(self) -> dict[str, int]:
        return {"total": self.total}

    def merge(self, states: Any) -> dict[str, int]:
        return {"total": sum(state["total"] for state in states)}

    def load_state_dict(self, state: Any) -> None:
        self.total = state["total"]


@pytest.mark.parametrize("copies", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_counters_can_be_copied(copies: Callable[[Any], Any]) -> None:
    total = _Total()
    counters = RankCounters({"total": total})
    counters._group = object.__new__(type("Group", (), {"__reduce_ex__": None}))  # as after a gather
    total.total = 3
    copied = copies(counters)
    total.total = 5
    counters.load_state_dict(copied.state_dict())
    assert total.total == 3
