"""A kind of store that the library does not know serves a whole stream, not only the calls of its interface."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from delta_tracker import ModelDeltaTracker, Predictor, Publisher, Storage
from tests.stores.sqlite_store import SqliteStore


def test_a_predictor_follows_a_publisher_through_it(tmp_path: Path) -> None:
    storage = Storage(SqliteStore(tmp_path / "database"))
    trained, served = (nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True)) for _ in range(2))
    tracker = ModelDeltaTracker(trained)
    predictor = Predictor(served, storage)
    with Publisher(tracker, storage) as publisher:
        publisher.publish()
        predictor.follow()
        trained(torch.tensor([[1, 2]])).sum().backward()
        torch.optim.SGD(trained.parameters(), lr=1.0).step()
        version = publisher.publish().version
    predictor.wait(version, timeout=60.0)
    predictor.stop()
    assert trained[0].weight.equal(served[0].weight)
