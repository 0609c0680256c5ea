"""A small trainer with its publisher, and the way in which these tests meet an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

from delta_tracker import ModelDeltaTracker, ModelTarget, Predictor, Publisher
from delta_tracker.errors import DeltaTrackerError

_Error = TypeVar("_Error", bound=DeltaTrackerError)


def refused(kind: type[_Error], call: Callable[[], object], *words: str) -> _Error:
    """Return the error of this kind that a call raises, whose advice has some words."""
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    for each in words:
        assert each in caught.value.remedy
    return caught.value


def small_model(num_tables: int = 1, **options: Any) -> nn.Sequential:
    return nn.Sequential(*(nn.EmbeddingBag(20, 4, sparse=True, **options) for _ in range(num_tables)))


class Job:
    """A trainer that publishes.

    Args:
        root: directory of its stream.
        model: model to train; None for one with a table.
        options: arguments of the publisher.
    """

    def __init__(self, root: Path, model: nn.Sequential | None = None, **options: Any) -> None:
        self.url = f"file://{root}/stream"
        self.model = small_model() if model is None else model
        self.tracker = ModelDeltaTracker(self.model)
        self.options = options
        self.publisher = Publisher(self.tracker, self.url, **options)
        self.publisher.snapshot()

    def train(self, *rows: int) -> None:
        """Change some rows of all tables."""
        for table in self.model:
            if isinstance(table, nn.EmbeddingBag):
                table(torch.tensor([list(rows) or [1, 2, 3]])).sum().backward()
        torch.optim.SGD(self.model.parameters(), lr=0.1).step()
        self.model.zero_grad()
        self.tracker.step()

    def publish(self, *rows: int) -> int:
        """Train, and publish a version."""
        self.train(*rows)
        return self.publisher.publish().version

    def serve(self, model: nn.Module | ModelTarget | None = None, **options: Any) -> Predictor:
        return Predictor(small_model() if model is None else model, self.url, **options)

    def is_served_by(self, model: nn.Module, version: int | None) -> bool:
        """Return whether a predictor that reports the newest version has the trainer's tables."""
        own, served = self.model.state_dict(), model.state_dict()
        return version == self.publisher.version and all(torch.equal(own[name], served[name]) for name in own)
