"""Publisher and predictor refuse invalid arguments before they change anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from delta_tracker import Gate, ModelTarget, Predictor, Rollout, Storage
from delta_tracker.errors import CorruptPartError, InvalidArgumentError, ModelMismatchError
from tests.stream.streams import FQN, Writer


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    yield Writer(Storage(f"file://{tmp_path}", create=True))  # noqa: PT022  the folder outlives it


@pytest.mark.promise("refused")
@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (ModelTarget, {"names": ["a"]}),
        (ModelTarget, {"raw_ids": ["a"]}),
        (Rollout, {"canary": 5}),
        (Rollout, {"gate": 5}),
    ],
    ids=str,
)
def test_the_arguments_of_a_predictor_check_themselves(kind: type, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{next(iter(arguments))}=.*Pass "):
        kind(*([{}] if kind is ModelTarget else []), **arguments)


@pytest.mark.promise("refused")
def test_calls_of_a_predictor_check_their_arguments(writer: Writer) -> None:
    writer.snapshot()
    predictor = Predictor(writer.model(), writer.storage, rollout=Rollout(gate=Gate()))
    predictor.sync()
    for call in (
        lambda: predictor.sync("1"),
        lambda: predictor.sync(1.5),
        lambda: predictor.rollback("1"),
        lambda: predictor.rollback(None),
        lambda: predictor.accept("2"),
        lambda: predictor.accept(-1),
        lambda: predictor.load_state_dict([1]),
        lambda: predictor.load_state_dict({"stream": "0" * 32, "version": -5, "xxh3": "0" * 32}),
    ):
        with pytest.raises(InvalidArgumentError):
            call()
    assert predictor.sync() == 1


def test_an_error_inside_a_with_block_is_the_one_that_is_raised(writer: Writer, tmp_path: Path) -> None:
    part = writer.snapshot().parts[0]
    (tmp_path / part.name).write_bytes(b"x")
    predictor = Predictor(writer.model(), writer.storage)

    def fail() -> None:
        with predictor:
            predictor.follow(poll_seconds=0.001)
            while not isinstance(predictor.error, CorruptPartError):
                pass
            raise KeyError("the body's own")

    with pytest.raises(KeyError, match="the body's own"):
        fail()


def test_dense_tensors_that_cannot_be_written_are_refused_before_any_row(writer: Writer) -> None:
    writer.dense = {"a": torch.ones(3), "b": torch.ones(3)}
    writer.snapshot()
    shared = torch.zeros(3)
    for other in (torch.zeros(1).expand(3), torch.empty(3, device="meta"), shared):
        model = writer.model() | {"a": shared, "b": other}
        with pytest.raises(ModelMismatchError, match="'b'"):
            Predictor(model, writer.storage).sync()
        assert bool((model[FQN] == -1).all())
        assert not shared.any()


def test_dense_tensors_of_a_module_may_be_0_dimensional_or_empty(writer: Writer) -> None:
    model = nn.Module()
    model.register_buffer("count", torch.zeros((), dtype=torch.int64))
    model.register_buffer("nothing", torch.zeros(0, 3))
    model.register_buffer("none", torch.zeros(0, 3))
    model.table = nn.Embedding(20, 4)
    writer.dense = {"count": torch.tensor(7), "nothing": torch.zeros(0, 3), "none": torch.zeros(0, 3)}
    writer.snapshot()
    Predictor(ModelTarget(model, names={FQN: "table"}), writer.storage).sync()
    assert int(model.count) == 7
