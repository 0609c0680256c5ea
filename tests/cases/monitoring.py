"""Monitor cases that run on every rank."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torchmetrics
from torch import distributed as dist

from delta_tracker.monitor import Monitor
from delta_tracker.monitor.across_ranks import merge_ranks
from delta_tracker.monitor.device import DeviceCounter, DeviceHistogram, DeviceMean
from delta_tracker.monitor.torchmetric import TorchMetric


def merged(rank: int, world_size: int) -> dict[str, Any]:
    """Device stats and metrics of two ranks with different values and different numbers of them."""
    monitor = Monitor()
    mean = DeviceMean("mean", monitor=monitor)
    histogram = DeviceHistogram("histogram", monitor=monitor)
    rows = DeviceCounter("rows", monitor=monitor)
    if rank == 0:
        mean.update(torch.tensor([1.0, 2.0]), weight=torch.tensor([1.0, 3.0]))
        histogram.update(torch.tensor([10.0] * 3))
        rows.update(torch.tensor(2))
    else:
        mean.update(5.0)
        histogram.update(torch.tensor([30.0] * 100))
        rows.update(4)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as collective:
        figures = merge_ranks([mean, histogram, rows])
    mean.update(torch.tensor(7.0))
    again = merge_ranks([mean])
    monitor.collect()

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
        "mean": figures["mean"].value("mean"),
        "again": again["mean"].value("mean"),
        "p99": figures["histogram"].value("p99"),
        "rows": figures["rows"].value("sum"),
        "collectives": collective.call_count,
        **{f"metric {name}": float(metric.merge_ranks()) for name, metric in metrics.items()},
        "exact cat": float(exact.compute()),
    }
