"""Metrics of predictors on real streams."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from delta_tracker import Gate, ModelTarget, Predictor, RawIdIndex, Rollout, Storage
from delta_tracker.errors import CorruptPartError, HeldVersionError, InvalidArgumentError, StorageError
from delta_tracker.monitor import MONITOR, Monitor
from delta_tracker.raw_ids import NO_OWNER
from delta_tracker.stream.maintenance.compaction import compact
from tests.monitor.figures import Figures
from tests.predictor.identity_histories import DIM, History
from tests.predictor.identity_histories import FQN as RAW_FQN
from tests.stores.rules import fails, reads
from tests.stores.wrapped import WrappedStorage
from tests.stream.streams import FQN, Writer


def test_a_predictor_counts_applied_and_skipped_versions(tmp_path: Path) -> None:
    writer, monitor = Writer(Storage(f"file://{tmp_path}", create=True)), Monitor()
    writer.snapshot()
    predictor = Predictor(writer.model(), writer.storage, monitor=monitor)
    predictor.sync()
    damaged = writer.delta([1, 2])
    (tmp_path / damaged.parts[0].name).write_bytes(b"x")
    with pytest.raises(CorruptPartError):
        predictor.sync()
    newest = writer.snapshot()
    predictor.sync()
    figures = Figures(monitor)
    assert figures.of("applied_versions", predictor="predictor", kind="snapshot") == 2
    assert figures.of("applied_rows", predictor="predictor", table=FQN) == 40
    assert figures.of("applied_version", predictor="predictor") == newest.version
    assert figures.of("apply_seconds", predictor="predictor") == 2
    assert figures.of("resyncs", predictor="predictor", reason="CorruptPartError") == 1
    assert figures.of("refused_parts", predictor="predictor", reason="corrupt") == 1


def test_a_predictor_exports_the_version_that_its_gate_holds_and_that_of_a_rollback() -> None:
    writer, monitor = Writer(Storage("memory://")), Monitor()
    first = writer.snapshot()
    predictor = Predictor(writer.model(), writer.storage, rollout=Rollout(gate=Gate()), monitor=monitor)
    predictor.sync()

    def shown() -> list[float | None]:
        return [Figures(monitor).of(name, predictor="predictor") for name in ("held_version", "pinned_version")]

    writer.table.fill_(float("nan"))
    held = writer.snapshot()
    with pytest.raises(HeldVersionError):
        predictor.sync()
    assert shown() == [held.version, None]
    predictor.rollback(first.version)
    assert shown() == [None, first.version]
    predictor.release()
    predictor.accept(held.version)
    predictor.sync()
    assert shown() == [None, None]


def test_a_predictor_counts_admitted_and_evicted_raw_ids() -> None:
    history, monitor = History(3), Monitor()
    table, index = torch.zeros(history.num_rows, DIM), RawIdIndex(history.num_rows)
    predictor = Predictor(ModelTarget({RAW_FQN: table}, raw_ids={RAW_FQN: index}), history.storage, monitor=monitor)
    for _ in range(6):
        history.delta()
        predictor.sync()
    status, figures = predictor.status(), Figures(monitor)
    assert status.counts.admitted > status.counts.evicted > 0
    assert figures.of("admitted_ids", predictor="predictor", table=RAW_FQN) == status.counts.admitted
    assert figures.of("evicted_ids", predictor="predictor", table=RAW_FQN) == status.counts.evicted
    assert status.counts.admitted - status.counts.evicted == int((index.owners() != NO_OWNER).sum())


def test_a_predictor_counts_what_its_host_cache_had(tmp_path: Path) -> None:
    monitor, writer = Monitor(), Writer(Storage("memory://"))
    writer.snapshot()
    figures = Figures(monitor)
    for name, expected in {"first": (0, 2, 0), "second": (2, 0, 0)}.items():
        predictor = Predictor(writer.model(), writer.storage, cache=tmp_path, name=name, monitor=monitor)
        predictor.sync()
        if name == "first":
            writer.delta([1])
        predictor.sync()
        found = [figures.of(f"cache_{what}", predictor=name) for what in ("hits", "misses", "bypasses")]
        assert tuple(found) == expected == tuple(predictor.status().counts.cache.values())


def test_a_predictor_counts_its_requests_and_shows_its_interval(tmp_path: Path) -> None:
    monitor, writer, store = Monitor(), Writer(Storage(tmp_path)), Storage(tmp_path)
    writer.snapshot()
    predictor, figures = Predictor(writer.model(), store, monitor=monitor), Figures(monitor)
    assert figures.of("poll_seconds", predictor="predictor") is None
    predictor.sync()
    first = figures.of("store_requests", predictor="predictor", operation="read")
    assert first == store.requests["read"] > 0
    assert figures.of("store_requests", predictor="predictor", operation="write") is None
    writer.delta([1])
    predictor.sync()
    assert figures.of("store_requests", predictor="predictor", operation="read") == store.requests["read"] > first
    predictor.follow(0.25)
    assert figures.of("poll_seconds", predictor="predictor") == 0.25
    predictor.stop()
    assert figures.of("poll_seconds", predictor="predictor") is None


def test_a_predictor_counts_merged_versions_and_changes_of_the_source() -> None:
    monitor, writer = Monitor(), Writer(Storage("memory://"))
    writer.snapshot()
    first = WrappedStorage(writer.storage)
    predictor = Predictor(writer.model(), [first, writer.storage], monitor=monitor)
    predictor.sync()
    figures = Figures(monitor)
    assert [figures.of(name, predictor="predictor") for name in ("merged_catch_ups", "failovers")] == [0, 0]
    for number in range(30):
        writer.delta([number % 20])
    assert compact(writer.storage, fold=1e9) is not None  # to a merged delta
    predictor.sync()
    assert figures.of("merged_catch_ups", predictor="predictor") == 1
    writer.delta([1])
    first.rules.append(fails())
    with pytest.raises(StorageError):
        predictor.sync()
    predictor.sync()
    assert figures.of("failovers", predictor="predictor") == 1
    assert figures.of("applied_version", predictor="predictor") == writer.claim.head.version


def test_two_predictors_have_separate_metrics() -> None:
    monitor, writers = Monitor(), [Writer(Storage("memory://")) for _ in range(2)]
    figures = Figures(monitor)
    for writer in writers:
        writer.snapshot()
    predictors = [Predictor(writer.model(), writer.storage, monitor=monitor) for writer in writers]
    named = Predictor(writers[0].model(), writers[0].storage, name="host-7", monitor=monitor)
    for _ in range(3):
        writers[1].delta([1])
    for each in (*predictors, named):
        each.sync()
    writers[1].delta([1])
    names = ("predictor", "predictor-2", "host-7")
    assert [figures.of("applied_version", predictor=name) for name in names] == [1, 4, 1]
    assert figures.of("applied_versions", predictor="predictor", kind="delta") is None
    assert figures.of("applied_versions", predictor="predictor-2", kind="delta") == 3
    assert [figures.of("predictor_lag_versions", predictor=name) for name in names] == [0, 1, 0]
    del predictors[0], each
    gc.collect()
    assert figures.of("applied_version", predictor="predictor") is None, "nobody serves it any more"
    assert figures.of("predictor_lag_versions", predictor="predictor") is None
    assert figures.of("applied_version", predictor="predictor-2") == 4
    assert figures.of("applied_versions", predictor="predictor", kind="snapshot") == 1, "a total of the process"


def test_the_lag_of_a_predictor_is_read_while_it_lives() -> None:
    writer, monitor = Writer(WrappedStorage(Storage("memory://"))), Monitor()
    figures = Figures(monitor)
    writer.snapshot()
    predictor = Predictor(writer.model(), writer.storage, monitor=monitor)
    predictor.sync()
    assert figures.of("predictor_lag_versions", predictor="predictor") == 0
    for _ in range(3):
        writer.delta([1])
    assert figures.of("predictor_lag_versions", predictor="predictor") == 3
    assert figures.of("predictor_lag_seconds", predictor="predictor") > 0
    predictor.sync()
    assert figures.of("predictor_lag_versions", predictor="predictor") == 0
    writer.storage.rules.append(fails(reads))
    assert figures.of("predictor_lag_versions", predictor="predictor") is None, "a store that does not answer is no lag"


def test_fault_counters_start_at_zero() -> None:
    monitor = Monitor()
    predictor = Predictor({FQN: torch.zeros(3, 2)}, Storage("memory://"), monitor=monitor)
    figures = Figures(monitor)
    assert figures.of("resyncs", predictor="predictor", reason="CorruptPartError") == 0
    assert figures.of("refused_parts", predictor="predictor", reason="corrupt") == 0
    assert figures.of("follow_errors", predictor="predictor", reason="StorageError") == 0
    assert predictor.version is None


def test_without_a_monitor_it_records_to_the_default_monitor() -> None:
    predictor = Predictor({FQN: torch.zeros(3, 2)}, Storage("memory://"), name="of-the-program")
    assert Figures(MONITOR).of("refused_parts", predictor="of-the-program", reason="corrupt") == 0
    with pytest.raises(InvalidArgumentError, match="monitor"):
        Predictor({FQN: torch.zeros(3, 2)}, Storage("memory://"), monitor="prometheus")
    assert predictor.version is None
