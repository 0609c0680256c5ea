"""Cases for predictors on the sharded tables of a trainer."""

from __future__ import annotations

import torch

from delta_tracker import ModelDeltaTracker, Predictor, Publisher
from tests.models import Spec, Table, batch, shard
from tests.predictor.serving_cases import clear, whole_tables
from tests.publisher.publishing_cases import attempt


def kernels(rank: int, world_size: int, url: str, *, bag: bool, kernel: str) -> list[str]:
    """Let predictors write to a model before, while and after it is tracked. Return the errors of the latter two."""
    tables = [Table("row", 17, "row"), Table("column", 9, f"column:0,{world_size - 1}")]
    tables += [Table("data", 12, "data")] if bag else []
    spec = Spec(tables, bag=bag, kernel=kernel)
    published, model = shard(spec), shard(spec)
    tracker = ModelDeltaTracker(published)
    draw = torch.Generator().manual_seed(rank)
    with Publisher(tracker, url) as publisher:
        publisher.snapshot()
        early = Predictor(model, url)
        clear(model)
        early.sync()
        expected = whole_tables(published)
        assert all(torch.equal(rows, expected[fqn]) for fqn, rows in whole_tables(model).items())
        other = ModelDeltaTracker(model)
        published(batch(spec, draw)).backward()
        tracker.step()
        publisher.publish()
        before = other.read_tables()
        found = [attempt(early.sync), attempt(Predictor(model, url).sync)]
        assert all(torch.equal(rows, before[fqn]) for fqn, rows in other.read_tables().items())
        assert other.get_delta().num_rows == 0
        other.detach()
        early.sync()
        expected = whole_tables(published)
        assert all(torch.equal(rows, expected[fqn]) for fqn, rows in whole_tables(model).items())
    return [message.removeprefix("InvalidArgumentError: ") for message in found]
