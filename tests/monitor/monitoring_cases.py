"""Monitor cases that run on every rank."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from delta_tracker import ModelDeltaTracker, TrackingMode
from delta_tracker.sharding.watcher import Watcher
from tests.models import Spec, batch, shard
from tests.syncs import SyncError, find_syncs


def recording_syncs_unpadded(rank: int, world_size: int) -> list[str]:
    """Run the same with stores that read the number of new rows."""
    return recording_syncs(rank, world_size, "embedding", "updates", bag=False, pads=False)["syncs"]


def recording_syncs(rank: int, world_size: int, mode: str, record: str, bag: bool, pads: bool = True) -> dict[str, Any]:
    """Return where recording would wait for a device, on a real sharded model whose tensors count as device tensors."""
    spec = Spec.every_sharding(world_size, bag=bag)
    model = shard(spec)
    found: list[SyncError] = []
    num_calls = 0
    contained = Watcher._contained

    def watched(self: Watcher, action: Any, *, otherwise: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        with find_syncs(everywhere=True) as here:
            result = contained(self, action, otherwise=otherwise)
        found.extend(here)
        return result

    generator = torch.Generator().manual_seed(rank)
    with ModelDeltaTracker(model, mode=TrackingMode(mode), record=record, engine="torch") as tracker:
        for store in tracker._log.segments.stores.values():
            store.pads = pads  # as on a device, where the host does not have the number of new rows
        with mock.patch.object(Watcher, "_contained", watched):
            for _ in range(4):
                model(batch(spec, generator)).backward()
                with find_syncs(everywhere=True) as here:
                    tracker.step()
                found.extend(here)
        rows = sum(len(each) for each in tracker.get_delta().values())
        return {
            "syncs": [str(each) for each in found],
            "calls": num_calls,
            "errors": tracker.num_hook_errors,
            "rows": rows,
        }
