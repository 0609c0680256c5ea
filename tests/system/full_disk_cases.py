"""A case of publishing to a disk that is full or has room for only part of a version."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import distributed as dist

from delta_tracker import ModelDeltaTracker, Predictor, Publisher, Upkeep
from tests.models import Spec, batch, shard
from tests.publisher.publishing_cases import assert_equal, attempt, empty_model

_PAGE_BYTES = 4096


def fill(file: Path, *, but_pages: int) -> None:
    """Fill the disk except for some pages."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        while True:
            os.write(descriptor, bytes(_PAGE_BYTES))
    except OSError:
        os.ftruncate(descriptor, os.fstat(descriptor).st_size - but_pages * _PAGE_BYTES)
    finally:
        os.close(descriptor)


def full(rank: int, world_size: int, directory: str) -> list[str]:
    """Publish with room for 0, 1, 2, ... pages until it succeeds; return the error of each attempt."""
    filler, url = Path(directory, "filler"), f"file://{directory}/stream"
    spec = Spec.every_sharding(world_size)
    model = shard(spec)
    generator = torch.Generator().manual_seed(rank)
    said = []
    with ModelDeltaTracker(model) as tracker:
        publisher = Publisher(tracker, url, upkeep=Upkeep(pointer_seconds=None))
        held = empty_model(tracker)
        predictor = Predictor(held, url, name=f"rank-{rank}")
        publisher.snapshot()
        predictor.sync()
        while not said or said[-1] != "nothing was raised":
            before = predictor.version, {fqn: table.clone() for fqn, table in held.items()}
            model(batch(spec, generator)).backward()
            tracker.step()
            dist.barrier()
            if rank == 0:
                fill(filler, but_pages=len(said))
            dist.barrier()
            said.append(attempt(publisher.publish))
            dist.barrier()
            drafts = list(Path(directory, "stream", "drafts").iterdir())
            assert not drafts
            predictor.sync()
            if said[-1] != "nothing was raised":
                assert predictor.version == before[0] == publisher.version
                assert all(torch.equal(held[fqn], table) for fqn, table in before[1].items())
            dist.barrier()
            if rank == 0:
                filler.unlink()
            dist.barrier()
        for _ in range(2):
            assert_equal(tracker, held)
            model(batch(spec, generator)).backward()
            tracker.step()
            assert publisher.publish().version == predictor.sync()
            dist.barrier()
        assert_equal(tracker, held)
        publisher.close()
    return said
