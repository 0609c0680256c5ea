"""Case for a job at a hundredth of the one that the guide plans, on real ranks."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from delta_tracker import ModelDeltaTracker, Predictor, Publisher
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Storage
from tests.models import Spec, Table, shard

NUM_ROWS, DIM, CHANGED = 1_000_000, 64, 5_000


def measured(rank: int, world_size: int, url: str) -> dict[str, Any]:
    """Publish a snapshot and a delta, and return the bytes and seconds of this rank and of a predictor."""
    spec = Spec([Table("user", NUM_ROWS, "row", dim=DIM)], optimizer="SGD")
    model = shard(spec)
    tracker = ModelDeltaTracker(model)
    found: dict[str, Any] = {}
    with Publisher(tracker, url, dense=False) as publisher:
        publisher.snapshot()
        predictor = None
        if rank == 0:
            predictor = Predictor({"ec.embeddings.user": torch.zeros(NUM_ROWS, DIM)}, url)
            predictor.sync()
        for seed in range(2):  # the first version imports modules and allocates buffers
            changed = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(seed))[:CHANGED]
            ids = changed.chunk(world_size)[rank]
            model(KeyedJaggedTensor(["user"], ids, lengths=torch.tensor([len(ids)]))).backward()
            tracker.step()
            found["tracker_bytes"] = tracker.memory().total_bytes
            dist.barrier()
            begin = time.monotonic()
            publisher.publish()
            if predictor is not None:
                assert predictor.sync() == publisher.version
            found["seconds"] = time.monotonic() - begin
        if rank == 0:
            log = StreamLog(Storage(url))
            for entry in (log.read(version) for version in log.versions()):
                if entry is not None and entry.kind != "claim":
                    num_rows = sum(block.num_rows for part in entry.parts for block in part.blocks)
                    found[entry.kind] = len(entry.to_json()) + sum(part.num_bytes for part in entry.parts), num_rows
    return found
