"""Cases for a publisher on all ranks, with a predictor that must equal the trainer bit for bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed as dist

from delta_tracker import ModelDeltaTracker, Predictor, Publisher
from delta_tracker.errors import DeltaTrackerError, StorageError
from delta_tracker.stream.storage import Storage
from tests.models import Spec, Table, batch, shard


def empty_model(tracker: ModelDeltaTracker) -> dict[str, torch.Tensor]:
    return {
        fqn: torch.full((table.num_rows, table.dim), -1.0, dtype=table.dtype) for fqn, table in tracker.tables.items()
    }


def assert_equal(tracker: ModelDeltaTracker, model: dict[str, torch.Tensor]) -> None:
    """This rank's shards are what the predictor holds, bit for bit."""
    for fqn, shard_spec in tracker.shards.items():
        rows = slice(shard_spec.row_offset, shard_spec.row_offset + shard_spec.num_rows)
        for (first, end), view in zip(shard_spec.columns, tracker.column_views(fqn), strict=True):
            held = model[fqn][rows, first:end].contiguous()
            assert torch.equal(held.view(torch.uint8), view.contiguous().view(torch.uint8)), fqn


def attempt(action: Any) -> str:
    try:
        action()
    except DeltaTrackerError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def equal(rank: int, world_size: int, url: str, spec: dict[str, Any], num_versions: int = 6) -> dict[str, Any]:
    """After every version the predictor of each rank equals the trainer, with updates and evals in between."""
    model_spec = Spec.every_sharding(world_size, **spec)
    model = shard(model_spec)
    kinds = []
    with ModelDeltaTracker(model, ["stream", "other"]) as tracker:
        publisher = Publisher(tracker, url, "stream")
        held = empty_model(tracker)
        predictor = Predictor(held, url)
        generator = torch.Generator().manual_seed(rank)
        for number in range(num_versions):
            for _ in range(number % 3):
                model(batch(model_spec, generator)).backward()
                tracker.step()
            loss = model(batch(model_spec, generator))
            if number % 2:
                tracker.get_delta("other")
            manifest = publisher.snapshot() if number == 3 else publisher.publish()
            assert predictor.sync() == manifest.version == publisher.version
            assert_equal(tracker, held)
            loss.backward()
            tracker.step()
            kinds.append(manifest.kind)
        last = publisher.publish()
        predictor.sync()
        assert_equal(tracker, held)
        dist.barrier()
        publisher.close()
        assert tracker.num_hook_errors == 0
        return {
            "kinds": kinds,
            "version": last.version,
            "batches": last.batches,
            "rows": last.num_rows,
            "attempt": attempt(publisher.publish),
        }


class _Failing(Storage):
    """A store that a test can break on one rank."""

    fails: Sequence[str] = ()

    def put(self, name: str, buffers: Sequence[memoryview]) -> None:
        if "put" in self.fails:
            raise StorageError(self.url, "No space left on device")
        super().put(name, buffers)

    def create(self, name: str, data: bytes) -> bool:
        if "create" in self.fails:
            raise StorageError(self.url, "No space left on device")
        return super().create(name, data)


def failing_rank(rank: int, world_size: int, url: str, broken_rank: int, operation: str) -> list[str]:
    """A rank fails before the commit: nothing is visible, nothing is lost, the next publish carries it."""
    spec = Spec.every_sharding(world_size)
    model = shard(spec)
    with ModelDeltaTracker(model) as tracker:
        storage = _Failing(url, create=True)
        publisher = Publisher(tracker, storage)
        held = empty_model(tracker)
        predictor = Predictor(held, url)
        generator = torch.Generator().manual_seed(rank)
        publisher.publish()
        messages = []
        for _ in range(2):
            model(batch(spec, generator)).backward()
            tracker.step()
            if rank == broken_rank:
                storage.fails = [operation]
            before = predictor.sync()
            messages.append(attempt(publisher.publish))
            storage.fails = ()
            assert predictor.sync() == before == publisher.version
        manifest = publisher.publish()
        assert manifest.version == before + 1
        predictor.sync()
        assert_equal(tracker, held)
        dist.barrier()
        publisher.close()
        return messages


def fenced(rank: int, world_size: int, url: str) -> list[str]:
    """A second publisher takes the stream over; the first publishes nothing from then on, on no rank."""
    spec = Spec.every_sharding(world_size)
    model = shard(spec)
    with ModelDeltaTracker(model, ["first", "second"]) as tracker:
        first = Publisher(tracker, url, "first")
        held = empty_model(tracker)
        predictor = Predictor(held, url)
        generator = torch.Generator().manual_seed(rank)
        first.publish()
        predictor.sync()
        second = Publisher(tracker, url, "second")
        assert (first.generation, second.generation) == (1, 2)
        assert first.stream == second.stream
        model(batch(spec, generator)).backward()
        version = predictor.sync()
        messages = [attempt(first.publish), attempt(first.snapshot)]
        assert predictor.sync() == version
        first.close()
        assert tracker.get_delta("first", commit=False).num_rows, "the fenced publisher's rows stay pending"
        assert second.publish().kind == "snapshot"
        predictor.sync()
        assert_equal(tracker, held)
        dist.barrier()
        second.close()
        return messages


def out_of_step(rank: int, world_size: int, url: str) -> list[str]:
    """Ranks that stand at different batches publish nothing."""
    spec = Spec([Table("t", 6, "row")])
    model = shard(spec)
    with ModelDeltaTracker(model) as tracker:
        publisher = Publisher(tracker, url)
        if rank == 1:
            tracker.step()
        messages = [attempt(publisher.publish)]
        if rank == 0:
            tracker.step()
        publisher.publish()
        publisher.close()
        return messages


def unwritable(rank: int, world_size: int, url: str) -> list[str]:
    """A url that one rank or all ranks cannot use; and a consumer that does not exist."""
    spec = Spec([Table("t", 6, "row")])
    model = shard(spec)
    with ModelDeltaTracker(model) as tracker:
        return [
            attempt(lambda: Publisher(tracker, f"{url}/file/below")),
            attempt(lambda: Publisher(tracker, f"{url}/file/below" if rank == 1 else f"{url}/fine")),
            attempt(lambda: Publisher(tracker, url, "nobody")),
        ]


def killed_before_commit(rank: int, world_size: int, url: str) -> None:
    """Rank 0 is killed with every part written and the manifest not; it never returns."""
    spec = Spec.every_sharding(world_size)
    model = shard(spec)
    tracker = ModelDeltaTracker(model)
    publisher = Publisher(tracker, url)
    publisher.publish()
    model(batch(spec, torch.Generator().manual_seed(rank))).backward()
    if rank == 0:
        publisher._claim.commit = lambda entry: os.kill(os.getpid(), signal.SIGKILL)
    publisher.publish()
