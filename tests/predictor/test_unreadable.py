"""A predictor resyncs past a single object that cannot be read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from delta_tracker import Predictor
from delta_tracker.errors import NoSnapshotError, StorageError
from delta_tracker.stream.format.manifest import entry_name
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.storage.storage import Storage
from tests.predictor.serving import eventually
from tests.predictor.waits import shorten_waits
from tests.stores.rules import fails, on
from tests.stores.wrapped import WrappedStorage
from tests.stream.streams import FQN, Writer


def _make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _make_loop(path: Path) -> None:
    """Make a link to itself: opening it fails with another error than "not found", also for root."""
    path.unlink()
    path.symlink_to(path)


_OBJECTS: dict[str, Callable[[Writer, int], str]] = {
    "entry": lambda writer, version: entry_name(version),
    "part": lambda writer, version: next(
        name for name in writer.storage.names("parts") if name.startswith(f"parts/{version:020d}-")
    ),
}
_KINDS = pytest.mark.parametrize("kind", _OBJECTS)


def _synced(predictor: Predictor, num_times: int) -> list[type[Exception] | None]:
    found: list[type[Exception] | None] = []
    for _ in range(num_times):
        try:
            predictor.sync()
        except StorageError as error:
            found.append(type(error))
        else:
            found.append(None)
    return found


@pytest.mark.parametrize(("harm", "kind"), [(_make_pipe, "entry"), (_make_pipe, "part"), (_make_loop, "part")])
@pytest.mark.parametrize("way", ["snapshot", "merged"])
def test_a_newer_version_skips_an_object_that_cannot_be_read(
    tmp_path: Path, harm: Callable[[Path], None], kind: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_waits(monkeypatch, back_off_seconds=0.002)
    writer = Writer(Storage(f"file://{tmp_path}", create=True, fsync=False))
    writer.snapshot()
    models = [writer.model(), writer.model()]
    stepped, followed = (Predictor(model, writer.storage) for model in models)
    for predictor in (stepped, followed):
        assert predictor.sync() == 1
    for row in range(3):
        writer.delta([row])
    if way == "merged":
        compact(writer.storage, fold=1e9)
    harm(tmp_path / _OBJECTS[kind](writer, 2))
    if way == "snapshot":
        assert _synced(stepped, 5) == [StorageError] * 5, "nothing leads past it yet"
        writer.snapshot()
        assert _synced(stepped, 1) == [None]
    else:
        assert _synced(stepped, 3) == [StorageError, StorageError, None]
    followed.follow(poll_seconds=0.001)
    eventually(lambda: followed.version == writer.claim.head.version)
    followed.stop()
    for predictor, model in zip((stepped, followed), models, strict=True):
        status = predictor.status()
        assert (status.version, status.resyncs, status.error) == (writer.claim.head.version, 1, None)
        assert ": StorageError: " in status.last_resync
        assert torch.equal(model[FQN], writer.table)


@_KINDS
def test_a_new_predictor_starts_from_an_older_snapshot(tmp_path: Path, kind: str) -> None:
    writer = Writer(Storage(f"file://{tmp_path}", create=True, fsync=False))
    writer.snapshot()
    writer.delta([4])
    before = writer.table.clone()
    newest = writer.snapshot().version
    writer.delta([5])
    _make_pipe(tmp_path / _OBJECTS[kind](writer, newest))
    model = writer.model()
    predictor = Predictor(model, writer.storage)
    assert _synced(predictor, 2) == [StorageError] * 2
    assert predictor.version is None, "it may be over soon"
    assert _synced(predictor, 3) == [StorageError] * 3, "what comes after it cannot be applied"
    assert predictor.version == newest - 1
    assert torch.equal(model[FQN], before)
    writer.snapshot()
    assert _synced(predictor, 1) == [None]
    assert torch.equal(model[FQN], writer.table)


def test_a_newest_entry_that_cannot_be_read_hides_no_snapshot() -> None:
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    writer.delta([4])
    before = writer.table.clone()
    writer.delta([5])
    view = WrappedStorage(writer.storage, fails(on(name=entry_name(3))))
    model = writer.model()
    predictor = Predictor(model, view)
    assert _synced(predictor, 4) == [StorageError] * 4
    assert predictor.version == 2
    assert torch.equal(model[FQN], before)


def test_a_store_that_cannot_be_read_at_all_gets_few_requests() -> None:
    """Each request may take until its timeout, so few requests must distinguish an outage from one bad object."""
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    for _ in range(30):
        writer.snapshot()
    view = WrappedStorage(writer.storage, fails(on(name=lambda name: name not in ("log", "merged"))))
    predictor = Predictor(writer.model(), view)
    for _ in range(6):
        view.take()
        with pytest.raises(StorageError):
            predictor.sync()
        assert view.count() < 20
    view.rules.clear()
    assert predictor.sync() == writer.claim.head.version
    assert predictor.status().resyncs == 0


def test_an_outage_is_no_reason_to_resync() -> None:
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    view = WrappedStorage(writer.storage)
    predictor = Predictor(writer.model(), view)
    predictor.sync()
    writer.delta([1])
    writer.snapshot()
    with view.under(fails()):
        assert _synced(predictor, 6) == [StorageError] * 6
    assert _synced(predictor, 1) == [None]
    assert predictor.status().resyncs == 0
    with pytest.raises(NoSnapshotError):
        Predictor(writer.model(), Storage("memory://")).sync()
