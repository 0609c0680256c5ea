"""Cases of two jobs that share only a directory: trainers on some ranks, sharded predictors on others."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from torch import distributed as dist

from delta_tracker import ModelDeltaTracker, Predictor, Publisher
from delta_tracker.publisher.cadence import Cadence
from tests.models import Spec, Table, batch, shard
from tests.predictor.serving_cases import clear, whole_tables
from tests.tracker.conformance_cases import hosts

_PATIENCE_SECONDS = 120


def _spec(shardings: list[str], local_size: int) -> Spec:
    tables = [Table(f"t{number}", 9 + number, sharding, dim=256) for number, sharding in enumerate(shardings)]
    return Spec(tables, bag=True, local_size=local_size)


def trainer(rank: int, world_size: int, directory: str, shardings: list[str], num_batches: int) -> int:
    """Train and publish; write the tables of the last version to files."""
    spec = _spec(shardings, local_size=2)
    with hosts(rank, 2):
        model = shard(spec)
    generator = torch.Generator().manual_seed(rank)
    with ModelDeltaTracker(model) as tracker:
        publisher = Publisher(tracker, f"file://{directory}/stream", cadence=Cadence(batches=2, snapshot_every=4))
        for number in range(num_batches):
            model(batch(spec, generator)).backward()
            tracker.step()
            publisher.step()
            if number % 6 == 5:
                publisher.flush()  # otherwise a loaded machine publishes fewer versions
        version = publisher.publish().version
        tables = whole_tables(model)
        publisher.close()
    if rank == 0:
        torch.save(tables, f"{directory}/tables.pt")
        Path(directory, "draft").write_text(json.dumps(version))
        Path(directory, "draft").rename(f"{directory}/end.json")
    return version


def predictor(rank: int, world_size: int, directory: str, shardings: list[str]) -> int:
    """Follow in the background until the trainers end, and compare the tables."""
    model = shard(_spec(shardings, local_size=world_size))
    clear(model)
    end, file = None, Path(directory, "end.json")
    deadline = time.monotonic() + _PATIENCE_SECONDS
    with Predictor(model, f"file://{directory}/stream") as served:
        served.follow()
        while end is None or served.version != end:
            assert time.monotonic() < deadline, (served.version, end, served.error)
            time.sleep(0.005)
            end = json.loads(file.read_text()) if end is None and file.exists() else end
    dist.barrier()
    expected, found = torch.load(f"{directory}/tables.pt", weights_only=True), whole_tables(model)
    assert expected.keys() == found.keys()
    for fqn, table in expected.items():
        assert not table.isnan().any()
        assert torch.equal(found[fqn], table), fqn
    return end
