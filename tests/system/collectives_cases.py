"""Cases that start collectives from several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional

from delta_tracker import ModelDeltaTracker, Predictor, Publisher, TopK, TrackingMode, Upkeep
from delta_tracker.monitor import Monitor
from delta_tracker.monitor.device.metrics import DeviceMean
from delta_tracker.monitor.sinks.jsonl import JsonlSink
from delta_tracker.publisher.cadence import Cadence
from delta_tracker.stream.maintenance.retention import Retention
from tests.models import Spec, batch, shard
from tests.publisher.publishing_cases import empty_model
from tests.system.collectives import CollectiveThreadError, watch_collectives


def _in_thread(name: str, action: Callable[[], Any]) -> BaseException | None:
    """Run ``action`` in a thread; return its exception."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except CollectiveThreadError as error:
            raised.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    return raised[0] if raised else None


def _refused(workers: Sequence[str], body: Callable[[], Any]) -> str:
    """Return the error of the watch for a body, empty if there is none."""
    try:
        with watch_collectives(workers):
            body()
    except CollectiveThreadError as error:
        return str(error)
    return ""


def watched(rank: int, world_size: int) -> dict[str, Any]:
    """Return the errors of the watch for collectives of every kind and thread."""
    one, own = torch.ones(1), dist.new_group(backend="gloo")
    matrix = torch.ones(world_size)
    every: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(one.clone()),
        "all_gather": lambda: dist.all_gather([one.clone() for _ in range(world_size)], one),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(matrix.clone(), one),
        "all_gather_object": lambda: dist.all_gather_object([None] * world_size, 3),
        "broadcast": lambda: dist.broadcast(one.clone(), 0),
        "broadcast_object_list": lambda: dist.broadcast_object_list([1], 0),
        "barrier": dist.barrier,
        "monitored_barrier": lambda: dist.monitored_barrier(own),
        "gather": lambda: dist.gather(one, [one.clone() for _ in range(world_size)] if rank == 0 else None),
        "scatter": lambda: dist.scatter(one.clone(), [one] * world_size if rank == 0 else None),
        "reduce": lambda: dist.reduce(one.clone(), 0),
        "reduce_scatter": lambda: dist.reduce_scatter(one.clone(), [one] * world_size),
        "all_to_all": lambda: dist.all_to_all_single(matrix.clone(), matrix),
        "send or recv": lambda: (dist.send if rank == 0 else dist.recv)(one.clone(), 1 - rank),
        "new_group": lambda: dist.new_group(backend="gloo"),
        "functional": lambda: functional.all_reduce(one, "sum", dist.group.WORLD),
    }
    with watch_collectives() as started:
        for action in every.values():
            before = len(started)
            action()
            assert len(started) > before
    all_reduce = every["all_reduce"]
    own_reduce = lambda: dist.all_reduce(one.clone(), group=own)  # noqa: E731
    return {
        "missed": [name for name, action in every.items() if not _refused((), lambda a=action: _in_thread("x", a))],
        "worker on its own group": _refused(("worker",), lambda: (all_reduce(), _in_thread("worker_0", own_reduce))),
        "worker on the default group": _refused(("worker",), lambda: _in_thread("worker_0", all_reduce)),
        "worker on a shared group": _refused(("worker",), lambda: (own_reduce(), _in_thread("worker_0", own_reduce))),
    }


def whole_library(rank: int, world_size: int, root: str) -> dict[str, list[str]]:
    """Train, publish, follow, collect and save concurrently; return which threads start collectives on which group."""
    spec = Spec.every_sharding(world_size)
    model = shard(spec)
    generator = torch.Generator().manual_seed(rank)
    monitor = Monitor()
    metric = DeviceMean("metric", monitor=monitor)
    url = f"file://{root}/stream"
    with (
        watch_collectives(["publisher-exchange"]) as started,
        ModelDeltaTracker(model, mode=TrackingMode.EMBEDDING) as tracker,
    ):
        monitor.start([JsonlSink(f"{root}/rank-{rank}.jsonl")], interval=timedelta(milliseconds=10))
        publisher = Publisher(
            tracker,
            url,
            top_k=TopK(rows=9),
            cadence=Cadence(batches=2, snapshot_every=4),
            upkeep=Upkeep(retention=Retention(versions=4, grace_seconds=0.0), compact_every=3),
        )
        predictor = Predictor(empty_model(tracker), url, name=f"rank-{rank}")
        publisher.publish()
        predictor.follow(poll_seconds=0.005)
        for number in range(24):
            model(batch(spec, generator)).backward()
            metric.update(float(number))
            tracker.step()
            publisher.step()
            if number == 12:
                dcp.save({"model": model.state_dict(), "tracker": tracker}, checkpoint_id=f"{root}/checkpoint")
                tracker.state_dict(strategy="gather")
        publisher.flush()
        publisher.snapshot()
        predictor.stop()
        publisher.close()
        assert monitor.stop()
        dist.barrier()
    assert predictor.version
    threads: dict[str, set[str]] = {}
    for each in started:
        threads.setdefault("default" if each.is_default else each.group, set()).add(each.thread)
    return {group: sorted(names) for group, names in threads.items()}
