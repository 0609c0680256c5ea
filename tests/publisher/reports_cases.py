"""Cases for the metrics of publishers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from delta_tracker import ModelDeltaTracker, Publisher, Retention, Upkeep
from delta_tracker.errors import FencedError
from delta_tracker.monitor import Monitor
from tests.models import Spec, Table, batch, shard
from tests.monitor.figures import Figures


def counts(rank: int, world_size: int, url: str) -> dict[str, Any]:
    """Check the metrics of a publisher from its claim to its close."""
    monitor, spec = Monitor(), Spec.every_sharding(world_size)
    figures, model = Figures(monitor), shard(spec)
    by_kind = {"publisher": "publisher", "kind": "delta"}
    with ModelDeltaTracker(model, ["stream", "other"]) as tracker:
        publisher = Publisher(tracker, url, "stream", monitor=monitor)
        is_counting = rank == 0
        for reason in ("StorageError", "FencedError"):
            assert figures.of("publish_failures", publisher="publisher", reason=reason) == 0, "seen before the first"
        assert figures.of("fences", publisher="publisher") == 0
        for step in ("start", "compaction", "retention"):
            assert figures.of("upkeep_failures", publisher="publisher", step=step) == (0 if is_counting else None)
        shown = {"publisher": "publisher", "stream": publisher.stream, "url": url}
        assert figures.of("publisher_info", **shown) == 1
        assert abs(figures.of("publisher_skew_seconds", publisher="publisher") or 0) < 5
        assert figures.of("published_versions", **by_kind) == (0 if is_counting else None)
        assert figures.of("published_version", publisher="publisher") == (0 if is_counting else None)
        manifests = [publisher.publish()]
        for _ in range(2):
            model(batch(spec, torch.Generator().manual_seed(rank))).backward()
            tracker.step()
            manifests.append(publisher.publish())
        assert figures.of("published_versions", **by_kind) == (2 if is_counting else None)
        assert figures.of("published_version", publisher="publisher") == (3 if is_counting else None)
        num_bytes = sum(manifest.num_bytes for manifest in manifests[1:])
        assert figures.of("published_bytes", **by_kind) == (num_bytes if is_counting else None)
        for fqn in tracker.tables:
            num_rows = sum(manifest.rows_by_table.get(fqn, 0) for manifest in manifests)
            assert num_rows > 0
            assert figures.of("published_rows", publisher="publisher", table=fqn) == (num_rows if is_counting else None)
        assert figures.of("read_seconds", publisher="publisher", consumer="stream") == 3
        assert figures.of("encode_seconds", publisher="publisher") == 3
        assert figures.of("commit_seconds", publisher="publisher") == (3 if is_counting else None)
        assert figures.of("write_seconds", publisher="publisher") >= 2
        second = Publisher(tracker, url, "other", monitor=monitor)
        with pytest.raises(FencedError):
            publisher.publish()
        assert figures.of("fences", publisher="publisher") == 1
        assert figures.of("publish_failures", publisher="publisher", reason="FencedError") == 1
        assert figures.of("fences", publisher="publisher-2") == 0
        publisher.close()
        second.close()
    assert figures.of("published_version", publisher="publisher") == (3 if is_counting else None), "shown once more"
    assert figures.of("published_version", publisher="publisher") is None, "nobody publishes it any more"
    assert figures.of("publisher_info", **shown) is None
    assert figures.of("published_versions", **by_kind) == (2 if is_counting else None), "a total of the process"
    return {"counts versions": is_counting}


def failing_upkeep(rank: int, world_size: int, url: str) -> None:
    """Publish until a retention fails, because a directory cannot be listed; the clock is an hour ahead."""
    monitor, model = Monitor(), shard(Spec([Table("t", 6, "row")]))
    figures, by_name = Figures(monitor), {"publisher": "publisher"}
    with ModelDeltaTracker(model) as tracker, mock.patch("time.time", _an_hour_ahead):
        publisher = Publisher(tracker, url, monitor=monitor, upkeep=Upkeep(retention=Retention(versions=1)))
        Path(url.removeprefix("file://"), "predictors").symlink_to("predictors")
        while publisher.upkeep_error is None:
            publisher.snapshot()
        assert figures.of("upkeep_failures", **by_name, step="retention") >= 1
        assert figures.of("upkeep_failures", **by_name, step="compaction") == 0
        assert figures.of("publisher_skew_seconds", **by_name) == pytest.approx(3600, abs=60)
        publisher.close()


_time = time.time


def _an_hour_ahead() -> float:
    return _time() + 3600


def two_publishers(rank: int, world_size: int, folder: str) -> None:
    """Build two publishers with one monitor and a third with another monitor."""
    model, monitor, other = shard(Spec([Table("t", 6, "row")])), Monitor(), Monitor()
    figures = Figures(monitor)
    with ModelDeltaTracker(model, ["a", "b", "c"]) as tracker:
        first, second, third = (
            Publisher(tracker, f"{folder}/{name}", name, monitor=where, name=own)
            for name, where, own in (("a", monitor, None), ("b", monitor, None), ("c", other, "elsewhere"))
        )
        first.publish()
        for _ in range(2):
            second.publish()
        names = ("publisher", "publisher-2", "elsewhere")
        assert [figures.of("published_version", publisher=name) for name in names] == [1, 2, None]
        assert [figures.of("published_versions", publisher=name, kind="delta") for name in names] == [0, 1, None]
        assert Figures(other).of("published_version", publisher="elsewhere") == 0
        second.close()
        again = Publisher(tracker, f"{folder}/b", "b", monitor=monitor)
        again.publish()
        assert figures.of("published_version", publisher="publisher-2") == 4
        assert figures.of("published_versions", publisher="publisher-2", kind="snapshot") == 2, "they go on counting"
        for each in (first, again, third):
            each.close()
