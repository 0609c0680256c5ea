"""Function that merges device stats across ranks with one collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor.aggregate import Aggregate
from delta_tracker.monitor.device.metrics import DeviceCounter, DeviceHistogram, DeviceMean

Mergeable = DeviceMean | DeviceCounter | DeviceHistogram


def merge_ranks(stats: Sequence[Mergeable], group: dist.ProcessGroup | None = None) -> dict[str, Aggregate]:
    """Return the aggregate of each stat over all ranks, for the values recorded since the stat was last merged.

    Runs one all-reduce. Every rank must call this function with the same stats in the same order. Waits for the device
    and for the other ranks. If the function raises, the next call merges the values again.

    Args:
        stats: the stats to merge.
        group: process group, by default all ranks. Unless its backend is NCCL, the sums are reduced on the host.

    Returns:
        Mapping from the name of a stat to its merged aggregate. The mapping is equal on every rank.

    Raises:
        InvalidArgumentError: if ``stats`` is empty or has duplicate names.
    """
    names = [stat.name for stat in stats]
    if not stats or len(set(names)) < len(names):
        raise InvalidArgumentError("stats", names, "Pass each stat once")
    device = torch.device("cpu")
    if dist.get_backend(group) == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    now = [stat.sums(device) for stat in stats]
    vector = torch.cat([stat.unmerged(each) for stat, each in zip(stats, now, strict=True)])
    dist.all_reduce(vector, group=group)
    parts: Sequence[Tensor] = torch.split(vector.cpu(), [stat.num_sums for stat in stats])
    merged = {stat.name: stat.figures(part.tolist()) for stat, part in zip(stats, parts, strict=True)}
    for stat, each in zip(stats, now, strict=True):
        stat.set_merged(each)
    return merged
