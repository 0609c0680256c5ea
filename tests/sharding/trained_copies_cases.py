"""Cases for copies of sharded models that are trained instead of the tracked model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from delta_tracker import ModelDeltaTracker
from delta_tracker.errors import UntrackedTrainingWarning
from tests.models import Model, Spec, Table, batch, shard
from tests.sharding.copies_cases import COPIES, groups_are_shared


@contextmanager
def _warned(tables: set[str]) -> Iterator[None]:
    """Add the tables of the warnings of the block to ``tables``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UntrackedTrainingWarning)
        yield
    for each in caught:
        if isinstance(each.message, UntrackedTrainingWarning):
            tables.update(each.message.tables)


def trained(rank: int, world_size: int) -> list[str]:
    """Train a copy of a tracked model, evaluate another one, and return the tables of the warning."""
    spec = Spec([Table("row", 17, "row"), Table("column", 9, f"column:0,{world_size - 1}")], bag=True)
    model = shard(spec)
    tracker = ModelDeltaTracker(model)
    draw = torch.Generator().manual_seed(rank)
    with groups_are_shared():
        copied = COPIES["deepcopy"](model)
    with torch.no_grad():
        copied(batch(spec, draw))
    tables = set[str]()
    with _warned(tables):
        tracker.get_delta()
    assert not tables
    copied(batch(spec, draw)).backward()
    tracker.step()
    with _warned(tables):
        assert tracker.get_delta().num_rows == 0
    assert tracker.num_hook_errors == 0
    return sorted(tables)


def trained_unsharded(rank: int, world_size: int) -> list[str]:
    """Train the model from which a sharded one was built, and return the tables of the warning."""
    spec = Spec([Table("row", 17, "row")], bag=True)
    tracker, copied = ModelDeltaTracker(shard(spec)), Model(spec, "cpu")
    optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
    draw, tables = torch.Generator().manual_seed(rank), set[str]()
    with _warned(tables):
        for _ in range(101):
            assert not tables
            copied(batch(spec, draw)).backward()
            optimizer.step()
            tracker.step()
    return sorted(tables)
