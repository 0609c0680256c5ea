"""The planned memory, disk and requests are those of a real trainer, its store and its predictor."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch

from delta_tracker import ModelDeltaTracker, Predictor, Retention
from delta_tracker.errors import InvalidArgumentError
from delta_tracker.planning.forecast import forecast
from delta_tracker.planning.workload import Workload
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.retention import retain
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import TableSpec, TrackingMode
from tests.members import unknown
from tests.planning.streams import SHAPES, Job, counting, new_model
from tests.stream.streams import Writer

_ENUMS = [
    (name, kind)
    for name, hint in get_type_hints(Workload).items()
    for kind in (hint, *get_args(hint))
    if isinstance(kind, type) and issubclass(kind, Enum)
]


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(tmp_path.as_uri(), create=True, fsync=False)


def _peak(act: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_memory_of_a_publish_is_the_planned_one(storage: Storage) -> None:
    job = Job(storage, 0.001)
    job.publish(snapshot=True)
    job.publish()  # imports are slow while memory is traced
    job.share = 0.5
    job.train()
    assert _peak(job.publisher.publish) == pytest.approx(forecast(job.workload()).publisher_bytes, rel=0.15)
    job.publisher.close()


def test_the_memory_of_a_predictor_is_the_planned_one(storage: Storage) -> None:
    job = Job(storage, 0.5)
    job.publish(snapshot=True)
    job.publish()
    served = new_model()
    tables = sum(table.weight.nbytes for table in served.values())  # of torch's allocator, which is not traced
    with Predictor(served, storage) as predictor:
        planned = forecast(job.workload(snapshot_every=2)).predictor_bytes
        assert tables + _peak(predictor.sync) == pytest.approx(planned, rel=0.1)
    job.publisher.close()


@pytest.mark.parametrize("mode", [TrackingMode.ID_ONLY, TrackingMode.EMBEDDING])
def test_the_memory_of_a_tracker_is_at_most_the_planned_one(mode: TrackingMode) -> None:
    """Each consumer is at another position, so that each has a set of rows. No read is uncommitted here."""
    model, names = new_model(), ["b", "c", "d"]
    with ModelDeltaTracker(model, mode=mode) as tracker:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for name in names:
            tracker.add_consumer(name)
        for name in [*names, None]:
            optimizer.zero_grad()
            sum(model[key](torch.arange(num_rows)).sum() for key, (num_rows, _) in SHAPES.items()).backward()
            optimizer.step()
            tracker.step()
            if name is not None:
                tracker.get_delta(name)
        tables = tuple(tracker.tables.values())
        planned = forecast(Workload(tables=tables, changed=1.0, seconds=60.0, mode=mode, consumers=4)).tracker_bytes
        held = tracker.memory().log_bytes
    assert 0.5 * planned < held <= planned


def test_retention_keeps_and_requests_what_is_planned(storage: Storage) -> None:
    """Passes of real retention, every 16 versions, over a stream with a snapshot every 8 versions."""
    writer = Writer(storage, num_rows=1000, dim=16)
    load = Workload(tables=(writer.spec,), changed=0.005, seconds=600.0, snapshot_every=8, retained_versions=10)
    planned = forecast(load)
    versions = 3600 / load.seconds
    log, most_entries, most_bytes = StreamLog(storage), 0, 0
    num_passes, made = 3, Counter[str]()
    for number in range(1 + 16 * num_passes):
        writer.delta(list(range(number, number + 50))) if number % 8 else writer.snapshot()
        if number % 16 == 0 and number:
            most_entries = max(most_entries, len(log.versions()))
            objects = [*storage.objects("log"), *storage.objects("parts")]
            most_bytes = max(most_bytes, sum(each.num_bytes for each in objects))
            before = Counter(storage.requests)
            retain(storage, Retention(versions=10, grace_seconds=0.0))
            made += Counter(storage.requests) - before
    assert planned.entries is not None
    assert 0.8 * planned.entries <= most_entries <= planned.entries + 1, "and the claim"
    assert planned.disk_bytes is not None
    assert 0.7 * planned.disk_bytes <= most_bytes <= planned.disk_bytes
    per_pass = {name: number / num_passes for name, number in made.items()}
    passes = planned.retention.times(16 / versions)
    assert per_pass["list"] == passes.lists - 2, "the publisher lists twice to renew the pointer"
    assert per_pass["write"] == passes.puts
    assert per_pass["size"] == passes.heads
    assert per_pass["read"] == pytest.approx(passes.gets, rel=0.25)
    assert per_pass["delete"] == pytest.approx(passes.deletes, rel=0.25)


def test_without_retention_or_snapshots_nothing_is_bounded(storage: Storage) -> None:
    job = Job(storage, 0.05)
    for options in ({}, {"retained_versions": 10}, {"snapshot_every": 8}):
        found = forecast(job.workload(**options))
        assert found.disk_bytes is None
        assert (found.start_bytes is None) == ("snapshot_every" not in options)
    job.publisher.close()


def test_a_new_predictor_reads_the_planned_bytes(storage: Storage) -> None:
    job = Job(storage, 0.05)
    load = job.workload(snapshot_every=6)
    for number in range(6):
        job.publish(snapshot=number == 0)
    read: list[int] = []
    with Predictor(new_model(), counting(storage, read)) as predictor:
        predictor.sync()
        assert predictor.version == 6
    planned = forecast(load)
    assert sum(read) == pytest.approx(planned.longest_start_bytes, rel=0.05)
    job.publisher.close()


def test_a_row_based_example_is_exact() -> None:
    """The worked example of the docs, computed by hand: 100 M rows x 64, of which 1 % change in a minute."""
    table = TableSpec("t", 100_000_000, 64, torch.float32)
    load = Workload(tables=(table,), changed=0.01, seconds=60.0, ranks=8, predictors=50, snapshot_every=60)
    found = forecast(load)
    assert load.rows_per_version(table) == 1_000_000
    assert found.delta.num_bytes == pytest.approx(1_000_000 * (256 + 8), rel=1e-4)
    assert found.snapshot.num_bytes == pytest.approx(100_000_000 * 256, rel=1e-4)
    assert found.written_bytes == pytest.approx(59 * 264e6 + 25.6e9, rel=1e-4)
    assert found.read_bytes == pytest.approx(59 * 264e6 + 2 * 25.6e9, rel=1e-4), "a large snapshot is read twice"
    assert found.tracker_bytes == 3 * math.ceil(12_500_000 / 8)
    assert found.publisher.puts == pytest.approx(59 * (1 + 8 * 6) + (1 + 8 * (2 + 382)) + 60), "in pieces of 8 MiB"


@pytest.mark.parametrize(("name", "kind"), _ENUMS)
def test_a_forecast_has_an_answer_for_each_member_and_for_no_other_value(name: str, kind: type[Enum]) -> None:
    def plan(value: object) -> int:
        table = TableSpec("t", 1000, 4, torch.float32)
        found = forecast(Workload(tables=(table,), changed=0.1, seconds=60.0, **{name: value}))
        return found.tracker_bytes + found.delta.num_bytes

    assert all(map(plan, kind))
    with pytest.raises(InvalidArgumentError, match=f"{name}='embedding'"):
        plan("embedding")
    with pytest.raises((KeyError, AssertionError), match="UNKNOWN"):
        plan(unknown(kind))
