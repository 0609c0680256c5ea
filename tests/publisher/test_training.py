"""TrainingCuts: what it saves, when, and what it refuses."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.publisher.host_copies import HostCopier
from delta_tracker.publisher.training import Recovery, TakenState, TrainingCuts
from delta_tracker.stream.format.state_tree import unpack
from delta_tracker.tracker.data_position import DataPosition
from delta_tracker.types import ShardSpec, TableSpec
from tests.ranks import RankPool

_CASES = "tests.publisher.training_cases"


class _Object:
    """Object with a state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class _Loader(_Object):
    def __iter__(self) -> Any:
        for batch in range(9):
            self.state = batch + 1
            yield batch


def _tracker(data: DataPosition[int] | None = None) -> Any:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    table = TableSpec("fused", 10, 4, torch.float32)
    whole = TableSpec("whole", 3, 4, torch.float32)
    return SimpleNamespace(
        model=model,
        data_position=data,
        num_batches=7,
        shards={
            "fused": ShardSpec(table, 5, 5, ((0, 4),)),
            "whole": ShardSpec(whole, 1, 2, ((0, 1), (2, 4)), is_replicated=True),
        },
        tables={"fused": table, "whole": whole},
        fused_tables=frozenset(["fused"]),
        table_states={},
        collision_modules={},
        unfused_storages=dict,
        kernel_scalars=lambda: {"fused": {"iter": 3, "lr": 0.1}},
        watch_states=lambda: None,
        num_unstepped=0,
    )


def _cuts(
    tracker: Any, *, training: Any = None, rank: Any = None, is_first: bool = True, others: Any = None
) -> TrainingCuts:
    """Return the training states of a publisher. ``others`` has the position and carried ids of other consumers."""
    handle: Any = SimpleNamespace(name="pub", position=9, others=lambda: others or {}, note_of=lambda _: None)
    objects = Recovery(training_state=training or {}, rank_state=rank or {})
    return TrainingCuts(tracker, tracker, handle, objects, is_first=is_first)


def _stored(taken: TakenState) -> Any:
    assert not HostCopier().copy(taken.selections), "nothing to wait for on the CPU"
    return unpack(b"".join(taken.tree.buffers([selection.copied for selection in taken.selections])))


def test_the_state_of_rank_0() -> None:
    data = DataPosition(_Loader(0), event_time=lambda batch: batch + 0.5)
    tracker = _tracker(data)
    list(zip(data, range(2), strict=False))
    data.advance()
    optimizer = torch.optim.Adam(tracker.model.parameters(), lr=0.1)
    others = {"other": (2, {"fused": torch.tensor([1, 3])}), "new": (0, {})}
    cuts = _cuts(tracker, training={"opt": optimizer}, rank={"own": _Object({"a": [1]})}, others=others)
    for position, version in ((1, 4), (3, 5)):
        cuts.add(position, version)
    taken = cuts.take()
    assert taken.event_time == 0.5
    state = _stored(taken)
    assert state.keys() == {"library", "training", "rank", "data"}
    assert state["data"] == {"batches": 1, "event_time": 0.5, "loader": 1}
    assert state["training"]["opt"]["param_groups"][0]["lr"] == 0.1
    assert state["rank"] == {"own": {"a": [1]}}
    library = state["library"]
    assert library["consumers"]["new"] == {"version": None, "left_out": {}}
    assert library["consumers"]["other"]["version"] == 4
    assert library["consumers"]["other"]["left_out"]["fused"].tolist() == [6, 8], "global ids"
    assert library["dense"].keys() == tracker.model.state_dict().keys()
    assert "buffers" not in library
    assert library["kernels"] == {"fused": {"iter": 3, "lr": 0.1}}
    assert library["shards"] == {"whole": asdict(tracker.shards["whole"])}
    assert (library["batches"], library["publisher"]) == (7, "pub")


def test_other_ranks_save_their_buffers_and_their_own_states() -> None:
    tracker = _tracker()
    tracker.model[1].running_mean.add_(3)
    taken = _cuts(tracker, training={"opt": _Object({1})}, rank={"own": _Object(1)}, is_first=False).take()
    state = _stored(taken)
    assert (state["training"], state["rank"], state["data"], taken.event_time) == ({}, {"own": 1}, None, None)
    names = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert state["library"]["buffers"].keys() == names
    assert state["library"]["buffers"]["1.running_mean"].tolist() == [3.0, 3.0]
    assert "dense" not in state["library"]


def test_the_copies_have_the_values_of_the_cut() -> None:
    live = {"a": torch.ones(4), "b": torch.tensor(2.0), "c": torch.arange(6.0).reshape(2, 3).T, "d": torch.ones(3, 0)}
    live["e"] = torch.ones(2, dtype=torch.complex128)
    expected = {name: tensor.clone() for name, tensor in live.items()}
    cuts = _cuts(_tracker(), training={"live": _Object(live)})
    taken = cuts.take()
    HostCopier().copy(taken.selections)
    for tensor in live.values():
        tensor.mul_(5)  # training continues before the state is written
    state: Any = unpack(b"".join(taken.tree.buffers([selection.copied for selection in taken.selections])))
    found = state["training"]["live"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], each) and found[name].shape == each.shape for name, each in expected.items())


def test_states_are_taken_anew_for_each_version() -> None:
    each = _Object(1)
    cuts = _cuts(_tracker(), rank={"each": each})
    each.state = 2
    assert _stored(cuts.take())["rank"] == {"each": 2}
    each.state = {1}
    with pytest.raises(InvalidArgumentError, match=r"^rank_state\['each'\]="):
        cuts.take()


class _NoState:
    pass


@pytest.mark.parametrize(
    ("training", "rank", "reason"),
    [
        ({"a": _Object(1)}, {"a": _Object(1)}, "Use other names"),
        ({"data": _Object(1)}, {}, "Use other strings"),
        ({}, {"data": _Object(1)}, "Use other strings"),
        ({1: _Object(1)}, {}, "Use other strings"),
        ({"a": _NoState()}, {}, r"training_state\['a'\].*load_state_dict"),
        ({}, {"a": {"x": 1}}, r"rank_state\['a'\].*load_state_dict"),
        ([1], {}, "a mapping of name to object"),
        ({"a": _Object({"x": [1, {2}]})}, {}, r"training_state\['a'\]\['x'\]\[1\]="),
        ({}, {"a": _Object((object(),))}, r"rank_state\['a'\]\[0\]="),
    ],
)
def test_what_cannot_be_saved_is_refused_before_any_version(training: Any, rank: Any, reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reason):
        _cuts(_tracker(), training=training, rank=rank)


@pytest.mark.advice("InvalidArgumentError: _states _check_groups")
def test_an_object_with_parameter_groups_must_save_them() -> None:
    class Optimizer(_Object):
        param_groups = ({"params": [torch.ones(1)], "lr": 0.1},)

    with pytest.raises(InvalidArgumentError, match="save_param_groups"):
        _cuts(_tracker(), training={"opt": Optimizer({"state": {}})})
    _cuts(_tracker(), training={"opt": Optimizer({"state": {}, "param_groups": []})})


def test_a_data_position_that_cannot_be_encoded() -> None:
    loader = _Loader({})
    data = DataPosition(loader)
    data.state_dict = lambda: {"loader": Tensor}  # type: ignore[assignment, method-assign, return-value]
    with pytest.raises(InvalidArgumentError, match=r"^state\['data'\]\['loader'\]="):
        _cuts(_tracker(data))


@pytest.mark.parametrize("case", ["unfused", "keyed_optimizers", "change_of_rate", "buffers"])
def test_torchrec(two_ranks: RankPool, case: str) -> None:
    two_ranks.run(f"{_CASES}:{case}")


def test_dense_parameters_without_an_optimizer_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    tracker = _tracker()
    linear, norm = tracker.model
    norm.bias.requires_grad_(False)
    cuts = _cuts(tracker, training={"adam": torch.optim.Adam(linear.parameters())})
    cuts.take()
    _cuts(tracker, is_first=False)
    (message,) = caplog.messages
    assert message.endswith("the state of their optimizer is not saved: 1.weight")
    _cuts(tracker, rank={"all": torch.optim.Adam(tracker.model.parameters())})
    assert len(caplog.messages) == 1
