"""The log line about an optimizer that changes most rows of a table."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from delta_tracker import ModelDeltaTracker, Publisher, Storage, TableSpec
from delta_tracker.publisher.reports import LargeDeltas
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Block, Manifest, Part


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("optimizer", "is_large"), [(Adam, True), (partial(SGD, weight_decay=0.01), True), (partial(SGD, lr=0.1), False)]
)
def test_a_table_whose_deltas_are_large_is_named_once(optimizer, is_large: bool, caplog) -> None:
    model = nn.ModuleDict({"user": nn.EmbeddingBag(20, 4)})
    training = optimizer(model.parameters())
    with ModelDeltaTracker(model) as tracker, Publisher(tracker, Storage("memory://")) as publisher:
        publisher.snapshot()
        for number in range(30):
            training.zero_grad()
            model["user"](torch.tensor([[number % 20]])).sum().backward()
            training.step()
            tracker.step()
            publisher.publish()
    found = _warnings(caplog)
    assert len(found) == is_large
    assert not is_large or "deltas has more than half of the rows of user. If the batches" in found[0]
    assert not is_large or "Otherwise, the optimizer changes the other rows: Adam" in found[0]


def test_a_row_of_a_column_wise_table_counts_once(caplog) -> None:
    blocks = tuple(Block("user", (0, 100), columns, 30, "list", Encoding.F32) for columns in ((0, 2), (2, 4)))
    delta = Manifest(
        stream="0" * 32,
        generation=1,
        writer="0" * 32,
        version=1,
        kind="delta",
        created=0.0,
        tables={"user": TableSpec("user", 100, 4, torch.float32)},
        parts=(Part("parts/a.safetensors", 1, "0" * 32, blocks, ()),),
    )
    large_deltas = LargeDeltas()
    for _ in range(20):
        large_deltas.count_rows(delta)
    assert not _warnings(caplog)
