"""The gate: which versions it holds, how they are accepted, and how a predictor skips them."""

from __future__ import annotations

import gc
import logging
import math
import weakref

import pytest
import torch

from delta_tracker import Predictor, Rollout
from delta_tracker.errors import HeldVersionError, InvalidArgumentError, MissingVersionError, StorageError
from delta_tracker.predictor import version_writer as version_writer_module
from delta_tracker.predictor.gate import Gate
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Block, Manifest, entry_name
from delta_tracker.stream.format.part_reader import Contents
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.storage.storage import Storage
from tests.predictor.serving import eventually
from tests.raised import frames_of_each, has_frames
from tests.stores.rules import fails, reads
from tests.stores.wrapped import WrappedStorage
from tests.stream.streams import FQN, Writer

_ROWS = 40
_EVERY = list(range(_ROWS))


@pytest.fixture
def writer() -> Writer:
    writer = Writer(WrappedStorage(Storage("memory://")), num_rows=_ROWS)
    writer.table.fill_(1.0)
    writer.dense["w"] = torch.zeros(3)
    return writer


def publish(writer: Writer, kind: str, value: float, num_rows: int = _ROWS) -> Manifest:
    """Publish a version whose rows all have this value."""
    writer.table[:num_rows] = value
    return writer.write(kind, [writer.rows(None if kind == "snapshot" else list(range(num_rows)))])


def predictor_of(writer: Writer, **bounds) -> tuple[Predictor, dict[str, torch.Tensor]]:
    model = writer.model() | {"w": torch.full((3,), -1.0)}
    return Predictor(model, writer.storage, rollout=Rollout(gate=Gate(**{"min_rows": 10} | bounds))), model


@pytest.mark.parametrize(
    "bounds", [{"max_drift": 0}, {"max_drift": -1.0}, {"max_drift": math.nan}, {"max_drift": math.inf}, {"min_rows": 0}]
)
def test_a_gate_checks_itself(bounds: dict[str, float]) -> None:
    with pytest.raises(InvalidArgumentError):
        Gate(**bounds)


@pytest.mark.parametrize("kind", ["snapshot", "delta"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["row", "dense"])
def test_versions_with_non_finite_values_are_held(writer: Writer, kind: str, value: float, place: str, caplog) -> None:
    good = writer.snapshot().version
    predictor, model = predictor_of(writer)
    predictor.sync()
    before = {name: tensor.clone() for name, tensor in model.items()}
    if place == "row":
        writer.table[7, 2] = value
    else:
        writer.dense["w"][1] = value
    bad = writer.write(kind, [writer.rows(None if kind == "snapshot" else [3, 7])])
    writer.storage.take()
    for _ in range(3):
        with pytest.raises(HeldVersionError, match="NaN or infinite") as caught:
            predictor.sync()
        assert caught.value.version == bad.version
        assert (FQN if place == "row" else "'w'") in caught.value.reason
    assert predictor.version == good
    assert all(torch.equal(model[name], tensor) for name, tensor in before.items())
    assert (type(predictor.error), str(predictor.error)) == (HeldVersionError, str(caught.value))
    assert predictor.status().error == f"HeldVersionError: {caught.value}"
    with predictor.reading() as served:
        assert served == (good, None)
    alarms = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [alarm.getMessage() for alarm in alarms] == [
        f"version {bad.version} is held back by the gate: {caught.value.reason}"
    ]
    assert writer.storage.count(name=bad.parts[0].name) == 1, "it is not read again and again"
    predictor.accept(bad.version)
    assert predictor.sync() == bad.version
    assert torch.equal(model[FQN].view(torch.int32), writer.table.view(torch.int32))
    assert torch.equal(model["w"].view(torch.int32), writer.dense["w"].view(torch.int32))
    assert predictor.error is None


def test_the_check_for_finite_values_can_be_disabled(writer: Writer) -> None:
    writer.snapshot()
    predictor, model = predictor_of(writer, non_finite=False)
    writer.table[7] = math.nan
    last = writer.write("delta", [writer.rows([7])])
    assert predictor.sync() == last.version
    assert model[FQN][7].isnan().all()


@pytest.mark.parametrize("kind", ["snapshot", "delta"])
@pytest.mark.parametrize(
    ("sizes", "held"),
    [
        ([1.0, 1.49], None),
        ([1.0, 1.51], 1),
        ([1.0, 0.67], None),
        ([1.0, 0.66], 1),
        ([1.0, 1.4, 1.9, 2.8], None),  # each is compared with the one before
        ([1.0, 1.4, 2.2], 2),
        ([0.0, 0.0], None),
        ([0.0, 1e-30], 1),
        ([1.0, 0.0], 1),
        ([1.0, -1.0], None),
    ],
)
def test_drift_is_relative_to_the_previous_version_of_the_same_kind(
    writer: Writer, kind: str, sizes: list[float], held: int | None
) -> None:
    publish(writer, "snapshot", 1e9 if kind == "delta" else sizes[0])
    predictor, _ = predictor_of(writer, max_drift=0.5)
    predictor.sync()
    versions = []
    for number, size in enumerate(sizes[kind == "snapshot" :], start=kind == "snapshot"):
        versions.append(publish(writer, kind, size).version)
        if number == held:
            with pytest.raises(HeldVersionError, match=f"size of the rows of table '{FQN}'") as caught:
                predictor.sync()
            assert caught.value.version == versions[-1]
        else:
            assert predictor.sync() == versions[-1]


def test_few_rows_are_not_measured(writer: Writer) -> None:
    writer.snapshot()
    predictor, _ = predictor_of(writer, max_drift=0.5, min_rows=10)
    publish(writer, "delta", 1.0, num_rows=10)
    publish(writer, "delta", 100.0, num_rows=9)
    predictor.sync()
    publish(writer, "delta", 100.0, num_rows=10)
    with pytest.raises(HeldVersionError, match="from 2 to 200"):
        predictor.sync()


def test_the_measure_does_not_depend_on_the_columns_of_a_block(writer: Writer) -> None:
    """Another trainer may shard the same table by columns."""
    publish(writer, "snapshot", 3.0)
    predictor, model = predictor_of(writer, max_drift=0.01)
    predictor.sync()
    blocks = [Block(FQN, (0, _ROWS), columns, _ROWS, "all", Encoding.F32) for columns in ((0, 1), (1, 4))]
    last = writer.write(
        "snapshot", [BlockRows.of(block, None, writer.table[:, slice(*block.columns)]) for block in blocks]
    )
    assert predictor.sync() == last.version
    assert torch.equal(model[FQN], writer.table)


def test_acceptance_is_for_one_version_and_moves_the_baseline(writer: Writer) -> None:
    publish(writer, "snapshot", 1.0)
    predictor, _ = predictor_of(writer, max_drift=0.5)
    publish(writer, "delta", 1.0)
    jump = publish(writer, "delta", 9.0)
    predictor.accept(jump.version)  # before it is published
    follows = publish(writer, "delta", 10.0)
    assert predictor.sync() == follows.version
    back = publish(writer, "delta", 1.0)
    with pytest.raises(HeldVersionError, match="from 20 to 2"):
        predictor.sync()
    predictor.accept(back.version)
    predictor.sync()
    predictor.rollback(back.version)
    predictor.release()
    again = publish(writer, "delta", 90.0)
    predictor.accept(back.version)
    with pytest.raises(HeldVersionError):
        predictor.sync()
    assert predictor.version == back.version == again.version - 1


@pytest.mark.parametrize("version", [1, 3])
def test_a_rollback_moves_the_baseline_back(writer: Writer, version: int) -> None:
    publish(writer, "snapshot", 1.0)
    for size in (1.0, 1.2, 1.6, 2.2, 3.0):
        last = publish(writer, "delta", size)
    predictor, _ = predictor_of(writer, max_drift=0.5)
    predictor.sync()
    predictor.rollback(version)
    predictor.release()
    assert predictor.sync() == last.version, "the next one is not measured by 3.0"


def test_an_accepted_version_is_held_again_after_a_rollback(writer: Writer) -> None:
    publish(writer, "snapshot", 1.0)
    predictor, _ = predictor_of(writer)
    bad = publish(writer, "delta", math.nan)
    predictor.accept(bad.version)
    assert predictor.sync() == bad.version
    predictor.rollback(1)
    predictor.release()
    with pytest.raises(HeldVersionError):
        predictor.sync()
    assert predictor.version == 1


def test_nothing_is_accepted_without_a_gate(writer: Writer) -> None:
    with pytest.raises(InvalidArgumentError, match="gate"):
        Predictor(writer.model(), writer.storage).accept(3)


@pytest.mark.advice("HeldVersionError: GateKeeper._hold")
def test_following_waits_for_acceptance(writer: Writer, caplog) -> None:
    publish(writer, "snapshot", 1.0)
    predictor, model = predictor_of(writer)
    predictor.follow(poll_seconds=0.001)
    eventually(lambda: predictor.version == 1)
    bad = publish(writer, "delta", math.inf)
    eventually(lambda: predictor.error is not None)
    last = publish(writer, "delta", 2.0)
    assert predictor.version == 1
    assert predictor.status().lag_versions == 2
    predictor.accept(bad.version)
    eventually(lambda: predictor.version == last.version and predictor.error is None)
    predictor.stop()
    assert torch.equal(model[FQN], writer.table)
    assert predictor.status().resyncs == 0
    assert sum("held back" in record.message for record in caplog.records) == 1
    assert "recovered at version" in caplog.text


@pytest.mark.advice("HeldVersionError: GateKeeper._hold")
@pytest.mark.parametrize("is_following", [False, True])
def test_a_newer_good_snapshot_skips_a_held_version(writer: Writer, is_following: bool, caplog) -> None:
    publish(writer, "snapshot", 1.0)
    predictor, model = predictor_of(writer)
    predictor.sync()
    bad = publish(writer, "delta", math.nan)
    publish(writer, "snapshot", math.nan)
    with pytest.raises(HeldVersionError) as caught:
        predictor.sync()
    assert caught.value.version == bad.version, "a held snapshot leads nowhere"
    if is_following:
        predictor.follow(poll_seconds=0.001)
        eventually(lambda: predictor.error is not None)
    publish(writer, "delta", 5.0)
    publish(writer, "snapshot", 6.0)
    last = publish(writer, "delta", 7.0)
    if is_following:
        eventually(lambda: predictor.version == last.version and predictor.error is None)
        predictor.stop()
    else:
        assert predictor.sync() == last.version
    assert torch.equal(model[FQN], writer.table)
    status = predictor.status()
    assert (status.resyncs, status.error) == (1, None)
    assert status.last_resync.startswith(f"version 1 to {last.version - 1}: HeldVersionError: version {bad.version}")
    assert f"resync of {writer.storage.url} from version 1 to {last.version - 1}" in caplog.text


def test_a_held_version_can_be_skipped_again_after_a_rollback(writer: Writer) -> None:
    good = publish(writer, "snapshot", 1.0)
    publish(writer, "delta", math.nan)
    last = publish(writer, "snapshot", 2.0)
    predictor, model = predictor_of(writer)
    predictor.sync()
    for _ in range(2):
        predictor.rollback(good.version)
        assert model[FQN].eq(1.0).all()
        predictor.release()
        assert predictor.sync() == last.version
        assert torch.equal(model[FQN], writer.table)


def test_merged_versions_do_not_skip_a_held_one(writer: Writer) -> None:
    """A mean over more rows would hide the jump."""
    publish(writer, "snapshot", 1.0)
    predictor, _ = predictor_of(writer, max_drift=0.5)
    publish(writer, "delta", 1.0)
    predictor.sync()
    bad = publish(writer, "delta", 1.6, num_rows=10)
    writer.table[10:] = 1.0
    writer.write("delta", [writer.rows(_EVERY[10:])])
    merged = compact(writer.storage, fold=1e9)
    assert (merged.kind, merged.version) == ("delta", bad.version + 1)
    with pytest.raises(HeldVersionError) as caught:
        predictor.sync()
    assert caught.value.version == bad.version


def test_a_new_predictor_starts_below_a_held_snapshot(writer: Writer) -> None:
    publish(writer, "snapshot", 1.0)
    good = publish(writer, "delta", 2.0)
    bad = publish(writer, "snapshot", math.nan)
    predictor, model = predictor_of(writer)
    with pytest.raises(HeldVersionError) as caught:
        predictor.sync()
    assert caught.value.version == bad.version
    assert predictor.version == good.version
    assert model[FQN].eq(2.0).all()


def test_the_error_and_the_status_name_the_same_version(writer: Writer) -> None:
    publish(writer, "snapshot", math.nan)
    newest = publish(writer, "snapshot", math.nan)
    predictor, _ = predictor_of(writer)
    for _ in range(2):
        with pytest.raises(HeldVersionError) as caught:
            predictor.sync()
        assert caught.value.version == newest.version
        assert predictor.status().error == f"HeldVersionError: {caught.value}"
    predictor.accept(newest.version)
    assert predictor.sync() == newest.version
    assert predictor.error is None


def test_acceptance_survives_a_failing_store(writer: Writer) -> None:
    publish(writer, "snapshot", 1.0)
    predictor, _ = predictor_of(writer)
    predictor.sync()
    bad = publish(writer, "delta", math.nan)
    predictor.accept(bad.version)
    with writer.storage.under(fails(reads)), pytest.raises(StorageError):
        predictor.sync()
    assert predictor.sync() == bad.version


def test_a_held_version_is_not_kept_in_memory(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[weakref.ref[Contents]] = []

    class Watched(Contents):
        def __init__(self, *args, **kwargs) -> None:
            read.append(weakref.ref(self))
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(version_writer_module, "Contents", Watched)
    publish(writer, "snapshot", 1.0)
    predictor, _ = predictor_of(writer)
    predictor.sync()
    for _ in range(3):
        publish(writer, "snapshot", math.nan)
        publish(writer, "delta", math.nan)
        lengths = frames_of_each(predictor.sync, HeldVersionError)
        assert len(set(lengths[1:])) == 1, lengths
    gc.collect()
    assert len(read) == 4, "the four snapshots, each once"
    assert [each() for each in read] == [None] * 4
    assert not has_frames(predictor.error)


@pytest.mark.parametrize("way_out", ["accept the version", "accept the merged entry", "snapshot"])
def test_no_merged_entry_replaces_a_held_version_that_retention_has_deleted(writer: Writer, way_out: str) -> None:
    publish(writer, "snapshot", 1.0)
    predictor, model = predictor_of(writer, max_drift=0.5)
    predictor.sync()
    bad = publish(writer, "delta", math.nan)
    with pytest.raises(HeldVersionError):
        predictor.sync()
    for value in (1.0, 1.1):
        publish(writer, "delta", value)
    compact(writer.storage, fold=1e-9)
    writer.storage.delete(entry_name(bad.version))
    with pytest.raises((HeldVersionError, MissingVersionError)):
        predictor.sync()
    assert predictor.version == bad.version - 1
    if way_out == "snapshot":
        writer.snapshot()
    else:  # the log names the merged entry, the error before it the version
        predictor.accept(bad.version if way_out == "accept the version" else bad.version + 2)
    predictor.sync()
    assert torch.equal(model[FQN], writer.table)
