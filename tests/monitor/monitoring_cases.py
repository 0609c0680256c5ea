"""Monitor cases that run on every rank."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torchmetrics
from torch import distributed as dist

from delta_tracker import ModelDeltaTracker, TrackingMode
from delta_tracker.monitor import Monitor
from delta_tracker.monitor.device.torchmetric import TorchMetric
from delta_tracker.sharding.watcher import Watcher
from tests.models import Spec, batch, shard
from tests.syncs import SyncError, find_syncs
from tests.system.collectives import watch_collectives


def merged(rank: int, world_size: int) -> dict[str, Any]:
    """Merge metrics of two ranks with different values and different numbers of values."""
    monitor = Monitor()
    metrics = {
        "max": TorchMetric("max", torchmetrics.MaxMetric(), monitor=monitor),
        "mean": TorchMetric("m", torchmetrics.MeanMetric(), monitor=monitor),
        "cat": TorchMetric("cat", torchmetrics.SpearmanCorrCoef(), monitor=monitor),
    }
    for value in [3.0, 8.0] if rank == 0 else [5.0, 6.0]:
        metrics["max"].update(value)
        metrics["mean"].update(value)
    pairs = [(torch.arange(3.0), torch.tensor([2.0, 0, 1])), (torch.arange(5.0) + 1, torch.tensor([5.0, 4, 0, 7, 7]))]
    metrics["cat"].update(*pairs[rank])
    exact = torchmetrics.SpearmanCorrCoef(sync_on_compute=False)
    for pair in pairs:
        exact.update(*pair)
    return {
        **{f"metric {name}": float(metric.compute()) for name, metric in metrics.items()},
        "exact cat": float(exact.compute()),
    }


class Total(torchmetrics.Metric):
    """A sum of integers."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("total", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, value: torch.Tensor) -> None:
        self.total += value.sum()

    def compute(self) -> torch.Tensor:
        return self.total


_BEYOND_FLOATS = 2**53 + 1


def metrics_during_training(rank: int, world_size: int) -> dict[str, Any]:
    """Collect metrics that would synchronize while the main thread trains with collectives."""
    group = dist.new_group(backend="gloo")
    gathered: list[str] = []

    def gather(state: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        gathered.append(threading.current_thread() is threading.main_thread())
        return [state] * world_size

    options: dict[str, dict[str, Any]] = {
        "default": {},
        "group": {"process_group": group},
        "function": {"dist_sync_fn": gather, "distributed_available_fn": lambda: True},
        "every step": {"dist_sync_on_step": True, "compute_with_cache": False},
    }
    monitor = Monitor()
    metrics = {
        name: TorchMetric(f"m{place}", Total(**each), monitor=monitor)
        for place, (name, each) in enumerate(options.items())
    }
    monitor.start(interval=timedelta(milliseconds=5), system=False)
    try:
        with watch_collectives() as started:
            for _ in range(300):
                for metric in metrics.values():
                    metric.update(torch.tensor(1))
                total = torch.ones(1)
                dist.all_reduce(total)
                assert total == world_size
            for metric in metrics.values():
                metric.update(torch.tensor(_BEYOND_FLOATS - 300))
            assert monitor.flush()
            assert monitor.flush()
            merged = {name: int(metric.compute()) for name, metric in metrics.items()}
    finally:
        monitor.stop()
    assert gathered == [True]
    totals = {each.definition.name: each.figures for each in monitor.collect().totals}
    return {
        "merged": merged,
        "own": {name: totals[metric.name].last for name, metric in metrics.items()},
        "readings": min(totals[metric.name].count for metric in metrics.values()),
        "errors": sum(cell.collect_total() for cell in monitor.metrics.outlet_errors.cells),
        "threads": sorted({each.thread for each in started}),
    }


def merged_before_a_reading(rank: int, world_size: int) -> dict[str, Any]:
    """Merge a metric before the collector has read it."""
    monitor = Monitor()
    metric = TorchMetric("m", torchmetrics.SumMetric(), monitor=monitor)
    metric.update(10.0 * (rank + 1))
    merged = float(metric.compute())
    collections = [monitor.collect() for _ in range(2)]
    own = [{each.labels[0][1]: each.values["value"] for each in one.windows if each.labels} for one in collections]
    return {"merged": merged, "own": own}


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
