"""A trainer of two plain tables that publishes, and the workload that describes it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from delta_tracker import ModelDeltaTracker, Publisher
from delta_tracker.planning.workload import Workload
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Storage
from tests.stores.rules import calls, on
from tests.stores.wrapped import Operation, WrappedStorage

SHAPES = {"user": (20_000, 32), "item": (6_000, 16)}


def new_model() -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Embedding(*shape, sparse=True) for name, shape in SHAPES.items()})


def counting(storage: Storage, read: list[int]) -> WrappedStorage:
    """Return a store that appends the number of bytes of each read to ``read``."""

    def count(_: Operation, data: NDArray[np.uint8] | None) -> None:
        read.append(0 if data is None else len(data))

    return WrappedStorage(storage, calls(on("read", "read_range"), after=count))


class Job:
    """A trainer that changes ``share`` of the rows of each table for each version, drawn at random."""

    def __init__(self, storage: Storage, share: float, model: nn.ModuleDict | None = None, **options) -> None:
        torch.manual_seed(0)
        self.trained = new_model() if model is None else model
        self.share, self.storage = share, storage
        self.tracker = ModelDeltaTracker(self.trained)
        self._optimizer = torch.optim.SGD(self.trained.parameters(), lr=0.1)
        self.publisher = Publisher(self.tracker, storage, **options)

    def workload(self, **options) -> Workload:
        """Return the workload with a version every minute."""
        tables = tuple(self.tracker.tables.values())
        return Workload(**({"tables": tables, "changed": self.share, "seconds": 60.0} | options))

    def train(self) -> None:
        self._optimizer.zero_grad()
        losses = [
            self.trained[name](torch.randperm(num_rows)[: round(self.share * num_rows)]).sum()
            for name, (num_rows, _) in SHAPES.items()
        ]
        sum(losses).backward()
        self._optimizer.step()
        self.tracker.step()

    def publish(self, *, snapshot: bool = False) -> Manifest:
        self.train()
        manifest = self.publisher.snapshot() if snapshot else self.publisher.publish()
        found = StreamLog(self.storage).read(manifest.version)
        assert found is not None
        return found
