"""Predictors that apply some tables of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from delta_tracker import Encoding, Gate, ModelDeltaTracker, Predictor, Publisher
from delta_tracker.cli.main import main
from delta_tracker.errors import CorruptPartError, InvalidArgumentError, ModelMismatchError, StorageError
from delta_tracker.predictor.predictor import Rollout
from delta_tracker.predictor.served_model import ModelTarget
from delta_tracker.stream.format.manifest import entry_name
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.storage.storage import Storage
from tests.predictor.cache_server import cache_server
from tests.predictor.memory_sink import MemorySink, Stored
from tests.stores.wrapped import Operation, Perform, WrappedStorage
from tests.stream.slow_s3 import Fault, slow_s3
from tests.stream.streams import FQN, Writer

_ROWS, _DIM = 20_000, 16
_TABLE_BYTES = _ROWS * _DIM * 4


class _Model(nn.Module):
    """Two tables of users, one of items, and a dense part."""

    def __init__(self, rows: int = _ROWS) -> None:
        super().__init__()
        self.user = nn.ModuleDict({name: nn.EmbeddingBag(rows, _DIM, mode="sum") for name in ("id", "country")})
        self.item = nn.EmbeddingBag(rows, _DIM, mode="sum")
        self.top = nn.Linear(_DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(self.user["id"](ids) + self.user["country"](ids) + self.item(ids)).sum()


class _Trainer:
    def __init__(self, url: Any, rows: int = _ROWS, encoding: Encoding | None = None) -> None:
        self.model = _Model(rows)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self._tracker = ModelDeltaTracker(self.model)
        self.publisher = Publisher(self._tracker, url, dense=True, encoding=encoding)
        self.publisher.snapshot()

    def train(self, ids: torch.Tensor) -> int:
        self._optimizer.zero_grad()
        self.model(ids[:, None]).backward()
        self._optimizer.step()
        self._tracker.step()
        return self.publisher.publish().version


@pytest.fixture
def url(tmp_path: Path) -> str:
    return tmp_path.as_uri()


@pytest.fixture
def trainer(url: str) -> Iterator[_Trainer]:
    trainer = _Trainer(url)
    with trainer.publisher:
        yield trainer


def _equal(model: nn.Module, other: nn.Module) -> set[str]:
    values = dict(other.named_parameters())
    return {name for name, value in model.named_parameters() if torch.equal(value, values[name])}


def test_only_the_chosen_tables_and_dense_tensors_are_applied(
    trainer: _Trainer, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = _Model()
    predictor = Predictor(model, url, tables=["item", "top.*"])
    assert predictor.sync() == trainer.publisher.version
    trainer.train(torch.tensor([3, 7]))
    assert predictor.sync() == trainer.publisher.version
    assert _equal(model, trainer.model) == {"item.weight", "top.weight", "top.bias"}
    assert predictor.status().left_out == ("user.country", "user.id")
    assert predictor.manifest is not None
    assert list(predictor.manifest.tables) == ["item"]
    assert "keep their" not in caplog.text, "what is left out on purpose needs no warning"


def test_a_model_needs_the_chosen_tables_only(trainer: _Trainer, url: str) -> None:
    tables = {"user.id": torch.zeros(_ROWS, _DIM)}
    with pytest.raises(ModelMismatchError, match=r"tables="):
        Predictor(tables, url).sync()
    predictor = Predictor(ModelTarget(tables, dense=False), url, tables="user.id")
    predictor.sync()
    predictor.follow(poll_seconds=0.01)
    predictor.wait(trainer.train(torch.tensor([5])), timeout=60)
    predictor.stop()
    assert torch.equal(tables["user.id"], trainer.model.user["id"].weight)
    predictor.rollback(trainer.publisher.version - 1)
    assert not torch.equal(tables["user.id"], trainer.model.user["id"].weight)


def test_the_tables_that_a_path_to_a_version_leaves_out_are_named(trainer: _Trainer, url: str) -> None:
    version = trainer.publisher.version
    trainer.train(torch.tensor([3, 7]))
    predictor = Predictor(_Model(), url, tables=["item", "top.*"])
    predictor.rollback(version)
    assert predictor.status().left_out == ("user.country", "user.id")


class _Bytes:
    """Rule that counts the bytes of parts that are read."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, operation: Operation, perform: Perform) -> Any:
        found = perform(operation)
        if operation.kind in ("read", "read_range") and operation.name.startswith("parts/"):
            self.count += len(found)
        return found


def test_only_the_bytes_of_the_chosen_tables_are_read() -> None:
    storage = Storage("memory://")
    trainer = _Trainer(storage)
    counted = _Bytes()
    read = WrappedStorage(storage, counted)
    table = torch.zeros(_ROWS, _DIM)
    predictor = Predictor({"item": table}, read, tables=["item"])
    for ids in (None, torch.arange(0, _ROWS, 2)):
        if ids is not None:
            trainer.train(ids)
        changed = _TABLE_BYTES if ids is None else len(ids) * (_DIM * 4 + 8)
        counted.count = 0
        predictor.sync()
        assert changed <= counted.count <= changed + 2000, "more than a header"
        assert torch.equal(table, trainer.model.item.weight)
    trainer.publisher.close()


def test_adjacent_tensors_are_read_with_one_request() -> None:
    storage = Storage("memory://")
    model = nn.ModuleDict({name: nn.EmbeddingBag(_ROWS, _DIM) for name in ("a", "b")})
    model["top"] = nn.ModuleList(nn.Linear(_DIM, 2) for _ in range(100))
    with Publisher(ModelDeltaTracker(model), storage, dense=True) as publisher:
        publisher.snapshot()
    read, copy = WrappedStorage(storage), deepcopy(model)
    for parameter in copy.parameters():
        nn.init.zeros_(parameter)
    Predictor(copy, read, tables=["a", "top.*"]).sync()
    assert _equal(copy, model) == {name for name, _ in model.named_parameters()} - {"b.weight"}
    assert read.count("read_range", name="parts/") <= 4, "the header with two, the rows, and the dense tensors"


def test_a_tensor_whose_download_failed_is_resumed() -> None:
    storage = Storage("memory://")
    trainer = _Trainer(storage)
    table = torch.zeros(_ROWS, _DIM)
    with slow_s3(storage) as server:
        server.max_retries = 0
        predictor = Predictor({"item": table}, server.storage(), tables=["item"])
        answers: list[Fault | None] = [("cut", 600_000), None, None]
        server.faults = lambda _: answers.pop() if answers else ("cut", 0)
        with pytest.raises(StorageError):
            predictor.sync()
        server.faults = lambda _: None
        predictor.sync()
        assert torch.equal(table, trainer.model.item.weight)
        assert server.sent.total() <= _TABLE_BYTES + 300_000, "an interruption loses at most 256 KiB"
    trainer.publisher.close()


def test_a_short_copy_is_read_past_a_cache_that_sends_the_size_of_the_whole_object(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("delta_tracker.predictor.reader._SPREAD_SECONDS", 0.0)
    storage = Storage("memory://")
    trainer = _Trainer(storage)
    table = torch.zeros(_ROWS, _DIM)
    head = StreamLog(storage).head()
    assert head is not None
    with cache_server(storage, passes_heads=True) as cache:
        cache.truncate(head.parts[0].name)
        predictor = Predictor({"item": table}, cache.url, tables=["item"])
        predictor.sync()
    assert torch.equal(table, trainer.model.item.weight)
    trainer.publisher.close()


@pytest.mark.parametrize("is_listed", [False, True])
def test_a_damaged_tensor_is_found_before_a_row_changes(is_listed: bool) -> None:
    storage = Storage("memory://")
    trainer = _Trainer(storage)
    table = torch.zeros(_ROWS, _DIM)
    predictor = Predictor({"item": table}, storage, tables=["item"])
    if is_listed:
        predictor.sync()
        trainer.train(torch.arange(0, _ROWS, 2))
    head = StreamLog(storage).head()
    assert head is not None
    (part,) = head.parts
    whole = storage.read(part.name, max_bytes=part.num_bytes)
    assert whole is not None
    before = table.clone()
    num_found = 0
    for position in range(0, len(whole), len(whole) // 40):
        damaged = whole.copy()
        damaged[position] ^= 1
        storage.put(part.name, [memoryview(damaged)])
        reader = Predictor({"item": table}, storage, tables=["item"])
        if is_listed:
            reader.load_state_dict(predictor.state_dict())
        try:
            reader.sync()
        except CorruptPartError:
            assert torch.equal(table, before)
            num_found += 1
        else:
            assert torch.equal(table, trainer.model.item.weight)
            table.copy_(before)
    assert 10 <= num_found <= 16, "a third of the part, and the header"
    trainer.publisher.close()


@pytest.mark.parametrize("digests", [["0" * 32] * 5, ["0" * 32]])
@pytest.mark.usefixtures("trainer")
def test_wrong_digests_of_another_writer_are_refused_and_found_by_verify(
    url: str, digests: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    storage = Storage(url)
    log = StreamLog(storage)
    name = entry_name(max(log.versions()))
    assert main(["verify", url]) == 0
    data = storage.read(name, max_bytes=1 << 20)
    assert data is not None
    entry = json.loads(data.tobytes())
    assert len(entry["parts"][0]["tensors"]) == 5
    entry["parts"][0]["tensors"] = digests
    storage.replace(name, json.dumps(entry).encode())
    assert Predictor(_Model(), url).sync() == entry["version"], "these digests are not used"
    with pytest.raises(CorruptPartError, match="digest"):
        Predictor(_Model(), url, tables=["item"]).sync()
    assert main(["verify", url]) == 1
    assert "its tensors do not match their digests" in capsys.readouterr().out


def test_an_object_that_an_entry_names_twice_has_the_rows_of_both_tables() -> None:
    """As another writer may store two equal tables."""
    writer = Writer(Storage("memory://"))
    writer.change(list(range(20)))
    written = writer.snapshot()
    (part,) = written.parts
    other = replace(part, blocks=tuple(replace(block, table="other") for block in part.blocks))
    tables = {**written.tables, "other": replace(writer.spec, fqn="other")}
    draft = replace(written, tables=tables, parts=(part, other), parent=None, snapshot=None)
    writer.claim.commit(draft)
    for chosen in ([FQN], ["other"], ["*"]):
        model = {name: torch.zeros_like(writer.table) for name in tables}
        Predictor(model, writer.storage, tables=chosen).sync()
        for name, table in model.items():
            assert torch.equal(table, writer.table) == (name in chosen or chosen == ["*"])


def test_a_choice_that_fits_nothing_is_refused(trainer: _Trainer, url: str) -> None:
    for wrong in ([], [""], 7, ["item", 3], b"item"):
        with pytest.raises(InvalidArgumentError, match="Pass names or patterns"):
            Predictor(_Model(), url, tables=wrong)  # type: ignore[arg-type]
    predictor = Predictor(_Model(), url, tables=["item", "users.*"])
    with pytest.raises(InvalidArgumentError, match=r"tables='users.\*'.*user.country"):
        predictor.sync()
    with pytest.raises(InvalidArgumentError, match=r"user\.country"):
        predictor.follow()
    assert predictor.version is None
    predictor = Predictor(_Model(), url, tables=["item", "user.*"])
    assert predictor.sync() == trainer.publisher.version


def test_a_saved_position_is_that_of_the_chosen_tables(trainer: _Trainer, url: str) -> None:
    model = _Model()
    predictor = Predictor(model, url, tables=["item", "top.*"])
    predictor.sync()
    state = predictor.state_dict()
    for other in (None, ["item"], ["item", "top.*", "user.id"]):
        with pytest.raises(InvalidArgumentError, match="begins with a snapshot"):
            Predictor(model, url, tables=other).load_state_dict(state)
    again = Predictor(model, url, tables=["top.*", "item"])
    again.load_state_dict(state)
    again.sync()
    assert again.status().left_out == ("user.country", "user.id"), "before a version is applied"
    trainer.train(torch.tensor([2]))
    again.sync()
    assert _equal(model, trainer.model) == {"item.weight", "top.weight", "top.bias"}
    assert again.status().resyncs == 0
    whole = Predictor(model, url)
    whole.sync()
    with pytest.raises(InvalidArgumentError, match="begins with a snapshot"):
        again.load_state_dict(whole.state_dict())


def test_the_gate_checks_the_chosen_tables_only(trainer: _Trainer, url: str) -> None:
    model = _Model()
    predictor = Predictor(model, url, tables=["item"], rollout=Rollout(gate=Gate()))
    predictor.sync()
    with torch.no_grad():
        trainer.model.user["id"].weight[4] = float("nan")
    trainer.train(torch.tensor([5]))
    assert predictor.sync() == trainer.publisher.version
    assert _equal(model, trainer.model) == {"item.weight"}


def test_a_row_store_has_the_chosen_tables_and_no_others_later(trainer: _Trainer, url: str) -> None:
    stored = Stored()
    predictor = Predictor(MemorySink(stored), url, tables=["item"])
    predictor.sync()
    trainer.train(torch.tensor([2, 9]))
    predictor.sync()
    assert {table for _, table, _ in stored.rows} == {"item"}
    found = torch.stack([stored.rows[trainer.publisher.stream, "item", row][1] for row in range(_ROWS)])
    assert torch.equal(found, trainer.model.item.weight)
    trainer.train(torch.tensor([3]))
    for other in (None, ["user.id"], ["item", "user.id"]):
        with pytest.raises(InvalidArgumentError, match=r"Pass \['item'\], with which the row store began, or another"):
            Predictor(MemorySink(stored), url, tables=other)
    with pytest.raises(InvalidArgumentError, match="a row store has no dense tensors"):
        Predictor(MemorySink(Stored()), url, tables=["top.*"]).sync()
    both = Stored()
    Predictor(MemorySink(both), url, tables=["item", "user.id"]).sync()
    trainer.train(torch.tensor([4]))
    whole = Stored()
    Predictor(MemorySink(whole), url).sync()
    with pytest.raises(InvalidArgumentError, match="Pass None, with which the row store began"):
        Predictor(MemorySink(whole), url, tables=["item"])
    assert Predictor(MemorySink(Stored()), url, tables=["item"]).sync() == trainer.publisher.version


@pytest.mark.parametrize("encoding", [None, Encoding.INT8])
@pytest.mark.parametrize("has_cache", [False, True])
def test_chosen_tables_equal_those_of_a_whole_predictor(
    tmp_path: Path, encoding: Encoding | None, *, has_cache: bool
) -> None:
    """The history has deltas with large and small parts, a merged one, a rollback, and a second snapshot."""
    url = (tmp_path / "stream").as_uri()
    trainer = _Trainer(url, encoding=encoding)
    caches = [tmp_path / "cache" if has_cache else None, None]
    models = [_Model(), _Model()]
    some, whole = (
        Predictor(model, url, tables=tables, cache=cache)
        for model, tables, cache in zip(models, (["user.*", "top.weight"], None), caches, strict=True)
    )
    generator = torch.Generator().manual_seed(1)
    for turn in range(8):
        trainer.train(torch.randperm(_ROWS, generator=generator)[: 4 if turn % 2 else _ROWS // 2])
        if turn == 3:
            compact(StreamLog(Storage(url)))
        if turn == 5:
            trainer.publisher.snapshot()
        if turn in (1, 4, 7):
            assert some.sync() == whole.sync()
            assert _equal(*models) == {"user.id.weight", "user.country.weight", "top.weight"}
    for each in (some, whole):
        each.rollback(trainer.publisher.version - 2)
    assert _equal(*models) == {"user.id.weight", "user.country.weight", "top.weight"}
    trainer.publisher.close()
