"""Cases for 2D parallelism: trackers and publishers of a DMPCollection on all ranks."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn

from delta_tracker import ModelDeltaTracker, TrackingMode
from tests.models import Spec, batch
from tests.sharding.replicated import replicate

_INTEGERS = {2: torch.int16, 4: torch.int32}


def bits_of(tracker: ModelDeltaTracker) -> dict[str, Tensor]:
    """Return a copy of this rank's rows ``[R, D]`` by FQN, as integers."""
    return {fqn: rows.view(_INTEGERS[rows.element_size()]) for fqn, rows in tracker.read_tables().items()}


def changed(before: Tensor, now: Tensor) -> list[int]:
    """Return the ids of the rows whose bits differ."""
    return (before != now).any(dim=1).nonzero().flatten().tolist() if now.numel() else []


def _train(model: nn.Module, spec: Spec, generator: torch.Generator, tracker: ModelDeltaTracker) -> None:
    model(batch(spec, generator, size=2)).backward()
    tracker.step()


def _shrink(model: nn.Module, tracker: ModelDeltaTracker) -> None:
    """Scale the rows so that many values are close to the smallest ones of float16."""
    for fqn in tracker.tables:
        for view in tracker.column_views(fqn):
            view.data.mul_(1e-3)
            tracker.mark_changed(fqn)


def reported(
    rank: int, world_size: int, num_replicas: int, mode: str, seeds: list[int], dtype: str = "FP32", bag: bool = False
) -> list[dict[str, int]]:
    """After random steps and syncs, each read has the rows whose bits changed, with their old values."""
    return [_reported(rank, world_size, num_replicas, mode, seed, dtype=dtype, bag=bag) for seed in seeds]


def _reported(
    rank: int, world_size: int, num_replicas: int, mode: str, seed: int, *, dtype: str, bag: bool
) -> dict[str, int]:
    spec = Spec.every_sharding(world_size // num_replicas, dtype=dtype, bag=bag)
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    counts = dict.fromkeys(["trained", "synced", "unstable"], 0)
    model = replicate(spec, num_replicas)
    # Other gradients on each rank, because the average of rows that change equally has the same bits.
    nn.init.normal_(model.module.dense.weight, generator=torch.Generator().manual_seed(rank))
    with ModelDeltaTracker(model, mode=TrackingMode(mode)) as tracker:
        if dtype == "FP16":
            _shrink(model, tracker)
        copies, old = bits_of(tracker), tracker.read_tables()
        tracker.clear()
        expected: dict[str, set[int]] = {fqn: set() for fqn in copies}
        for event in ["sync", *draw.choices(["train", "train", "eval", "sync", "read"], k=12), "sync", "sync", "read"]:
            if event == "train":
                _train(model, spec, generator, tracker)
            elif event == "eval":
                with torch.no_grad():
                    model(batch(spec, generator))
            elif event == "sync":
                model.sync()
                counts["unstable"] += sum(map(len, tracker._hooks[-1]._unstable.values()))
            now = bits_of(tracker)
            for fqn, before in copies.items():
                ids = changed(before, now[fqn])
                counts["trained" if event == "train" else "synced"] += len(ids)
                expected[fqn] |= set(ids)
            copies = now
            if event == "read":
                for fqn, rows in tracker.get_delta().items():
                    assert rows.ids.tolist() == sorted(expected[fqn]), (seed, fqn)
                    if mode == "embedding" and len(rows):
                        assert rows.known.all()
                        assert torch.equal(rows.states, old[fqn][rows.ids]), (seed, fqn)
                expected, old = {fqn: set() for fqn in copies}, tracker.read_tables()
        assert tracker.num_hook_errors == 0
    return counts
