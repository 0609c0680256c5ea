"""Predictor against real streams: versions apply in order, exactly, and completely or not at all."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from delta_tracker import ModelTarget, Predictor
from delta_tracker.errors import (
    CorruptPartError,
    InvalidArgumentError,
    MalformedError,
    MissingVersionError,
    ModelMismatchError,
    NoSnapshotError,
    StorageError,
    StreamReplacedError,
)
from delta_tracker.row_target import TensorTarget
from delta_tracker.stream import log as log_module
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Block, Manifest
from delta_tracker.stream.format.part_writer import put_part
from delta_tracker.stream.reading.runtime import Runtime
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import TableSpec
from tests.stream.streams import FQN, Writer
from tests.waiting import eventually


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(Storage(f"file://{tmp_path}", create=True))


def test_it_equals_the_trainer_after_every_version(writer: Writer) -> None:
    model = writer.model()
    predictor = Predictor(model, writer.storage.url)
    assert predictor.version is None
    with pytest.raises(NoSnapshotError, match="memory://"):
        Predictor(model, Storage("memory://")).sync()  # not even a claim
    with pytest.raises(NoSnapshotError, match=r"Publisher\.snapshot"):
        predictor.sync()
    writer.snapshot()
    for ids in ([0], [3, 19], list(range(20)), []):
        manifest = writer.delta(ids)
        assert predictor.sync() == manifest.version == predictor.version
        assert predictor.manifest == manifest
        assert torch.equal(model[FQN], writer.table)
    before = model[FQN].clone()
    assert predictor.sync() == predictor.version
    assert torch.equal(model[FQN], before)


def test_a_new_one_starts_at_the_newest_snapshot(writer: Writer) -> None:
    writer.snapshot()
    writer.delta([1])
    newest = writer.snapshot()
    model = writer.model()
    predictor = Predictor(model, writer.storage)
    assert predictor.sync(limit=1) == newest.version
    last = writer.delta([2])
    writer = Writer(writer.storage)  # the next generation's claim is a version too
    assert predictor.sync() == last.version + 1
    with pytest.raises(InvalidArgumentError, match="limit"):
        predictor.sync(limit=0)


def test_limit_applies_one_version_at_a_time(writer: Writer) -> None:
    first = writer.snapshot().version
    for row in range(3):
        writer.delta([row])
    predictor = Predictor(writer.model(), writer.storage)
    assert [predictor.sync(limit=1) for _ in range(5)] == [first, first + 1, first + 2, first + 3, first + 3]
    assert predictor.sync(limit=7) == first + 3


@pytest.mark.parametrize("kind", ["embedding", "bag", "nested", "buffer"])
def test_torch_modules_receive_rows_in_place(writer: Writer, kind: str) -> None:
    class Inner(nn.Module):
        def __init__(self, table: nn.Module) -> None:
            super().__init__()
            self.embeddings = nn.ModuleDict({"t": table})

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.zeros(20, 4))

    table = {"embedding": nn.Embedding, "nested": nn.Embedding, "bag": nn.EmbeddingBag}.get(kind)
    module = Plain() if table is None else table(20, 4)
    model = nn.ModuleDict({"ec": Inner(module)})
    memory = module.weight.data_ptr()
    writer.snapshot()
    writer.delta([2, 5])
    Predictor(model, writer.storage).sync()
    assert torch.equal(module.weight, writer.table)
    assert module.weight.data_ptr() == memory


def test_half_precision_is_bit_exact(tmp_path: Path) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        writer = Writer(Storage(f"file://{tmp_path}/{dtype}", create=True), dtype=dtype)
        model = writer.model()
        writer.snapshot()
        writer.delta([2, 5])
        Predictor(model, writer.storage).sync()
        assert torch.equal(model[FQN].view(torch.int16), writer.table.view(torch.int16))


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ({FQN: torch.zeros(21, 4)}, "21 x 4 float32"),
        ({FQN: torch.zeros(20, 5)}, "20 x 5 float32"),
        ({FQN: torch.zeros(20, 4, dtype=torch.float16)}, "20 x 4 float16"),
        ({"other": torch.zeros(20, 4)}, "missing"),
    ],
)
def test_another_table_is_refused(writer: Writer, model: dict[str, torch.Tensor], found: str) -> None:
    writer.snapshot()
    predictor = Predictor(model, writer.storage)
    with pytest.raises(ModelMismatchError, match="20 x 4 float32 in the stream") as caught:
        predictor.sync()
    assert (caught.value.name, caught.value.found) == (FQN, found)
    assert "names={stream: model}" in caught.value.remedy
    assert predictor.version is None
    assert all(not tensor.any() for tensor in model.values())


def test_a_model_without_tables_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="embedding tables"):
        Predictor(nn.ReLU(), Storage("memory://"))


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [_truncate, _flip, Path.unlink])
def test_a_damaged_part_changes_nothing(writer: Writer, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    writer.snapshot()
    model = writer.model()
    predictor = Predictor(model, writer.storage)
    good = predictor.sync()
    before = model[FQN].clone()
    part = writer.delta([1, 2]).parts[0]
    damage(tmp_path / part.name)
    for _ in range(2):
        with pytest.raises(CorruptPartError, match=part.name):
            predictor.sync()
    assert predictor.version == good
    assert torch.equal(model[FQN], before)
    writer.snapshot()
    again = Predictor(model, writer.storage)  # the remedy that the error names
    again.sync()
    assert torch.equal(model[FQN], writer.table)


def test_a_missing_version_is_named_and_nothing_beyond_it_applied(writer: Writer, tmp_path: Path) -> None:
    writer.snapshot()
    model = writer.model()
    predictor = Predictor(model, writer.storage)
    good = predictor.sync()
    before = model[FQN].clone()
    writer.delta([1])
    last = writer.delta([2])
    (tmp_path / "log" / f"{good + 1:020d}.json").unlink()
    for _ in range(2):
        with pytest.raises(MissingVersionError) as caught:
            predictor.sync()
        assert (caught.value.version, caught.value.head) == (good + 1, last.version)
    assert predictor.version == good
    assert torch.equal(model[FQN], before)


def test_a_malformed_entry_is_named(writer: Writer, tmp_path: Path) -> None:
    writer.snapshot()
    predictor = Predictor(writer.model(), writer.storage)
    good = predictor.sync()
    path = tmp_path / "log" / f"{good + 1:020d}.json"
    path.write_text("{}")
    with pytest.raises(MalformedError, match=path.name):
        predictor.sync()
    assert predictor.version == good


def test_another_stream_in_the_same_place_is_refused_until_it_has_a_snapshot(writer: Writer) -> None:
    writer.snapshot()
    predictor = Predictor(writer.model(), writer.storage)
    good = predictor.sync()
    for kind in ("delta", "snapshot"):
        head = writer.claim.head
        entry = replace(head, stream="0" * 32, kind=kind, version=good + 1, parent=head.link, created=head.created + 1)
        entry = replace(entry, parts=(), tables={}) if kind == "delta" else replace(entry, snapshot=good + 1)
        name = f"log/{good + 1:020d}.json"
        writer.storage.delete(name)
        writer.storage.create(name, entry.to_json())
        if kind == "delta":
            with pytest.raises(StreamReplacedError, match=r"not the one of which version 1"):
                predictor.sync()
            assert predictor.version == good
        else:
            assert predictor.sync() == good + 1
            assert "StreamReplacedError" in predictor.status().last_resync


def test_it_may_start_before_the_stream_exists(tmp_path: Path) -> None:
    model = {FQN: torch.zeros(20, 4)}
    predictor = Predictor(model, f"file://{tmp_path}/later")
    with pytest.raises(NoSnapshotError, match="later"):
        predictor.sync()
    assert not (tmp_path / "later").exists()
    writer = Writer(Storage(f"file://{tmp_path}/later", create=True))
    manifest = writer.snapshot()
    assert predictor.sync() == manifest.version


def test_a_store_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="url="):
        Predictor({FQN: torch.zeros(1, 1)}, f"s4://{tmp_path}")
    with pytest.raises(InvalidArgumentError, match="Write s3://bucket/prefix"):
        Predictor({FQN: torch.zeros(1, 1)}, "s3://")
    with pytest.raises(StorageError, match="az:"):
        Predictor({FQN: torch.zeros(1, 1)}, "az://container")


def test_follow_applies_in_the_background_and_readers_see_whole_rows(tmp_path: Path) -> None:
    # Rows so long that a write takes a while: without the lock this sees hundreds of torn rows.
    writer = Writer(Storage(f"file://{tmp_path}", create=True), num_rows=16, dim=1 << 16)
    model = writer.model()
    predictor = Predictor(model, writer.storage)
    predictor.follow(poll_seconds=0.001)
    with pytest.raises(InvalidArgumentError, match="already following"):
        predictor.follow()
    time.sleep(0.02)  # the stream is still empty
    writer.snapshot()
    torn, versions, done = [], set(), threading.Event()

    def read() -> None:
        while not done.is_set():
            with predictor.reading() as served:
                rows = model[FQN].clone()
            versions.add(served.version)
            torn.extend((rows.amin(dim=1) != rows.amax(dim=1)).nonzero().tolist())

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    eventually(lambda: versions)
    for value in range(30):
        writer.table.fill_(value)
        last = writer.snapshot()
    eventually(lambda: last.version in versions)
    done.set()
    reader.join()
    predictor.stop()
    predictor.stop()
    assert not torn
    assert len(versions) > 1
    assert torch.equal(model[FQN], writer.table)


def test_an_error_in_the_background_reaches_the_caller(writer: Writer, tmp_path: Path) -> None:
    part = writer.snapshot().parts[0]
    _truncate(tmp_path / part.name)
    predictor = Predictor(writer.model(), writer.storage)
    predictor.follow(poll_seconds=0.001)
    eventually(lambda: isinstance(predictor.error, CorruptPartError))
    with pytest.raises(CorruptPartError):
        predictor.stop()


def test_a_recreated_stream_is_detected(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/stream"
    writer = Writer(Storage(url, create=True))
    writer.snapshot()
    for row in range(4):
        writer.delta([row])
    model = writer.model()
    predictor = Predictor(model, url)
    predictor.sync()
    for num_deltas in (0, 3, 5):  # shorter than what was applied, as long, longer
        shutil.rmtree(tmp_path / "stream")
        again = Writer(Storage(url, create=True))
        again.snapshot()
        for row in range(num_deltas):
            again.delta([row])
        assert predictor.sync() == again.claim.head.version
        assert torch.equal(model[FQN], again.table)
        assert predictor.status().stream == again.claim.head.stream
    assert predictor.status().resyncs == 3


def test_large_tables_are_written_in_chunks(tmp_path: Path) -> None:
    writer = Writer(Storage(f"file://{tmp_path}", create=True), num_rows=20_001)
    writer.table.normal_()
    writer.snapshot()
    model = writer.model()
    predictor = Predictor(model, writer.storage)
    predictor.sync()
    assert torch.equal(model[FQN], writer.table)
    writer.delta(list(range(0, 20_001, 2)))
    predictor.sync()
    assert torch.equal(model[FQN], writer.table)


def _two_parts(writer: Writer) -> Manifest:
    """Commit a delta with two parts, as two ranks would."""
    writer.table[[1, 15]] = 7.0
    records = []
    for rows, row in (((0, 10), 1), ((10, 20), 15)):
        block = Block(FQN, rows, (0, 4), 1, "list", Encoding.F32)
        name = f"parts/{row}.safetensors"
        listed = BlockRows.of(block, torch.tensor([row]), writer.table[[row]])
        records.append(put_part(writer.storage, name, [listed], states_name=None))
    draft = Manifest(
        stream="", generation=0, writer="", version=0, kind="delta", created=0.0,
        tables={FQN: writer.spec}, parts=tuple(records),
    )  # fmt: skip
    return writer.claim.commit(draft)


def test_a_version_is_applied_whole_or_not_at_all(writer: Writer, tmp_path: Path) -> None:
    writer.snapshot()
    model = writer.model()
    predictor = Predictor(model, writer.storage)
    good = predictor.sync()
    before = model[FQN].clone()
    last = tmp_path / _two_parts(writer).parts[1].name
    content = last.read_bytes()
    _flip(last)
    with pytest.raises(CorruptPartError):
        predictor.sync()
    assert torch.equal(model[FQN], before)
    assert predictor.version == good
    last.write_bytes(content)
    assert predictor.sync() == good + 1
    assert torch.equal(model[FQN], writer.table)


def test_the_version_is_reported_after_its_rows_are_written(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    writer.snapshot()
    predictor = Predictor(writer.model(), writer.storage)
    seen = []
    write = TensorTarget.write
    monkeypatch.setattr(TensorTarget, "write", lambda self, *args: (seen.append(predictor.version), write(self, *args)))
    first = predictor.sync()
    writer.delta([3])
    predictor.sync()
    assert seen == [None, first]


def test_a_part_larger_than_its_record_is_not_read(writer: Writer, tmp_path: Path) -> None:
    part = writer.snapshot().parts[0]
    with (tmp_path / part.name).open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(CorruptPartError, match="more than"):
        Predictor(writer.model(), writer.storage).sync()


def test_tables_are_looked_up_again_for_each_version(writer: Writer) -> None:
    model = nn.ModuleDict({"ec": nn.ModuleDict({"embeddings": nn.ModuleDict({"t": nn.Embedding(20, 4)})})})
    writer.snapshot()
    predictor = Predictor(model, writer.storage)
    predictor.sync()
    model.load_state_dict({f"{FQN}.weight": torch.full((20, 4), 3.0)}, assign=True)
    writer.table.fill_(3.0)
    writer.delta([5, 6])
    predictor.sync()
    assert torch.equal(model["ec"]["embeddings"]["t"].weight, writer.table)


@pytest.mark.parametrize("kind", ["meta", "inference", "expanded", "tied", "half tied", "sparse"])
def test_a_table_that_cannot_be_written_is_refused_before_any_row_is(tmp_path: Path, kind: str) -> None:
    writer = Writer(Storage(f"file://{tmp_path}", create=True))
    other = TableSpec("other", 20, 4, torch.float32)
    blocks = [Block(fqn, (0, 20), (0, 4), 20, "all", Encoding.F32) for fqn in ("other", FQN)]
    rows = [BlockRows.of(block, None, torch.ones(20, 4)) for block in blocks]
    writer.write("snapshot", rows, {"other": other, FQN: writer.spec})
    memory = torch.zeros(40, 4)
    with torch.inference_mode():
        inference = torch.zeros(20, 4)
    table = {
        "meta": torch.zeros(20, 4, device="meta"),
        "inference": inference,
        "expanded": torch.zeros(1, 4).expand(20, 4),
        "tied": memory[:20],
        "half tied": memory[10:30],
        "sparse": torch.zeros(20, 4).to_sparse(),
    }[kind]
    predictor = Predictor({"other": memory[:20], FQN: table}, writer.storage)
    with pytest.raises(ModelMismatchError):
        predictor.sync()
    assert predictor.version is None
    assert not memory.any()


@pytest.mark.parametrize(
    "model", [None, [torch.zeros(2, 2)], {"t": [1.0]}, {"t": torch.zeros(2, 2), "t.weight": torch.zeros(2, 2)}, {}]
)
def test_an_invalid_model_is_refused(model: object) -> None:
    with pytest.raises(InvalidArgumentError, match="model="):
        Predictor(model, Storage("memory://"))


def test_readers_read_together_and_may_nest_but_not_wait_for_themselves(writer: Writer) -> None:
    writer.snapshot()
    predictor = Predictor(writer.model(), writer.storage)
    predictor.sync()
    together = threading.Barrier(3, timeout=60)

    def read() -> None:
        with predictor.reading(), predictor.reading():
            together.wait()  # breaks unless all three hold the lock at the same time

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert not together.broken
    predictor.follow()
    with predictor.reading():
        for call in (predictor.sync, predictor.stop):
            with pytest.raises(InvalidArgumentError, match=r"inside reading\(\)"):
                call()
    predictor.stop()


def test_following_continues_once_a_fault_is_repaired(writer: Writer, tmp_path: Path) -> None:
    part = tmp_path / writer.snapshot().parts[0].name
    content = part.read_bytes()
    _truncate(part)
    predictor = Predictor(writer.model(), writer.storage)
    predictor.follow(poll_seconds=0.001)
    eventually(lambda: isinstance(predictor.error, CorruptPartError))
    part.write_bytes(content)
    eventually(lambda: predictor.version == 1)
    eventually(lambda: predictor.error is None)
    predictor.stop()
    for seconds in (-1, float("nan"), float("inf"), 1e30):
        with pytest.raises(InvalidArgumentError, match="poll_seconds"):
            predictor.follow(poll_seconds=seconds)


def test_the_manifest_is_that_of_rows_not_of_a_claim(writer: Writer) -> None:
    snapshot = writer.snapshot()
    claim = Writer(writer.storage).claim.head
    predictor = Predictor(writer.model(), writer.storage)
    assert predictor.sync() == claim.version
    assert predictor.manifest == snapshot


class _CountedModel(dict[str, Tensor]):
    """A mapping of tables that counts its lookups."""

    num_lookups = 0

    def items(self) -> Any:
        self.num_lookups += 1
        return super().items()


def test_the_model_is_looked_up_once_for_each_version_and_once_at_rest() -> None:
    writer = Writer(Storage("memory://"))
    model = _CountedModel(writer.model())
    predictor = Predictor(model, writer.storage)
    for ids in (None, [1], [2, 3]):
        writer.snapshot() if ids is None else writer.delta(ids)
        model.num_lookups = 0
        predictor.sync()
        assert model.num_lookups == (3 if ids is None else 2), "the first time, its tables are found, too"
    assert torch.equal(model[FQN], writer.table)


def test_a_table_that_moved_in_memory_is_found_again() -> None:
    writer = Writer(Storage("memory://"))
    model = torch.nn.ParameterDict({FQN.replace(".", "_"): torch.nn.Parameter(writer.model()[FQN])})
    (parameter,) = model.parameters()
    predictor = Predictor(ModelTarget(model, names={FQN: FQN.replace(".", "_")}), writer.storage)
    for ids in (None, [1], [2, 3]):
        writer.snapshot() if ids is None else writer.delta(ids)
        parameter.data = parameter.data.clone()
        predictor.sync()
        assert torch.equal(parameter, writer.table)


def test_an_entry_is_parsed_once_however_often_it_is_read() -> None:
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    predictor = Predictor(writer.model(), writer.storage)
    predictor.sync()
    writer.delta([1, 2])
    with mock.patch.object(log_module, "parse_manifest", side_effect=log_module.parse_manifest) as parse:
        assert predictor.sync() == 2
        assert predictor.sync() == 2
    assert parse.call_count == 1


def test_time_and_threads_are_those_of_the_runtime(writer: Writer) -> None:
    writer.snapshot()
    now, end, is_over = [1000.0], 1000.0 + 3600.0, threading.Event()
    threads: list[str] = []

    def wait(event: threading.Event, seconds: float) -> bool:
        now[0] += seconds
        if now[0] >= end:
            is_over.set()
            return event.wait()
        return event.is_set()

    def thread(**options: Any) -> threading.Thread:
        threads.append(options["name"])
        return threading.Thread(**options)

    runtime = Runtime(lambda: now[0], lambda seconds: None, lambda low, high: (low + high) / 2, wait, thread)
    predictor = Predictor(writer.model(), writer.storage, runtime=runtime)
    before = sum(writer.storage.requests.values())
    predictor.follow(poll_seconds=60.0)
    assert is_over.wait(60), "an hour passes as fast as its clock"
    predictor.stop()
    assert (predictor.version, threads) == (1, ["predictor"])
    assert 60 <= sum(writer.storage.requests.values()) - before <= 60 * 6
