"""The case of the checkpoint benchmark; it runs on every rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torchrec import KeyedJaggedTensor

from delta_tracker import ModelDeltaTracker, TrackingMode
from delta_tracker.integrations.dcp import SavedTracker
from tests.models import Spec, Table, shard

_CONSUMERS = ["a", "b"]


def measure(
    rank: int, world_size: int, path: str, rows: int, dim: int, share: float, mode: str, repeats: int
) -> dict[str, float]:
    """Train, save with and without the tracker, and restore on a rank."""
    model = shard(Spec([Table("t", rows, "row", dim=dim)]))
    tracker = ModelDeltaTracker(model, _CONSUMERS, mode=TrackingMode(mode))
    first, stop = rank * rows // world_size, (rank + 1) * rows // world_size
    ids = torch.randperm(stop - first)[: round(share * (stop - first))] + first
    model(KeyedJaggedTensor(["t"], ids, lengths=torch.tensor([len(ids)]))).backward()
    before = tracker.get_delta_ids("a")["ec.embeddings.t"]
    tracker.get_delta("b")
    model(KeyedJaggedTensor(["t"], ids, lengths=torch.tensor([len(ids)]))).backward()

    def timed(action: Callable[[], object]) -> float:
        dist.barrier()
        begin = time.perf_counter()
        action()
        return time.perf_counter() - begin

    def timed_save(name: str, state: dict[str, Any]) -> float:
        seconds = timed(lambda: dcp.save(state, checkpoint_id=f"{path}/{name}"))
        dist.barrier()
        return seconds

    alone, both = [], []
    for number in range(repeats):
        alone.append(timed_save(f"model{number}", {"model": model}))
        both.append(timed_save(f"both{number}", {"model": model, "tracker": tracker}))
    restored = ModelDeltaTracker(model, _CONSUMERS, mode=TrackingMode(mode))
    source = f"{path}/both0"
    load_seconds = timed(lambda: dcp.load({"tracker": SavedTracker(restored, source)}, checkpoint_id=source))
    for name in _CONSUMERS:
        assert torch.equal(restored.get_delta_ids(name)["ec.embeddings.t"], before), (
            "exactly the rows that were pending"
        )
    return {
        "rows": len(_CONSUMERS) * len(before),
        "state_seconds": timed(tracker.state_dict),
        "with_seconds": statistics.median(both),
        "model_seconds": statistics.median(alone),
        "load_seconds": load_seconds,
    }
