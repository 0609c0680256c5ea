"""DataPosition with loaders, workers and pipelines."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from delta_tracker import DataPosition
from delta_tracker.errors import InvalidArgumentError
from delta_tracker.tracker.tracker import ModelDeltaTracker
from tests.ranks import RankPool

_CASES = "tests.tracker.data_position_cases"


class _Loader:
    """Loader of the numbers below ``end``, which iterators share, and whose state is a live object."""

    def __init__(self, end: int = 10) -> None:
        self.state: dict[str, Any] = {"next": 0}
        self.end = end

    def __iter__(self) -> Iterator[int]:
        while self.state["next"] < self.end:
            self.state["next"] += 1
            yield self.state["next"] - 1

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class _RankLoader(_Loader):
    """Loader that can continue at another number of ranks."""

    def load_rank_states(self, states: list[dict[str, int]]) -> None:
        self.state = max(states, key=lambda state: state["next"])


def _trained(data: DataPosition[int], num_batches: int, ahead: int = 0) -> tuple[Iterator[int], list[int]]:
    """Train batches with as many ``ahead``. Return the iterator, and the batches that are trained."""
    batches = iter(data)
    fetched = [next(batches) for _ in range(num_batches + ahead)]
    for _ in range(num_batches):
        data.advance()
    return batches, fetched[:num_batches]


@pytest.mark.parametrize("ahead", range(4))
def test_the_state_is_that_of_the_last_trained_batch(ahead: int) -> None:
    data = DataPosition(_Loader(), event_time=lambda batch: batch + 0.5)
    assert data.state_dict() == {"batches": 0, "event_time": None, "loader": {"next": 0}}
    batches = iter(data)
    waiting = [next(batches) for _ in range(ahead)]
    for step in range(10 - ahead):
        waiting.append(next(batches))
        assert waiting.pop(0) == step
        data.advance()
        assert data.state_dict() == {"batches": step + 1, "event_time": step + 0.5, "loader": {"next": step + 1}}
        assert (data.num_batches, data.num_ahead, data.event_time) == (step + 1, ahead, step + 0.5)
        data.check()


@pytest.mark.parametrize("ahead", range(4))
def test_a_restored_loader_skips_and_repeats_nothing(ahead: int) -> None:
    data = DataPosition(_Loader())
    _, trained = _trained(data, 3, ahead)
    restored: DataPosition[int] = DataPosition(_Loader())
    restored.load_state_dict(data.state_dict())
    assert restored.state_dict() == data.state_dict()
    assert trained + list(restored) == list(range(10))
    assert restored.num_batches == 3


@pytest.mark.advice("InvalidArgumentError: DataPosition._check_current")
def test_iterators_of_the_old_position_are_refused_and_take_nothing() -> None:
    data = DataPosition(_Loader())
    batches, _ = _trained(data, 2, ahead=2)
    fresh = iter(data)  # has returned no batch
    data.load_state_dict(data.state_dict())
    with pytest.raises(InvalidArgumentError, match=r"Call iter\(\) again"):
        next(batches)
    assert data.num_ahead == 0
    assert next(fresh) == 2
    data.advance()
    assert next(iter(data)) == 3
    with pytest.raises(InvalidArgumentError, match=r"Call iter\(\) again"):
        next(fresh)


@pytest.mark.advice("InvalidArgumentError: DataPosition.__iter__")
def test_a_new_iterator_drops_no_batch_silently() -> None:
    data = DataPosition(_Loader())
    batches, _ = _trained(data, 2, ahead=2)
    with pytest.raises(InvalidArgumentError, match=r"batches ahead=2 .*Call tracker.attach_data\(data\) before"):
        next(iter(data))
    data.attached()
    with pytest.raises(InvalidArgumentError, match=r"batches ahead=2 .*To drop them, call load_state_dict"):
        next(iter(data))
    assert next(batches) == 4  # the old iterator is still valid
    data.load_state_dict(data.state_dict())
    assert next(iter(data)) == 2


def test_a_batch_that_is_fetched_while_the_position_is_restored_is_refused() -> None:
    class Slow(_Loader):
        def __iter__(self) -> Iterator[int]:
            for batch in super().__iter__():
                if batch == 1:
                    fetching.set()
                    assert loaded.wait(60)
                yield batch

    fetching, loaded = threading.Event(), threading.Event()
    data = DataPosition(Slow())
    errors = []

    def fetch() -> None:
        try:
            list(data)
        except InvalidArgumentError as error:
            errors.append(error)

    thread = threading.Thread(target=fetch)
    thread.start()
    assert fetching.wait(60)
    data.load_state_dict({"batches": 7, "event_time": None, "loader": {"next": 7}})
    loaded.set()
    thread.join()
    assert len(errors) == 1
    assert (data.num_ahead, data.state_dict()["batches"]) == (0, 7)


def test_epochs() -> None:
    data = DataPosition(_Loader(3))
    for epoch in range(2):
        for batch in data:
            data.advance()
            assert data.num_batches == 3 * epoch + batch + 1
        data.load_state_dict(data.state_dict())  # after the last batch: the rest of the epoch is empty
        assert list(data) == []
        data._loader.state["next"] = 0  # type: ignore[attr-defined]  # the loader begins the next epoch


@pytest.mark.advice("InvalidArgumentError: DataPosition.check")
def test_steps_without_a_batch_are_reported_at_the_cut() -> None:
    data = DataPosition(_Loader())
    batches, _ = _trained(data, 1)
    data.advance()
    assert data.num_batches == 1
    next(batches)
    with pytest.raises(InvalidArgumentError, match="steps without a batch=1"):
        data.check()
    data.load_state_dict(data.state_dict())
    data.check()


def test_too_few_steps_are_reported_at_the_cut() -> None:
    data = DataPosition(_Loader(), max_ahead=2)
    batches, _ = _trained(data, 1, ahead=2)
    data.check()
    next(batches)
    with pytest.raises(InvalidArgumentError, match=r"batches ahead=3 .*each batch of an accumulated gradient"):
        data.check()


@pytest.mark.parametrize(
    "state",
    [
        None,
        {},
        {"batches": 1, "event_time": None},
        {"batches": 1, "event_time": None, "loader": {"next": 1}, "more": 1},
        {"batches": -1, "event_time": None, "loader": {"next": 1}},
        {"batches": True, "event_time": None, "loader": {"next": 1}},
        {"batches": 1, "event_time": float("nan"), "loader": {"next": 1}},
        {"batches": 1, "event_time": "x", "loader": {"next": 1}},
        {"batches": 1, "event_time": None, "loader": {1, 2}},
    ],
    ids=str,
)
def test_a_load_that_fails_changes_nothing(state: Any) -> None:
    data = DataPosition(_RankLoader(), event_time=float)
    batches, _ = _trained(data, 2, ahead=1)
    before = data.state_dict()
    with pytest.raises(InvalidArgumentError):
        data.load_state_dict(state)
    with pytest.raises(InvalidArgumentError):
        data.load_rank_states([before, state] if state is None or "loader" not in state else [])
    assert (data.state_dict(), data.num_ahead) == (before, 1)
    assert next(batches) == 3


def test_a_loader_that_rejects_a_state() -> None:
    class Rejecting(_Loader):
        def load_state_dict(self, state: Any) -> None:
            raise KeyError(state)

    data = DataPosition(Rejecting())
    batches, _ = _trained(data, 2, ahead=1)
    with pytest.raises(KeyError):
        data.load_state_dict({"batches": 0, "event_time": None, "loader": {}})
    assert (data.num_batches, data.num_ahead, next(batches)) == (2, 1, 3)


def test_states_of_other_numbers_of_ranks() -> None:
    data = DataPosition(_RankLoader())
    assert data.has_rank_states
    assert not DataPosition(_Loader()).has_rank_states
    states = [
        {"batches": 4, "event_time": None, "loader": {"next": 4}},
        {"batches": 5, "event_time": 2.0, "loader": {"next": 5}},
        {"batches": 5, "event_time": 1.0, "loader": {"next": 3}},
    ]
    for _ in range(3):  # the loader writes to the state that it has loaded
        batches, _ = _trained(data, 1, ahead=1)
        data.load_rank_states(states)
        assert data.state_dict() == {"batches": 5, "event_time": 1.0, "loader": {"next": 5}}
        with pytest.raises(InvalidArgumentError, match="iterator"):
            next(batches)
        assert next(iter(data)) == 5
        data.load_rank_states(states)
    with pytest.raises(InvalidArgumentError, match="load_rank_states"):
        DataPosition(_Loader()).load_rank_states(states)


def test_arguments() -> None:
    with pytest.raises(InvalidArgumentError, match="StatefulDataLoader"):
        DataPosition([1, 2])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="max_ahead"):
        DataPosition(_Loader(), max_ahead=-1)
    with pytest.raises(InvalidArgumentError, match="max_ahead='8'"):
        DataPosition(_Loader(), max_ahead="8")  # type: ignore[arg-type]
    loader = _Loader()
    loader.state["bad"] = {1}
    with pytest.raises(InvalidArgumentError, match=r"loader\.state_dict\(\)\['bad'\]="):
        DataPosition(loader)


@pytest.mark.parametrize("time", [-1, float("nan"), float("inf"), 2.0**53, "x", None])
def test_invalid_event_times(time: Any) -> None:
    data = DataPosition(_Loader(), event_time=lambda batch: time)
    with pytest.raises(InvalidArgumentError, match="event_time"):
        next(iter(data))


def test_event_times_of_other_number_types() -> None:
    data = DataPosition(_Loader(), event_time=lambda batch: torch.tensor(batch + 0.5))  # type: ignore[arg-type, return-value]
    _trained(data, 1)
    assert (type(data.event_time), data.event_time) == (float, 0.5)


class _Sampler:
    """Sampler of 20 numbers that counts what it has returned, and starts at an offset."""

    def __init__(self) -> None:
        self.first = 0

    def __iter__(self) -> Iterator[int]:
        yield from range(self.first, 20)

    def __len__(self) -> int:
        return 20 - self.first


class _Numbers(Dataset[int]):
    def __getitem__(self, number: int) -> int:
        return number


class _CountingLoader:
    """Torch's loader with workers, which fetch batches long before they are returned, behind a counting sampler."""

    def __init__(self, num_workers: int) -> None:
        self.sampler, self.num_batches = _Sampler(), 0
        self.loader = DataLoader(_Numbers(), batch_size=2, sampler=self.sampler, num_workers=num_workers)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for batch in self.loader:
            self.num_batches += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.num_batches}

    def load_state_dict(self, state: Any) -> None:
        self.num_batches = state["batches"]
        self.sampler.first = 2 * self.num_batches


def test_a_loader_with_workers() -> None:
    data = DataPosition(_CountingLoader(num_workers=2))
    batches = iter(data)
    fetched = [next(batches).tolist() for _ in range(5)]
    for _ in range(3):
        data.advance()
    restored = DataPosition(_CountingLoader(num_workers=2))
    restored.load_state_dict(data.state_dict())
    rest = [batch.tolist() for batch in restored]
    assert fetched[:3] + rest == [[2 * step, 2 * step + 1] for step in range(10)]


@pytest.mark.parametrize(
    ("name", "ahead"),
    [("TrainPipelineBase", 1), ("TrainPipelineSparseDistLite", 1), ("TrainPipelineSparseDist", 2)],
)
def test_torchrecs_pipelines(one_rank: RankPool, name: str, ahead: int) -> None:
    (aheads,) = one_rank.run(f"{_CASES}:pipeline", name=name)
    if aheads is None:
        pytest.skip(f"this torchrec has no {name}")
    rest = [max(0, min(ahead, 11 - step)) for step in range(4, 12)]
    assert aheads == [ahead] * 4 + rest


@pytest.mark.advice("InvalidArgumentError: BatchProgress.attach_data")
def test_a_tracker_moves_its_position() -> None:
    tracker = ModelDeltaTracker(nn.Sequential(nn.Embedding(4, 2)))
    tracker.step()
    data = DataPosition(_Loader())
    batches = iter(data)
    next(batches)
    with pytest.raises(InvalidArgumentError, match=r"batches ahead=1 .*before the first batch"):
        tracker.attach_data(data)
    data.advance()
    tracker.attach_data(data)
    next(batches)
    tracker.attach_data(data)
    with pytest.raises(InvalidArgumentError, match="it already has one"):
        tracker.attach_data(DataPosition(_Loader()))
    tracker.step()
    assert (tracker.num_batches, data.num_batches) == (2, 2)
    tracker.step()  # without a batch: the training step does not fail
    with pytest.raises(InvalidArgumentError, match="steps without a batch"):
        data.check()
    with pytest.raises(InvalidArgumentError, match="already has one"):
        tracker.attach_data(DataPosition(_Loader()))
    with pytest.raises(InvalidArgumentError, match="Pass a DataPosition"):
        tracker.attach_data(_Loader())  # type: ignore[arg-type]
    assert tracker.progress.data_position is data
