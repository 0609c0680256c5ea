"""Cases for the metrics of trackers."""

from __future__ import annotations

import gc
import threading
from typing import Any
from unittest import mock

import torch

from delta_tracker import ModelDeltaTracker, TopK, TrackingMode
from delta_tracker.monitor import MONITOR, Monitor
from delta_tracker.tracker import stats as stats_module
from tests.models import Spec, Table, batch, shard
from tests.monitor.figures import Figures

_NAME = {"tracker": "tracker"}


def _check_a_copys_consumer(tracker: ModelDeltaTracker, figures: Figures) -> None:
    """Check that the temporary consumer of a snapshot's copy has no gauges."""
    with tracker.reserve("a") as handle, handle.begin_copy() as copy:
        assert copy.name in tracker.consumers
        assert figures.of("consumer_lag_seconds", **_NAME, consumer=copy.name) is None
        assert all(figures.of("pending_rows", **_NAME, table=fqn, consumer=copy.name) is None for fqn in tracker.tables)
    assert copy.name not in tracker.consumers


def figures_of_a_tracker(rank: int, world_size: int) -> dict[str, Any]:
    """Return a tracker's metrics with the expected values; the caller checks the sums over ranks."""
    spec = Spec.every_sharding(world_size)
    model, monitor = shard(spec), Monitor()
    figures = Figures(monitor)
    tracker = ModelDeltaTracker(model, ["a", "b"], mode=TrackingMode.EMBEDDING, monitor=monitor)
    generator = torch.Generator().manual_seed(rank)
    looked_up = dict.fromkeys(spec.features, 0)
    for _ in range(3):
        features = batch(spec, generator)
        model(features).backward()
        with torch.no_grad():
            model(features)
        tracker.step()
        for name, length in zip(features.keys(), features.length_per_key(), strict=True):
            looked_up[name] += length
    pending = {name: tracker.num_pending(name) for name in ("a", "b")}
    for name, counts in pending.items():
        for fqn, count in counts.items():
            labels = {"table": fqn, "consumer": name}
            assert figures.of("pending_rows", **_NAME, **labels) == count
            assert figures.of("pending_ratio", **_NAME, **labels) == count / max(1, tracker.shards[fqn].num_rows)
        assert figures.of("consumer_lag_batches", **_NAME, consumer=name) == 3
        assert (
            0
            < figures.of("oldest_pending_seconds", **_NAME, consumer=name)
            < figures.of("consumer_lag_seconds", **_NAME, consumer=name)
        )
    for kind in ("log", "copy", "carried"):
        assert figures.of("state_bytes", **_NAME, kind=kind) == getattr(tracker.memory(), f"{kind}_bytes")
    assert figures.of("record_seconds", **_NAME) >= 3
    delta = tracker.get_delta("a", commit=False)
    assert figures.of("consumer_lag_batches", **_NAME, consumer="a") == 3, "a read moves nothing"
    tracker.commit(delta)
    for fqn, count in pending["a"].items():
        assert figures.of("touched_rows", **_NAME, table=fqn, consumer="a") == count
        assert figures.of("pending_rows", **_NAME, table=fqn, consumer="a") == 0
        assert figures.of("pending_rows", **_NAME, table=fqn, consumer="b") == count
    assert figures.of("consumer_lag_batches", **_NAME, consumer="a") == 0
    assert figures.of("oldest_pending_seconds", **_NAME, consumer="a") == 0
    _check_a_copys_consumer(tracker, figures)
    tracker.remove_consumer("b")
    assert figures.of("consumer_lag_seconds", **_NAME, consumer="b") is None
    assert all(figures.of("pending_rows", **_NAME, table=fqn, consumer="b") is None for fqn in tracker.tables)

    fqns = list(tracker.tables)
    tables = {name: f"ec.embeddings.{name}" for name in ("row", "first", "last", "shared")}
    counted = {name: figures.of("lookups", **_NAME, table=fqn) or 0 for name, fqn in tables.items()}
    for hook in tracker._hooks.registered:
        hook._ids_by_table = mock.Mock(side_effect=RuntimeError("boom"))
    model(batch(spec, generator)).backward()
    faults = sum(bool(figures.of("hook_errors", **_NAME, table=fqn)) for fqn in tracker.tables)
    tracker.detach()
    assert figures.of("consumer_lag_seconds", **_NAME, consumer="a") is not None
    del tracker, hook
    gc.collect()
    assert figures.of("consumer_lag_seconds", **_NAME, consumer="a") is None, "nobody is behind any more"
    assert figures.of("state_bytes", **_NAME, kind="log") is None
    assert all(figures.of("pending_rows", **_NAME, table=fqn, consumer="a") is None for fqn in fqns)
    ModelDeltaTracker(model, monitor=monitor).detach()
    assert len(monitor.registry.sources) == 1
    return {"looked up": looked_up, "counted": counted, "faults": faults}


def figures_during_a_read(rank: int, world_size: int) -> dict[str, float]:
    """Collect while a read chooses its rows: the collection does not wait, and no fault is counted."""
    model, monitor = shard(Spec([Table("t", 6, "row")])), Monitor()
    tracker = ModelDeltaTracker(model, monitor=monitor)
    tracker.mark_changed("ec.embeddings.t")
    figures = Figures(monitor)

    def collect(fqn: str, rows: Any) -> torch.Tensor:
        thread = threading.Thread(target=monitor.collect)
        thread.start()
        thread.join()
        return torch.ones(len(rows))

    with mock.patch.object(stats_module, "_PATIENCE_SECONDS", 0.01):
        tracker.get_delta(top_k=TopK(rows=2, score=collect))
    answer = {"left out": figures.of("pending_rows", **_NAME, table="ec.embeddings.t", consumer="default")}
    answer["errors"] = sum(cell.collect_total() for cell in monitor.metrics.outlet_errors.cells)
    tracker.detach()
    return answer


def compared_lookups(rank: int, world_size: int) -> list[bool]:
    """Return whether a compared table has a lookup counter; its lookups are not counted."""
    model, monitor = shard(Spec([Table("compared", 6, "row", kernel="dense")], bag=True)), Monitor()
    figures = Figures(monitor)
    first = ModelDeltaTracker(model, monitor=monitor)
    (fqn,) = first.tables
    second = ModelDeltaTracker(model, record="lookups", monitor=monitor)
    found = [figures.of("lookups", tracker=each, table=fqn) is not None for each in ("tracker", "tracker-2")]
    first.detach()
    second.detach()
    return found


def two_trackers(rank: int, world_size: int) -> None:
    """Build two trackers with one monitor, and a third that records to the default monitor."""
    model, monitor = shard(Spec([Table("t", 6, "row")])), Monitor()
    fqn, figures = "ec.embeddings.t", Figures(monitor)
    first = ModelDeltaTracker(model, monitor=monitor)
    second = ModelDeltaTracker(model, monitor=monitor)
    third = ModelDeltaTracker(model, name="of-the-program")
    first.mark_changed(fqn)
    second.mark_changed(fqn, torch.tensor([1, 2]))
    for name, pending in (("tracker", 6), ("tracker-2", 2)):
        assert figures.of("pending_rows", tracker=name, table=fqn, consumer="default") == pending
    assert figures.of("state_bytes", tracker="of-the-program", kind="log") is None
    assert Figures(MONITOR).of("pending_rows", tracker="of-the-program", table=fqn, consumer="default") == 0
    second.get_delta()
    assert figures.of("touched_rows", tracker="tracker-2", table=fqn, consumer="default") == 2
    assert figures.of("touched_rows", tracker="tracker", table=fqn, consumer="default") is None
    second.step()
    assert figures.of("consumer_lag_batches", tracker="tracker-2", consumer="default") == 1
    assert figures.of("consumer_lag_batches", tracker="tracker", consumer="default") == 0
    for hook in first._hooks.registered:
        hook._contained(mock.Mock(side_effect=RuntimeError("boom")), otherwise=None)
    assert figures.of("hook_errors", tracker="tracker", table=fqn) > 0
    assert figures.of("hook_errors", tracker="tracker-2", table=fqn) == 0
    for each in (first, second, third):
        each.detach()
    del first, second, third, each, hook
    gc.collect()
    assert figures.of("pending_rows", tracker="tracker-2", table=fqn, consumer="default") is None
