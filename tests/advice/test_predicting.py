"""Advice to those who serve a model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from delta_tracker import ModelDeltaTracker, ModelTarget, Predictor, Publisher, RawIdIndex, Storage
from delta_tracker.errors import (
    CorruptPartError,
    MalformedError,
    MissingTableError,
    MissingVersionError,
    ModelMismatchError,
    NoSnapshotError,
    PartialRowsError,
    StreamReplacedError,
    WaitTimeoutError,
)
from delta_tracker.sinks.lmdb import LmdbSink
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.codec import encode_rows
from delta_tracker.stream.format.manifest import entry_name
from delta_tracker.types import TableSpec
from tests.advice.jobs import Job, refused, small_model
from tests.predictor.memory_sink import MemorySink, Stored
from tests.stream.streams import FQN, Writer


def _on_meta() -> nn.Module:
    return small_model(device="meta")


def _in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return small_model()


def _expanded() -> nn.Module:
    model = small_model()
    model[0].weight = nn.Parameter(torch.zeros(1, 4).expand(20, 4))
    return model


@pytest.mark.advice("ModelMismatchError: check_targets")
@pytest.mark.parametrize(
    ("build", "words", "repair"),
    [
        (_on_meta, "to_empty(device=...)", lambda model: model.to_empty(device="cpu")),
        (_in_inference_mode, "outside torch.inference_mode()", lambda _: small_model()),
        (_expanded, "do not expand", lambda _: small_model()),
    ],
    ids=["meta", "inference", "expanded"],
)
def test_a_model_that_cannot_be_written_is_made_writable(
    tmp_path: Path, build: Callable[[], nn.Module], words: str, repair: Callable[[nn.Module], nn.Module]
) -> None:
    job = Job(tmp_path)
    model = build()
    predictor = job.serve(model)
    refused(ModelMismatchError, predictor.sync, words)
    repaired = repair(model)
    if repaired is not model:
        predictor = job.serve(repaired)
    assert job.is_served_by(repaired, predictor.sync())


@pytest.mark.advice("ModelMismatchError: ServedModel._dense")
@pytest.mark.parametrize("state", ["missing", "shape", "meta", "tied"])
def test_a_dense_tensor_that_differs_is_mapped_or_left_out(tmp_path: Path, state: str) -> None:
    job = Job(
        tmp_path,
        nn.Sequential(nn.EmbeddingBag(20, 4, sparse=True), nn.Linear(4, 2), nn.Linear(4, 2)),
        dense=["1.weight", "2.weight"],
    )
    served = {
        "missing": lambda: nn.Sequential(nn.EmbeddingBag(20, 4), nn.Identity(), nn.Linear(4, 2), nn.Linear(4, 2)),
        "shape": lambda: nn.Sequential(nn.EmbeddingBag(20, 4), nn.Linear(4, 3), nn.Linear(4, 2)),
        "meta": lambda: nn.Sequential(nn.EmbeddingBag(20, 4), nn.Linear(4, 2, device="meta"), nn.Linear(4, 2)),
        "tied": lambda: nn.Sequential(nn.EmbeddingBag(20, 4), nn.Linear(4, 2), nn.Linear(4, 2)),
    }[state]()
    if state == "tied":
        served[2].weight = served[1].weight
    refused(ModelMismatchError, job.serve(served).sync, "to_empty(device=...)" if state == "meta" else "dense=False")
    if state == "missing":
        assert job.serve(ModelTarget(served, names={"1.weight": "3.weight"})).sync() == 1
        assert torch.equal(served[3].weight, job.model[1].weight)
    elif state == "meta":
        served[1].to_empty(device="cpu")
        assert job.serve(served).sync() == 1
        assert torch.equal(served[1].weight, job.model[1].weight)
    else:
        assert job.serve(ModelTarget(served, dense=False)).sync() == 1
        assert torch.equal(served[0].weight, job.model[0].weight)


@pytest.mark.advice("ModelMismatchError: check_targets")
def test_a_table_of_another_name_is_mapped(tmp_path: Path) -> None:
    job = Job(tmp_path)
    model = nn.Sequential(nn.Identity(), nn.EmbeddingBag(20, 4))
    refused(ModelMismatchError, job.serve(model).sync, "names={stream: model}")
    assert job.serve(ModelTarget(model, names={"0": "1"})).sync() == 1
    assert torch.equal(model[1].weight, job.model[0].weight)


@pytest.mark.advice("MissingTableError: TableChoice.narrowed")
def test_a_name_that_the_stream_lacks_is_replaced_by_one_that_it_has(tmp_path: Path) -> None:
    job, model = Job(tmp_path), small_model()
    refused(MissingTableError, job.serve(model, tables=["1"]).sync, "names of the stream, which has ['0'")
    assert job.is_served_by(model, job.serve(model, tables=["0"]).sync())


@pytest.mark.advice("MissingTableError: SinkWriter.resolve")
def test_a_row_store_gets_tables_instead_of_dense_tensors(tmp_path: Path) -> None:
    model, url = nn.ModuleDict({"top": nn.Linear(2, 1), "item": nn.Embedding(3, 2)}), tmp_path.as_uri()
    with Publisher(ModelDeltaTracker(model), url, dense=model) as publisher:
        version = publisher.snapshot().version
    refused(MissingTableError, Predictor(MemorySink(Stored()), url, tables=["top.*"]).sync, "Pass tables")
    assert Predictor(MemorySink(Stored()), url, tables=["item"]).sync() == version


@pytest.mark.advice("ModelMismatchError: _refuse_shared_memory")
@pytest.mark.parametrize("way", ["own memory", "fqns_to_skip"])
def test_tied_tables_are_separated_or_named_in_fqns_to_skip(tmp_path: Path, way: str) -> None:
    job = Job(tmp_path, small_model(2))
    model = small_model(2)
    model[1].weight = model[0].weight
    predictor = job.serve(model)
    refused(ModelMismatchError, predictor.sync, "fqns_to_skip", "own memory")
    if way == "own memory":
        model[1].weight = nn.Parameter(torch.zeros(20, 4))
        assert job.is_served_by(model, job.serve(model).sync())
        return
    with Publisher(ModelDeltaTracker(job.model, fqns_to_skip=["1"]), job.url) as publisher:
        version = publisher.snapshot().version
        assert predictor.sync() == version
        assert torch.equal(model[0].weight, job.model[0].weight)


@pytest.mark.advice("ModelMismatchError: check_maps")
def test_an_index_of_raw_ids_is_left_out_where_there_are_none(tmp_path: Path) -> None:
    job = Job(tmp_path)
    model = small_model()
    target = ModelTarget(model, raw_ids={"0": RawIdIndex(20)})
    refused(ModelMismatchError, job.serve(target).sync, "Leave the table out of raw_ids")
    assert job.is_served_by(model, job.serve(model).sync())


@pytest.mark.advice("ModelMismatchError: _check_table")
def test_a_row_store_of_another_table_is_replaced(tmp_path: Path) -> None:
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    with Predictor(LmdbSink(str(tmp_path / "rows")), writer.storage) as predictor:
        predictor.sync()
        writer.table, writer.spec, writer.columns = torch.ones(20, 8), TableSpec(FQN, 20, 8, torch.float32), ((0, 8),)
        writer.snapshot()
        refused(ModelMismatchError, predictor.sync, "another prefix or directory")
    with Predictor(LmdbSink(str(tmp_path / "others")), writer.storage) as predictor:
        assert predictor.sync() == 2


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


_DAMAGES: dict[str, tuple[str, Callable[[Path], None], type[Exception]]] = {
    "truncated part": ("parts", _truncate, CorruptPartError),
    "flipped part": ("parts", _flip, CorruptPartError),
    "missing part": ("parts", Path.unlink, CorruptPartError),
    "garbled entry": ("log", lambda path: path.write_bytes(b"<html>"), MalformedError),
    "missing entry": ("log", Path.unlink, MissingVersionError),
}


def _sync_until_it_raises(predictor: Predictor) -> None:
    """A gap is found when the pointer object shows a version above it, which is written about once a second."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        predictor.sync()


def _damage(job: Job, version: int, kind: str) -> type[Exception]:
    """Damage a version of a stream, and return the error of its readers."""
    folder, act, error = _DAMAGES[kind]
    root = Path(job.url.removeprefix("file://"))
    part = next((root / "parts").glob(f"{version:020d}*"))
    act(part if folder == "parts" else root / entry_name(version))
    return error


@pytest.mark.advice(
    "CorruptPartError: read_object _fetched Tensors._load _check_hash _check_piece check_size _Refusals.__exit__",
    "MalformedError: parse_manifest check_version check_merged generation_error ByteRange.memory "
    "version_owners identities_after",
    "MissingVersionError: Source._check_gap next_entry",
)
@pytest.mark.parametrize("kind", _DAMAGES)
def test_a_snapshot_of_the_trainer_replaces_a_damaged_version(tmp_path: Path, kind: str) -> None:
    job, model = Job(tmp_path), small_model()
    predictor = job.serve(model)
    predictor.sync()
    for row in range(3):
        job.publish(row)
    refused(_damage(job, 2, kind), lambda: _sync_until_it_raises(predictor), "snapshot")
    assert predictor.version == 1
    job.publisher.snapshot()
    assert job.is_served_by(model, predictor.sync())
    with job.serve(model := small_model()) as other:
        other.follow(poll_seconds=0.01)
        assert job.is_served_by(model, other.wait(job.publisher.version, timeout=60))


@pytest.mark.advice(
    "StreamReplacedError: VersionWriter.apply next_entry Source._check_gap path_to Lag.of",
    "StreamReplacedError: _check_may_follow _follow_other_stream",
)
def test_a_snapshot_to_the_present_stream_serves_a_predictor_of_the_former(tmp_path: Path) -> None:
    job, model = Job(tmp_path), small_model()
    predictor = job.serve(model)
    predictor.sync()
    job.publisher.close()
    (tmp_path / "stream").rename(tmp_path / "former")
    publisher = Publisher(job.tracker, job.url)
    refused(StreamReplacedError, predictor.sync, "Publish a snapshot to the present stream")
    refused(StreamReplacedError, lambda: predictor.rollback(0))
    job.publisher = publisher
    job.train(5)
    job.publisher.snapshot()
    assert job.is_served_by(model, predictor.sync())


@pytest.mark.advice("NoSnapshotError: _apply_newest _path path_to _start_with_order _start")
def test_a_snapshot_makes_a_stream_readable(tmp_path: Path) -> None:
    tracker = ModelDeltaTracker(small_model())
    with Publisher(tracker, f"file://{tmp_path}") as publisher:
        predictor = Predictor(model := small_model(), f"file://{tmp_path}")
        refused(NoSnapshotError, predictor.sync, "Call Publisher.snapshot() on the trainer, then sync() again")
        publisher.snapshot()
        assert predictor.sync() == 1
        assert torch.equal(model[0].weight, tracker.read_rows("0"))
        refused(NoSnapshotError, lambda: predictor.rollback(0), "first snapshot, usually 1, or a later one")
        predictor.rollback(1)
        assert predictor.version == 1


@pytest.mark.advice("MissingVersionError: committed_entry _path")
def test_another_version_than_a_missing_one_is_asked_for(tmp_path: Path) -> None:
    job, model = Job(tmp_path), small_model()
    predictor = job.serve(model)
    held = job.model[0].weight.detach().clone()
    for row in range(3):
        job.publish(row)
    predictor.sync()
    _damage(job, 3, "missing entry")
    refused(MissingVersionError, lambda: predictor.rollback(3), "ask for another one")
    predictor.rollback(1)
    assert torch.equal(model[0].weight, held)


@pytest.mark.advice("WaitTimeoutError: Predictor.wait")
def test_a_longer_timeout_is_enough_where_the_publisher_publishes(tmp_path: Path) -> None:
    job, model = Job(tmp_path), small_model()
    with job.serve(model) as predictor:
        predictor.follow(poll_seconds=0.01)
        refused(WaitTimeoutError, lambda: predictor.wait(2, timeout=0.01), "that the publisher publishes")
        job.publish(3)
        assert job.is_served_by(model, predictor.wait(2, timeout=60))


@pytest.mark.advice("PartialRowsError: _check_whole")
def test_a_snapshot_has_whole_rows(tmp_path: Path) -> None:
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    with Predictor(LmdbSink(str(tmp_path / "rows")), writer.storage) as predictor:
        predictor.sync()
        (rows,) = writer.blocks([3])
        block = replace(rows.block, columns=(0, 2))
        writer.write("delta", [BlockRows.of(block, torch.tensor([3]), encode_rows(torch.ones(1, 2), writer.encoding))])
        refused(PartialRowsError, predictor.sync, "Wait for the next snapshot")
        writer.snapshot()
        assert predictor.sync() == 3
