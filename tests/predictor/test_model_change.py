"""Predictors whose model differs from the trainer's, because one of them was changed."""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from delta_tracker import Canary, Encoding, ModelDeltaTracker, Predictor, Publisher, RawIdIndex
from delta_tracker.cli.attention import predictor_notices
from delta_tracker.cli.main import main
from delta_tracker.cli.predictors import SeenPredictor, read_predictors
from delta_tracker.errors import (
    InvalidArgumentError,
    MissingTableError,
    ModelMismatchError,
    NoSnapshotError,
    StorageError,
)
from delta_tracker.monitor import Monitor
from delta_tracker.predictor.model_fit import OnModelChange, fit
from delta_tracker.predictor.predictor import Rollout
from delta_tracker.predictor.served_model import ModelTarget
from delta_tracker.row_target import Region, TensorTarget
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.codec import encode_rows
from delta_tracker.stream.format.manifest import Block, Manifest
from delta_tracker.stream.heartbeat import Heartbeat
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.mirroring import Mirror, promote
from delta_tracker.stream.pin import PinReader
from delta_tracker.stream.pinning import pin_version, release_pin
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.stream.store_clock import StoreClock
from delta_tracker.types import Bucket, Identity, TableSpec
from tests.heartbeats import read_heartbeats
from tests.monitor.figures import Figures
from tests.predictor.memory_sink import MemorySink, Stored
from tests.stream.streams import Writer
from tests.sweeps import SWEEPS_ARE_WHOLE
from tests.waiting import eventually

Sizes = Mapping[str, tuple[int, ...]]  # rows, columns and, if it is not float32, dtype of each table
_OLD: Sizes = {"a": (6, 2), "b": (6, 2)}
_CHANGES: dict[str, Sizes] = {
    "a table was added": {**_OLD, "c": (4, 2)},
    "a table was removed": {"a": (6, 2)},
    "a table is wider": {**_OLD, "b": (6, 4)},
    "a table has more rows": {**_OLD, "b": (9, 2)},
    "a table has fewer rows": {**_OLD, "b": (4, 2)},
    "a table was replaced": {"a": (6, 2), "c": (6, 2)},
    "nothing": _OLD,
}


@dataclass
class _Trainer:
    """Publisher of a stream that keeps its tables as of each version."""

    storage: Storage = field(default_factory=lambda: Storage("memory://"))
    encoding: Encoding = Encoding.F32

    def __post_init__(self) -> None:
        self.tables: dict[str, Tensor] = {}
        self.history: dict[int, dict[str, Tensor]] = {}
        self.writer = Writer(self.storage)

    def restart(self, sizes: Sizes) -> int:
        """Begin to train other tables, as a restarted job does, with a snapshot."""
        self.writer.claim = Writer(self.storage).claim
        self.tables = {name: torch.randn(size).round() for name, size in sizes.items()}
        return self._write("snapshot", {name: list(range(len(table))) for name, table in self.tables.items()})

    def train(self, *rows: int) -> int:
        ids = {name: [row % len(table) for row in rows] for name, table in self.tables.items()}
        ids = {name: sorted(set(each)) for name, each in ids.items()}
        for name, each in ids.items():
            self.tables[name][each] = torch.randn(len(each), self.tables[name].shape[1]).round()
        return self._write("delta", ids)

    def _write(self, kind: Any, ids: Mapping[str, list[int]]) -> int:
        rows = []
        for name, each in ids.items():
            table = self.tables[name]
            form = "all" if kind == "snapshot" else "gaps" if self.encoding.is_quantized else "list"
            block = Block(name, (0, len(table)), (0, table.shape[1]), len(each), form, self.encoding)
            listed = None if kind == "snapshot" else torch.tensor(each)
            rows.append(BlockRows.of(block, listed, encode_rows(table[each].clone(), self.encoding)))
        specs = {name: TableSpec(name, *table.shape, table.dtype) for name, table in self.tables.items()}
        entry: Manifest = self.writer.write(kind, rows, specs)
        self.history[entry.version] = {name: table.clone() for name, table in self.tables.items()}
        return entry.version

    def at(self, version: int | None) -> dict[str, Tensor]:
        """Return the tables as of the newest version up to ``version`` that is not a claim."""
        return self.history[max(each for each in self.history if version is not None and each <= version)]


def _model(sizes: Sizes, value: float = -1.0) -> dict[str, Tensor]:
    return {name: torch.full(size, value) for name, size in sizes.items()}


def _expected(model: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what ``model`` has to be after a version: the rows that both have, of tables of one width."""
    found = {name: table.clone() for name, table in model.items()}
    for name, table in found.items():
        if name in trained and trained[name].shape[1] == table.shape[1]:
            num_rows = min(len(table), len(trained[name]))
            table[:num_rows] = trained[name][:num_rows]
    return found


def _same(model: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return model.keys() == other.keys() and all(torch.equal(model[name], other[name]) for name in model)


def _fits(model: Sizes, stream: Sizes) -> bool:
    return all(model.get(name) == size for name, size in stream.items())


def _predictor(
    model: dict[str, Tensor], storage: Storage, rule: OnModelChange = "continue", **options: Any
) -> Predictor:
    return Predictor(ModelTarget(model, on_model_change=rule), storage, **options)


_PAIRS = [
    pytest.param(old, new, id=f"{what}{way}")
    for what, changed in _CHANGES.items()
    for way, old, new in [("", _OLD, changed), (", and back", changed, _OLD)]
]


@pytest.mark.parametrize(("before", "after"), _PAIRS)
def test_a_predictor_that_continues_has_the_rows_that_both_have(before: Sizes, after: Sizes) -> None:
    trainer = _Trainer()
    trainer.restart(before)
    model = _model(before)
    predictor = _predictor(model, trainer.storage)
    expected = _model(before)
    for step in (None, (1, 2), after, (0, 3), (5,), before, (2, 4)):
        if isinstance(step, dict):
            trainer.restart(step)
        elif step is not None:
            trainer.train(*step)  # type: ignore[misc]  mypy does not narrow the union
        predictor.sync()
        expected = _expected(expected, trainer.tables)
        assert _same(model, expected)
        known = {name: tuple(table.shape) for name, table in trainer.tables.items()}
        differing = {name for name, size in known.items() if before.get(name) != size} | (before.keys() - known)
        assert len(predictor.status().differences) == len(differing)
        assert all(any(repr(name) in text for text in predictor.status().differences) for name in differing)
        fitting = {name for name in known if name in before and before[name][1:] == known[name][1:]}
        assert set(predictor.status().left_out) == known.keys() - fitting
    assert predictor.status().resyncs == 0


@pytest.mark.parametrize(("before", "after"), _PAIRS)
def test_a_predictor_that_stops_serves_the_last_version_that_fits(before: Sizes, after: Sizes) -> None:
    trainer = _Trainer()
    last = trainer.restart(before)
    model = _model(before)
    predictor = _predictor(model, trainer.storage, "stop")
    predictor.sync()
    state, saved = predictor.state_dict(), {name: table.clone() for name, table in model.items()}
    versions = [trainer.restart(after), trainer.train(1, 2), trainer.train(4)]
    if _fits(before, after):
        assert predictor.sync() == versions[-1]
        assert _same(model, _expected(saved, trainer.tables))
        return
    restarted = _predictor(saved, trainer.storage, "stop")
    restarted.load_state_dict(state)
    for each, tables in ((predictor, model), (restarted, saved)):
        for _ in range(2):
            with pytest.raises(ModelMismatchError, match=f"version {versions[0]} does not fit: table ") as caught:
                each.sync()
            assert caught.value.version == versions[0]
            assert each.version == versions[0] - 1, "the claim"
            assert _same(tables, trainer.history[last])
        each.follow(poll_seconds=0.001)
        assert each.wait(last) == versions[0] - 1, "the thread runs"
        eventually(lambda each=each: isinstance(each.error, ModelMismatchError))
        assert str(versions[0]) in str(each.status().error)
        with pytest.raises(ModelMismatchError):
            each.stop()
    with pytest.raises(ModelMismatchError):
        _predictor(_model(before), trainer.storage, "stop").sync()
    again = trainer.restart(before)
    assert predictor.sync() == restarted.sync() == again
    assert _same(model, trainer.tables)
    assert _same(saved, trainer.tables)


@pytest.mark.parametrize(("before", "after"), _PAIRS)
@pytest.mark.parametrize("has_trained", [False, True])
@pytest.mark.parametrize("rule", ["stop", "continue"])
def test_a_changed_model_gets_no_delta_on_rows_that_it_lacks(
    before: Sizes, after: Sizes, has_trained: bool, rule: OnModelChange
) -> None:
    """A predictor restarts with its saved position, and with a model whose changed tables are new."""
    trainer = _Trainer()
    trainer.restart(before)
    old = _model(before)
    predictor = _predictor(old, trainer.storage, rule)
    predictor.sync()
    state = predictor.state_dict()
    trainer.train(1)
    if has_trained:
        trainer.restart(after)
    trainer.train(2)
    model = {name: old[name] if before.get(name) == size else torch.zeros(size) for name, size in after.items()}
    restarted = _predictor(model, trainer.storage, rule)
    restarted.load_state_dict(state)
    if rule == "stop" and not has_trained and not _fits(after, before):
        with pytest.raises(ModelMismatchError):
            restarted.sync()
        trainer.restart(after)
    restarted.sync()
    assert _same(model, _expected(model, trainer.tables))


@pytest.mark.parametrize("rule", ["stop", "continue"])
def test_a_table_that_is_replaced_while_a_predictor_runs_is_written_from_a_snapshot(rule: OnModelChange) -> None:
    trainer = _Trainer()
    trainer.restart(_OLD)
    model = _model(_OLD)
    predictor = _predictor(model, trainer.storage, rule)
    predictor.sync()
    trainer.train(1)
    model["b"] = torch.zeros(6, 4)
    if rule == "stop":
        with pytest.raises(ModelMismatchError):
            predictor.sync()
    else:
        predictor.sync()
        assert predictor.status().left_out == ("b",)
    trainer.train(2)
    model["b"] = torch.zeros(6, 2)
    predictor.sync()
    assert _same(model, trainer.tables)


@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.parametrize("rule", ["stop", "continue"])
def test_a_table_that_is_replaced_while_no_version_comes_is_noticed(rule: OnModelChange, is_pinned: bool) -> None:
    trainer = _Trainer()
    trainer.restart(_OLD)
    newest = trainer.train(1)
    model = _model(_OLD)
    predictor = _predictor(model, trainer.storage, rule, rollout=Rollout(follows_pins=is_pinned))
    if is_pinned:
        pin_version(trainer.storage, newest)
    predictor.sync()
    model["b"] = torch.zeros(4, 2)
    if rule == "stop":
        with pytest.raises(ModelMismatchError, match="table 'b'"):
            predictor.sync()
    else:
        assert predictor.sync() == newest
        assert _same(model, _expected(model, trainer.tables))
        assert "rows from 4 on are left out" in predictor.status().differences[0]
    model["b"] = torch.zeros(6, 2)
    assert predictor.sync() == newest
    assert _same(model, trainer.tables)
    num_rows = predictor.status().counts.rows
    model["b"] = model["b"].clone()  # a move of the model
    assert predictor.sync() == newest
    assert predictor.status().counts.rows == num_rows


def test_a_changed_model_has_no_version_while_a_canary_allows_no_snapshot() -> None:
    trainer = _Trainer()
    trainer.restart(_OLD)
    predictor = _predictor(_model(_OLD), trainer.storage)
    newest = predictor.sync()
    with predictor.reading() as served:
        assert served == (newest, None)
    changed = _predictor(_model({**_OLD, "b": (4, 2)}), trainer.storage, rollout=Rollout(canary=Canary(versions=9)))
    changed.load_state_dict(predictor.state_dict())
    with pytest.raises(NoSnapshotError):
        changed.sync()
    with changed.reading() as served:
        assert served == (None, None)


def test_a_restarted_predictor_of_the_same_model_reads_no_snapshot() -> None:
    trainer = _Trainer()
    trainer.restart({**_OLD, "b": (9, 2)})
    model = _model(_OLD)
    predictor = _predictor(model, trainer.storage)
    predictor.sync()
    state = predictor.state_dict()
    trainer.train(1)
    restarted = _predictor(model, trainer.storage)
    restarted.load_state_dict(state)
    restarted.sync()
    assert _same(model, _expected(model, trainer.tables))
    assert restarted.status().counts.rows == 2, "one of each table"
    with pytest.raises(InvalidArgumentError):
        restarted.load_state_dict({**state, "model": "[]"})
    older = {key: value for key, value in state.items() if key != "model"}
    restarted.load_state_dict(older)
    trainer.train(2)
    restarted.sync()
    assert restarted.status().counts.rows == 2 + 6 + 6 + 2 + 2, "without the tables of the position, it begins anew"


def test_a_changed_model_reaches_a_pin_from_a_snapshot() -> None:
    trainer = _Trainer()
    trainer.restart(_OLD)
    model = _model(_OLD)
    predictor = _predictor(model, trainer.storage, rollout=Rollout(follows_pins=True))
    predictor._reader.source.pins = PinReader(seconds=0.0)
    predictor.sync()
    pinned, _ = trainer.train(1), trainer.train(2)
    pin_version(trainer.storage, pinned)
    model["b"] = torch.zeros(4, 2)
    assert predictor.sync() == pinned
    assert _same(model, _expected(model, trainer.history[pinned]))


def test_a_pin_after_a_claim_is_reached_from_a_snapshot() -> None:
    trainer = _Trainer()
    trainer.restart(_OLD)
    model = _model(_OLD)
    predictor = _predictor(model, trainer.storage, rollout=Rollout(follows_pins=True))
    predictor._reader.source.pins = PinReader(seconds=0.0)
    predictor.sync()
    trainer.writer.claim = Writer(trainer.storage).claim  # of a restored trainer, which goes on with a delta
    pinned, _ = trainer.train(1), trainer.train(2)
    pin_version(trainer.storage, pinned)
    model["b"] = torch.zeros(4, 2)
    assert predictor.sync() == pinned
    assert _same(model, _expected(model, trainer.history[pinned]))


def test_a_position_that_is_saved_again_before_a_version_keeps_the_sizes() -> None:
    trainer = _Trainer()
    trainer.restart(_OLD)
    model = _model({"a": (6, 2)})
    first = _predictor(model, trainer.storage)
    first.sync()
    model["b"] = torch.zeros(6, 2)
    second, third = (_predictor(model, trainer.storage, "stop") for _ in range(2))
    second.load_state_dict(first.state_dict())
    third.load_state_dict(second.state_dict())
    third.sync()
    assert _same(model, trainer.tables)


def test_a_loaded_position_is_compared_at_the_url_that_can_be_read(tmp_path: Path) -> None:
    trainer = _Trainer(Storage(f"file://{tmp_path}/first", create=True))
    version = trainer.restart(_OLD)
    urls = [f"file://{tmp_path}/{name}" for name in ("first", "second")]
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    model = _model(_OLD)
    state = _predictor(model, trainer.storage)
    state.sync()
    model["b"] = torch.zeros(9, 2)
    restarted = Predictor(ModelTarget(model, on_model_change="continue"), urls)
    restarted.load_state_dict(state.state_dict())
    shutil.rmtree(tmp_path / "first")
    (tmp_path / "first").touch()  # the store cannot be read
    with contextlib.suppress(StorageError):
        restarted.sync()
    assert restarted.sync() == version
    assert _same(model, _expected(model, trainer.tables))


@pytest.mark.parametrize("has_raw_ids", [False, True])
def test_a_table_that_gets_or_loses_its_mapping_is_written_from_a_snapshot(has_raw_ids: bool) -> None:
    writer = Writer(Storage("memory://"), identity=Identity(100, (Bucket((0, 20), 5),)) if has_raw_ids else None)
    (name,) = writer.model()
    tables = {name: writer.spec, "other": TableSpec("other", 1, 1, torch.float32)}
    block = Block("other", (0, 1), (0, 1), 1, "all", Encoding.F32)
    writer.change([1])
    writer.write("snapshot", [*writer.blocks(None), BlockRows.of(block, None, torch.zeros(1, 1))], tables)
    model = {**writer.model(), "other": torch.zeros(1, 1)}
    mappings: list[dict[str, RawIdIndex]] = [{name: RawIdIndex(20)}, {}]
    first, second = [
        Predictor(ModelTarget(model, raw_ids=each, on_model_change="continue"), writer.storage)
        for each in (reversed(mappings) if has_raw_ids else mappings)
    ]
    first.sync()
    assert first.status().left_out == (name,)
    second.load_state_dict(first.state_dict())
    second.sync()
    assert torch.equal(model[name], writer.table)


def test_dense_tensors_that_are_now_applied_are_read_at_once() -> None:
    writer = Writer(Storage("memory://"))
    writer.dense = {"w": torch.randn(3)}
    writer.snapshot()
    model = {**writer.model(), "w": torch.zeros(3)}
    first, second = [
        Predictor(ModelTarget(model, dense=dense, on_model_change="continue"), writer.storage)
        for dense in (False, True)
    ]
    first.sync()
    second.load_state_dict(first.state_dict())
    second.sync()
    assert torch.equal(model["w"], writer.dense["w"])


def test_a_dense_tensor_that_the_stream_has_no_more_is_named() -> None:
    writer = Writer(Storage("memory://"))
    writer.dense = {"w": torch.randn(3)}
    writer.snapshot()
    model = {**writer.model(), "w": torch.zeros(3)}
    predictor = _predictor(model, writer.storage)
    predictor.sync()
    former, writer.dense = writer.dense["w"], {}
    writer.snapshot()
    predictor.sync()
    assert torch.equal(model["w"], former)
    (text,) = predictor.status().differences
    assert text == "dense tensor 'w' is missing in the stream but float32 [3] in the model: it keeps its values"
    del model["w"]
    writer.snapshot()
    predictor.sync()
    assert predictor.status().differences == ()


@pytest.mark.parametrize("rule", ["stop", "continue"])
def test_a_restarted_predictor_serves_its_rows_if_a_chosen_table_was_removed(rule: OnModelChange) -> None:
    trainer = _Trainer()
    version = trainer.restart(_OLD)
    model = _model(_OLD)
    first, second = (_predictor(model, trainer.storage, rule, tables=["a", "b"]) for _ in range(2))
    first.sync()
    before = trainer.at(version)
    trainer.restart({"a": (6, 2)})
    with pytest.raises(InvalidArgumentError, match="tables='b'"):
        first.sync()
    second.load_state_dict(first.state_dict())
    second.follow()
    eventually(lambda: isinstance(second.error, InvalidArgumentError))
    with pytest.raises(InvalidArgumentError, match="tables='b'"):
        second.stop()
    assert _same(model, before)
    trainer.restart(_OLD)
    last = trainer.train(1)
    assert first.sync() == last, "it continues with a snapshot that has the table again"
    assert _same(model, trainer.tables)


def test_heartbeats_metrics_and_commands_name_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer, monitor = _Trainer(Storage(tmp_path.as_uri())), Monitor()
    trainer.restart(_OLD)
    rules: list[OnModelChange] = ["continue", "stop"]
    predictors = {
        rule: _predictor(_model(_OLD), trainer.storage, rule, name=f"p-{rule}", monitor=monitor) for rule in rules
    }
    for each in predictors.values():
        each.sync()
    version = trainer.restart({**_OLD, "b": (6, 4)})
    for each in predictors.values():
        each.follow(poll_seconds=0.01)
    stop = predictors["stop"]
    eventually(lambda: isinstance(stop.error, ModelMismatchError) and predictors["continue"].version == version)
    what = "table 'b' is 6 x 4 float32 in the stream but 6 x 2 float32 in the "

    def beats() -> dict[str, Heartbeat]:
        return {each.name: each for each in read_heartbeats(trainer.storage)}

    eventually(lambda: what in beats()["p-continue"].differences and what in (beats()["p-stop"].error or ""))
    assert f"version {version} does not fit: {what}" in str(beats()["p-stop"].error)
    assert "on_model_change='continue'" in beats()["p-stop"].next_step
    main(["fleet", trainer.storage.url])
    shown = capsys.readouterr().out
    for name in ("p-continue", "p-stop"):
        assert re.search(f"^{name}.*{re.escape(what)}", shown, re.MULTILINE)
    figures = Figures(monitor)
    assert [figures.of("model_differences", predictor=f"p-{rule}") for rule in rules] == [1, 0]
    assert figures.of("follow_errors", predictor="p-stop", reason="ModelMismatchError") > 0
    (notice,) = [each for each in predictor_notices(_seen(trainer)) if what in each.what and "p-continue" in each.what]
    assert notice.level == "warning"
    predictors["continue"].stop()
    with pytest.raises(ModelMismatchError):
        stop.stop()
    assert predictor_notices(_seen(trainer)) == [], "both were stopped"


def _seen(trainer: _Trainer) -> list[SeenPredictor]:
    found, _ = read_predictors(trainer.storage, trainer.writer.claim.head, StoreClock(), order=None)
    return found


def test_a_predictor_without_a_table_of_the_stream_is_refused() -> None:
    trainer = _Trainer()
    trainer.restart(_OLD)
    with pytest.raises(ModelMismatchError, match="missing in the predictor's model"):
        _predictor(_model({"other": (6, 2)}), trainer.storage).sync()


def test_a_rule_must_be_one_of_two() -> None:
    with pytest.raises(InvalidArgumentError, match=r"Pass one of \('stop', 'continue'\)"):
        ModelTarget(_model(_OLD), on_model_change="resync")  # type: ignore[arg-type]  this is the test


def test_another_encoding_is_no_change() -> None:
    trainer = _Trainer()
    trainer.restart(_OLD)
    model = _model(_OLD)
    predictor = _predictor(model, trainer.storage, "stop")
    predictor.sync()
    trainer.encoding = Encoding.INT8
    trainer.restart(_OLD)
    trainer.train(1, 2)
    predictor.sync()
    for name, table in trainer.tables.items():
        torch.testing.assert_close(model[name], table, atol=0.05, rtol=0)
    assert predictor.status().differences == ()


def test_dense_tensors_that_differ_are_left_out() -> None:
    trainer = _Trainer()
    trainer.writer.dense = {"w": torch.ones(3), "v": torch.ones(2)}
    trainer.restart(_OLD)
    model = {**_model(_OLD), "w": torch.zeros(4), "v": torch.zeros(2)}
    predictor = _predictor(model, trainer.storage)
    predictor.sync()
    assert (model["w"].sum(), model["v"].sum()) == (0, 2)
    text = "dense tensor 'w' is float32 [3] in the stream but float32 [4] in the model: it is left out"
    assert predictor.status().differences == (text,)
    assert predictor.status().left_out == ("w",)
    trainer.writer.dense = {"w": torch.ones(4), "v": torch.zeros(2)}
    trainer.train(1)  # a delta has all of a dense tensor
    predictor.sync()
    assert (model["w"].sum(), model["v"].sum()) == (4, 0)
    assert predictor.status().differences == ()


@pytest.mark.parametrize("num_rows", [6, 8])
def test_a_table_with_raw_ids_fits_as_a_whole_or_not_at_all(num_rows: int) -> None:
    writer = Writer(Storage("memory://"), num_rows=6, identity=Identity(100, (Bucket((0, 6), 5),)))
    writer.change([1])
    writer.snapshot()
    (name,) = writer.model()
    model = {name: torch.zeros(num_rows, 4), "other": torch.zeros(1, 1)}
    index = RawIdIndex(num_rows)
    predictor = Predictor(ModelTarget(model, raw_ids={name: index}, on_model_change="continue"), writer.storage)
    if num_rows == 6:
        predictor.sync()
        assert torch.equal(model[name], writer.table)
    else:
        with pytest.raises(ModelMismatchError):
            predictor.sync()


def test_a_canary_and_a_pin_across_a_change() -> None:
    trainer = _Trainer()
    first = trainer.restart(_OLD)
    new: Sizes = {**_OLD, "b": (6, 4)}
    before = trainer.train(1)
    trainer.restart(new)
    model = _model(_OLD)
    canary = _predictor(model, trainer.storage, "stop", rollout=Rollout(canary=Canary(versions=2)))
    assert canary.sync() in (first, before), "a canary meets the change later"
    assert _same(model, trainer.at(canary.version))
    pin_version(trainer.storage, before)
    rollout = Rollout(follows_pins=True)
    old = _predictor(_model(_OLD), trainer.storage, "stop", rollout=rollout)
    old.follow()
    assert old.wait(before, timeout=60) == before, "a predictor of the old model begins at the pin"
    old.stop()
    model = _model(new)
    with pytest.raises(ModelMismatchError):
        _predictor(model, trainer.storage, "stop", rollout=rollout).sync()
    assert _same(model, _model(new)), "nothing was written"
    released = trainer.restart(new)
    release_pin(trainer.storage)
    assert _predictor(model, trainer.storage, "stop", rollout=rollout).sync() == released
    assert _same(model, trainer.tables)
    with pytest.raises(ModelMismatchError):
        _predictor(_model(_OLD), trainer.storage, "stop", rollout=rollout).sync()


@pytest.mark.parametrize("rule", ["stop", "continue"])
def test_a_change_is_the_same_at_all_urls(tmp_path: Path, rule: OnModelChange) -> None:
    trainer = _Trainer(Storage(f"file://{tmp_path}/first", create=True))
    trainer.restart(_OLD)
    urls = [f"file://{tmp_path}/{name}" for name in ("first", "second")]
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    model = _model(_OLD)
    predictor = Predictor(ModelTarget(model, on_model_change=rule), urls)
    predictor.sync()
    before = trainer.history[max(trainer.history)]
    changed = trainer.restart({**_OLD, "b": (9, 2)})
    shutil.copytree(tmp_path / "first", tmp_path / "second", dirs_exist_ok=True)
    for _ in range(3):
        if rule == "continue":
            assert predictor.sync() == changed
            continue
        with pytest.raises(ModelMismatchError):
            predictor.sync()
        assert _same(model, before)
    assert rule == "stop" or _same(model, _expected(model, trainer.tables))


def test_a_part_of_a_changed_table_is_applied_to_a_shard() -> None:
    """A predictor that holds some rows of a table, as on one of several ranks."""
    trainer = _Trainer()
    trainer.restart({"a": (9, 2), "b": (6, 2)})
    rows = torch.full((3, 2), -1.0)
    shard = TensorTarget(6, 2, torch.float32, [Region((3, 6), (0, 2), rows)])
    predictor = Predictor(ModelTarget({"a": shard}, on_model_change="continue"), trainer.storage)
    predictor.sync()
    trainer.train(1, 4, 7)
    predictor.sync()
    assert torch.equal(rows, trainer.tables["a"][3:6])
    trainer.restart({"a": (5, 2)})
    before = rows.clone()
    predictor.sync()
    assert torch.equal(rows, torch.cat([trainer.tables["a"][3:5], before[2:]]))


@pytest.mark.parametrize("num_rows", [6, 8])
@pytest.mark.parametrize("has_mapping", [False, True])
@pytest.mark.parametrize("has_raw_ids", [False, True])
def test_what_fits_of_a_table_with_raw_ids(num_rows: int, has_mapping: bool, has_raw_ids: bool) -> None:
    table = TableSpec("a", 6, 2, torch.float32)
    identities = {"a": Identity(100, (Bucket((0, 6), 5),))} if has_raw_ids else {}
    entry = Manifest(
        stream="",
        generation=0,
        writer="",
        version=0,
        kind="snapshot",
        created=0.0,
        tables={"a": table},
        identities=identities,
    )
    found = fit(entry, {"a": replace(table, num_rows=num_rows)}, {}, {"a"} if has_mapping else ())
    is_equal = num_rows == 6 and has_mapping == has_raw_ids
    assert ("a" in found.tables) == (is_equal or not (has_mapping or has_raw_ids))
    assert bool(found.differences) != is_equal
    assert found.narrowed(entry).tables == dict(found.tables)


def test_a_rollback_across_a_change_continues() -> None:
    trainer = _Trainer()
    trainer.restart(_OLD)
    before = trainer.train(1)
    trainer.restart({**_OLD, "b": (9, 2)})
    trainer.train(3)
    model = _model(_OLD)
    predictor = _predictor(model, trainer.storage)
    predictor.sync()
    predictor.rollback(before)
    assert _same(model, trainer.history[before])
    assert predictor.status().differences == ()
    predictor.release()
    predictor.sync()
    assert _same(model, _expected(model, trainer.tables))
    assert len(predictor.status().differences) == 1


def test_a_row_store_stops_at_a_change() -> None:
    trainer = _Trainer()
    trainer.restart(_OLD)
    predictor = Predictor(MemorySink(Stored()), trainer.storage)
    predictor.sync()
    changed = trainer.restart({**_OLD, "c": (4, 2)})
    with pytest.raises(ModelMismatchError, match="Pass a row store with another prefix"):
        predictor.sync()
    assert predictor.version == changed - 1
    with pytest.raises(InvalidArgumentError):
        ModelTarget(MemorySink(Stored()), on_model_change="continue")  # type: ignore[arg-type]  this is the test


def test_a_row_store_waits_for_the_only_table_of_its_choice() -> None:
    storage = Storage("memory://")

    def publish(*tables: str) -> int:
        model = nn.ModuleDict({"top": nn.Linear(2, 1), **{name: nn.Embedding(3, 2) for name in tables}})
        with Publisher(ModelDeltaTracker(model), storage, dense=model) as publisher:
            return publisher.snapshot().version

    publish("item", "table")
    predictor = Predictor(MemorySink(Stored()), storage, tables=["t*"])
    predictor.sync()
    publish("item")
    with pytest.raises(MissingTableError, match="a row store has no dense tensors"):
        predictor.sync()
    last = publish("item", "table")
    assert predictor.sync() == last


@pytest.mark.parametrize("has_position", [False, True])
def test_a_version_that_does_not_fit_hides_no_promoted_mirror(has_position: bool) -> None:
    trainer, mirror, model = _Trainer(), Storage("memory://"), _model(_OLD)
    first, restarted = (
        _predictor(model, trainer.storage, "stop"),
        Predictor(ModelTarget(model), [trainer.storage, mirror]),
    )
    trainer.restart(_OLD)
    first.sync()
    copier = Mirror(trainer.storage, mirror)
    while copier.step():
        pass
    trainer.restart({"a": (6, 2), "b": (9, 2)})
    if has_position:
        restarted.load_state_dict(first.state_dict())
    with pytest.raises(ModelMismatchError):
        restarted.sync()
    assert (restarted.version is not None) == has_position, "it begins at a lagging mirror"
    promote(mirror)
    promoted = _Trainer(mirror)
    version = promoted.restart(_OLD)
    restarted = Predictor(ModelTarget(model), [trainer.storage, mirror])
    if has_position:
        restarted.load_state_dict(first.state_dict())
    assert restarted.sync() == version
    assert _same(model, promoted.tables)


_SIZES = st.fixed_dictionaries(
    {"a": st.sampled_from([(6, 2), (4, 2), (8, 2), (6, 3)])},
    optional={"b": st.sampled_from([(6, 2), (4, 2), (6, 3)]), "c": st.just((3, 2))},
)


class _World:
    """A trainer and a predictor, of which one is changed at each step."""

    def __init__(self, first: Sizes, own: Sizes, rule: OnModelChange) -> None:
        self.trainer, self.model, self._rule = _Trainer(), _model(own), rule
        self.trainer.restart(first)
        self._predictor = _predictor(self.model, self.trainer.storage, rule)
        self._fresh = itertools.count(100.0)

    def restart_trainer(self, sizes: Sizes) -> None:
        self.trainer.restart(sizes)

    def train(self, row: int) -> None:
        self.trainer.train(row, row + 1)

    def compact(self, _: int) -> None:
        compact(self.trainer.storage)

    def restart_predictor(self, sizes: Sizes | int) -> None:
        """Restart with the saved position and tables, and with new ones where the sizes changed.

        A position is saved after a call of ``sync``, because it is not compared with the tables before.
        """
        self.sync(0)
        state = self._predictor.state_dict()
        if not isinstance(sizes, int):
            kept = {name: table for name, table in self.model.items() if sizes.get(name) == tuple(table.shape)}
            self.model = {name: kept.get(name, self._new(size)) for name, size in sizes.items()}
        self._predictor = _predictor(self.model, self.trainer.storage, self._rule)
        self._predictor.load_state_dict(state)

    def replace_tables(self, sizes: Sizes) -> None:
        """Replace tables in place, which the predictor notices at the next version, unless they have the same size."""
        for name, size in sizes.items():
            if name in self.model and tuple(self.model[name].shape) != size:
                self.model[name] = self._new(size)
        self.trainer.train(0)
        self.sync(0)

    def sync(self, _: int) -> None:
        before = {name: table.clone() for name, table in self.model.items()}
        try:
            self._predictor.sync()
        except ModelMismatchError:
            fitting = [name for name, table in self.trainer.tables.items() if self._is_as_wide(name, table)]
            assert self._rule == "stop" or not fitting
            return
        assert self._predictor.version == self.trainer.writer.claim.head.version
        assert _same(self.model, _expected(self.model, self.trainer.tables)), "the rows that both have"
        for name, table in self.model.items():
            known = [each[name] for each in self.trainer.history.values() if self._is_as_wide(name, each.get(name))]
            for number, row in enumerate(table):
                sources = [each[number] for each in (before[name], *known) if number < len(each)]
                assert any(torch.equal(row, each) for each in sources), "a row of a version, or as it was"

    def _new(self, size: tuple[int, ...]) -> Tensor:
        return torch.full(size, next(self._fresh))

    def _is_as_wide(self, name: str, table: Tensor | None) -> bool:
        return table is not None and name in self.model and table.shape[1] == self.model[name].shape[1]


_STEPS = st.one_of(
    st.tuples(st.just(_World.restart_trainer), _SIZES),
    st.tuples(st.just(_World.train), st.integers(0, 7)),
    st.tuples(st.just(_World.sync), st.just(0)),
    st.tuples(st.just(_World.restart_predictor), st.one_of(st.just(0), _SIZES)),
    st.tuples(st.just(_World.replace_tables), _SIZES),
    st.tuples(st.just(_World.compact), st.just(0)),
)


@pytest.mark.sweep("short")
@given(first=_SIZES, own=_SIZES, rule=st.sampled_from(["stop", "continue"]), steps=st.lists(_STEPS, max_size=12))
@settings(max_examples=300 if SWEEPS_ARE_WHOLE else 40, deadline=None)
def test_random_changes_give_the_rows_of_the_version_or_a_typed_error(
    first: Sizes, own: Sizes, rule: OnModelChange, steps: list[tuple[Any, Any]]
) -> None:
    world = _World(first, own, rule)
    for step, argument in [*steps, (_World.sync, 0)]:
        step(world, argument)
