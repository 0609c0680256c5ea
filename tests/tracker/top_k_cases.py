"""Cases for top-k selection on several ranks."""

from __future__ import annotations

import time

import torch

from delta_tracker import ModelDeltaTracker, TopK, TrackingMode
from delta_tracker.errors import DeltaTrackerError
from tests.models import Spec, Table, batch, shard


def failing_rank(rank: int, world_size: int, how: str) -> list[str]:
    """Fail to read on one rank; it must report this to the others, which would wait otherwise."""
    spec = Spec([Table("t", 40, "row", dim=64)])
    model = shard(spec)
    generator = torch.Generator().manual_seed(rank)
    messages = []
    limit = 4_000 if rank == 1 and how == "behind" else None
    with ModelDeltaTracker(model, mode=TrackingMode.EMBEDDING, max_bytes=limit) as tracker:
        tracker.get_delta(top_k=TopK(rows=3))
        for _ in range(30):
            model(batch(spec, generator, size=8)).backward()
            tracker.step()
        if rank == 1 and how == "detached":
            tracker.detach()
        begin = time.monotonic()
        try:
            tracker.get_delta(top_k=TopK(rows=3))
        except DeltaTrackerError as error:
            messages.append(f"{type(error).__name__}: {error}")
        assert time.monotonic() - begin < 60
    return messages
