"""A predictor that is many versions behind reads merged versions and newer snapshots instead of every version."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from delta_tracker import Gate, ModelTarget, Predictor, Rollout, Storage
from delta_tracker.errors import HeldVersionError, StreamError
from delta_tracker.monitor import Monitor
from delta_tracker.stream.format.manifest import Merged, entry_name
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.reading.position import Position
from tests.monitor.figures import Figures
from tests.predictor.serving import Breakable
from tests.stores.rules import fails, on
from tests.stores.wrapped import WrappedStorage
from tests.stream.streams import FQN, Writer, a_second_later


def _writer(num_deltas: int, *, every: int | None = None) -> Writer:
    """Return a stream with one snapshot, and deltas that are merged ``every`` so many versions."""
    writer = Writer(Storage("memory://"), num_rows=200)
    writer.snapshot()
    for number in range(1, num_deltas + 1):
        writer.delta([number % 7, 7 + number % 50])
        if every is not None and number % every == 0:
            compact(writer.storage, fold=1e9)
    return writer


def _behind(writer: Writer, **options: object) -> tuple[Predictor, WrappedStorage, dict]:
    """Return a predictor whose saved tables hold the first snapshot, its store and its model."""
    storage, model = WrappedStorage(writer.storage), writer.model()
    predictor = Predictor(model, storage, **options)
    predictor.load_state_dict(_first_position(writer))
    model[FQN][:] = 0.0  # as in the first snapshot
    storage.take()
    return predictor, storage, model


def _first_position(writer: Writer) -> dict[str, str | int]:
    snapshot = StreamLog(writer.storage).read(1)
    assert snapshot is not None
    return Position.after(snapshot).to_dict()


def _entries(storage: WrappedStorage) -> list[str]:
    """Return the parts that were read."""
    return sorted({each.name for each in storage.operations if each.name.startswith("parts/")})


@pytest.mark.parametrize("is_new", [False, True])
def test_a_reader_that_is_far_behind_reads_few_versions(is_new: bool) -> None:
    writer = _writer(410, every=50)
    predictor, storage, model = _behind(writer)
    if is_new:
        model = writer.model()
        predictor = Predictor(model, storage)
    assert predictor.sync() == 411
    assert torch.equal(model[FQN], writer.table)
    assert len(_entries(storage)) <= is_new + 2 + 10, "410 without the merged versions"
    assert storage.count("read", "read_range") <= 60
    assert storage.count("objects", "names", name="merged") <= 7, "listed once per 64 versions"


def test_without_merged_versions_each_version_is_read_once() -> None:
    writer = _writer(30)
    predictor, storage, model = _behind(writer)
    predictor.sync()
    assert torch.equal(model[FQN], writer.table)
    assert len(_entries(storage)) == 30
    assert storage.count("objects", "names", name="merged") <= 1
    assert storage.count("size", "stat") <= 20


def test_a_reader_that_keeps_up_never_looks_for_merged_versions() -> None:
    writer = _writer(0)
    predictor, storage, model = _behind(writer)
    predictor.sync()
    storage.take()
    for number in range(40):
        writer.delta([number % 50])
        if number % 10 == 9:
            compact(writer.storage, fold=1e9)
        predictor.sync()
    assert not storage.count("objects", "names", name="merged")
    assert torch.equal(model[FQN], writer.table)


def test_a_reader_that_falls_behind_while_it_reads_catches_up() -> None:
    writer = _writer(0)
    predictor, storage, model = _behind(writer)
    predictor.sync()
    for number in range(100):
        writer.delta([number % 50])
    compact(writer.storage, fold=1e9)
    storage.take()
    predictor.sync()
    assert torch.equal(model[FQN], writer.table)
    assert len(_entries(storage)) <= 9, "eight versions, then the merged one"


def test_a_merged_version_counts_as_one() -> None:
    writer, monitor = _writer(100, every=50), Monitor()
    predictor, _, _ = _behind(writer, monitor=monitor)
    assert predictor.sync(limit=1) == 101
    assert Figures(monitor).of("merged_catch_ups", predictor="predictor") == 1
    assert predictor.status().resyncs == 0


def test_a_newer_snapshot_is_taken_instead_of_the_versions_before_it() -> None:
    writer = _writer(20)
    snapshot = writer.snapshot()
    writer.delta([3])
    predictor, storage, model = _behind(writer)
    predictor.sync()
    assert torch.equal(model[FQN], writer.table)
    assert _entries(storage) == sorted({each.name for each in snapshot.parts} | _parts_of(writer, snapshot.version + 1))


@pytest.mark.parametrize("num_rows", [1, 150])
def test_a_merged_snapshot_is_taken_if_it_is_smaller_than_the_versions(num_rows: int) -> None:
    writer = Writer(Storage("memory://"), num_rows=200)
    writer.snapshot()
    for _ in range(12):
        writer.delta(list(range(num_rows)))
    merged = compact(writer.storage, fold=1e-9)
    assert merged is not None
    assert merged.kind == "snapshot"
    predictor, storage, model = _behind(writer)
    predictor.sync()
    assert torch.equal(model[FQN], writer.table)
    is_taken = merged.parts[0].name in _entries(storage)
    assert is_taken == (num_rows == 150)
    assert len(_entries(storage)) == (1 if is_taken else 12)


def _parts_of(writer: Writer, version: int) -> set[str]:
    manifest = StreamLog(writer.storage).read(version)
    assert manifest is not None
    return {part.name for part in manifest.parts}


@pytest.mark.parametrize("damage", ["part", "entry", "missing part", "unreadable"])
def test_a_damaged_merged_version_costs_nothing_but_time(damage: str) -> None:
    writer = _writer(40, every=40)
    (merged,) = StreamLog(writer.storage).merged()
    manifest = StreamLog(writer.storage).read_merged(merged)
    assert manifest is not None
    if damage == "part":
        writer.storage.replace(manifest.parts[0].name, b"x" * manifest.parts[0].num_bytes)
    elif damage == "entry":
        writer.storage.replace(merged.name, b"{")
    elif damage == "missing part":
        writer.storage.delete(manifest.parts[0].name)
    predictor, storage, model = _behind(writer)
    if damage == "unreadable":
        storage.rules.append(fails(on(name=merged.name)))
    assert predictor.sync() == 41
    assert torch.equal(model[FQN], writer.table)
    assert predictor.status().resyncs == 0
    assert predictor.error is None
    assert storage.count(name=merged.name) <= 2


def test_a_gate_names_the_version_that_it_holds() -> None:
    writer = _writer(20)
    writer.table[3] = float("nan")
    bad = writer.write("delta", [writer.rows([3])])
    for number in range(20):
        writer.delta([number + 10])
    compact(writer.storage, fold=1e9)
    predictor, _, model = _behind(writer, rollout=Rollout(gate=Gate(max_drift=None)))
    with pytest.raises(HeldVersionError) as held:
        predictor.sync()
    assert held.value.version == bad.version
    assert predictor.version == bad.version - 1
    assert bool(model[FQN].isfinite().all())


def test_a_gate_with_a_drift_sees_every_version() -> None:
    """The rows of one version that drifted may be few among those of a merged version."""
    writer = _writer(60, every=60)
    predictor, storage, _ = _behind(writer, rollout=Rollout(gate=Gate(max_drift=100.0)))
    predictor.sync()
    assert len(_entries(storage)) == 60


def test_an_interrupted_merged_version_is_completed() -> None:
    writer = _writer(40, every=40)
    _, storage, model = _behind(writer)
    target = Breakable.of(model[FQN])
    predictor = Predictor(ModelTarget({FQN: target}, chunk_rows=2), storage)
    predictor.load_state_dict(_first_position(writer))

    def fail(number: int) -> None:
        if number == 3:
            raise MemoryError

    target.before_write = fail
    with pytest.raises(MemoryError):
        predictor.sync()
    with predictor.reading() as served:
        assert served == (1, 41), "rows of the merged version are there"
    assert predictor.sync() == 41
    with predictor.reading() as served:
        assert served == (41, None)
    assert torch.equal(model[FQN], writer.table)


def test_a_merged_version_that_ends_with_a_claim_leads_on() -> None:
    writer = _writer(12)
    again = Writer(writer.storage, num_rows=200)
    again.table[:] = writer.table
    compact(writer.storage, fold=1e9)
    predictor, _, model = _behind(writer)
    predictor.sync(limit=1)
    for number in range(3):
        again.delta([number])
    assert predictor.sync() == again.claim.head.version
    assert torch.equal(model[FQN], again.table)


def test_a_replaced_stream_is_not_continued_with_its_merged_versions() -> None:
    writer = _writer(40, every=40)
    predictor, _, model = _behind(writer)
    for prefix in ("log", "merged", "parts"):
        for name in writer.storage.names(prefix):
            writer.storage.delete(name)
    with a_second_later():
        other = Writer(writer.storage, num_rows=200)
        other.snapshot()
        for number in range(30):
            other.delta([number])
    compact(other.storage, fold=1e9)
    assert predictor.sync() == other.claim.head.version
    assert predictor.status().resyncs == 1
    assert torch.equal(model[FQN], other.table)


def test_names_of_entries_are_those_of_the_format() -> None:
    assert (entry_name(7), Merged(9, 2, "delta").name) == (
        "log/00000000000000000007.json",
        "merged/00000000000000000009-00000000000000000002-delta.json",
    )


def test_a_merged_delta_of_a_restored_stream_is_not_applied_to_rows_of_the_lost_one(tmp_path: Path) -> None:
    stream, backup = tmp_path / "stream", tmp_path / "backup"
    lost = Writer(Storage(stream, create=True), num_rows=200)
    lost.snapshot()
    shutil.copytree(stream, backup)
    model = lost.model()
    predictor = Predictor(model, stream)
    for _ in range(3):
        lost.delta([100])
        predictor.sync()

    shutil.rmtree(stream)
    shutil.copytree(backup, stream)
    writer = Writer(Storage(stream), num_rows=200)
    for number in range(20):
        writer.delta([number])
    compact(writer.storage, fold=1e9)
    (stream / entry_name(predictor.version + 1)).write_bytes(b"damaged")
    with suppress(StreamError):
        predictor.sync()
    assert predictor.version == 4 or torch.equal(model[FQN], writer.table)
    writer.snapshot()
    predictor.sync()
    assert torch.equal(model[FQN], writer.table)
