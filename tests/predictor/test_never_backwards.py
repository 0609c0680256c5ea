"""Versions go back only by an order or a promotion, and copies that lack something are read beside others."""

from __future__ import annotations

import logging
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import pytest
import torch

from delta_tracker import Predictor, Rollout
from delta_tracker.errors import StorageError, StreamError
from delta_tracker.stream.format.manifest import entry_name
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.pinning import pin_version, release_pin
from delta_tracker.stream.storage.storage import Storage
from tests.predictor.readers import KINDS, Kind, Log, Reader, lose, mirror, new_store
from tests.predictor.serving import eventually
from tests.stores.rules import hides
from tests.stores.wrapped import WrappedStorage
from tests.stream.streams import FQN, Writer

_BOTH = pytest.mark.parametrize("kind", KINDS)


class Behind:
    """A predictor at version 5 of a source, and a mirror that has only versions 1 and 2."""

    def __init__(self, kind: Kind, *, starts_empty: bool = False) -> None:
        self.source, self.mirror = new_store(), new_store()
        self.log = Log(self.source)
        self.log.snapshot()
        self.log.deltas(1)
        if not starts_empty:
            mirror(self.source, self.mirror)
        self.log.deltas(3)
        self.reader = Reader(kind, [self.source, self.mirror], self.log.rows)
        assert self.reader.sync() is None
        assert self.reader.place == (self.log.stream, 5)


# Backups


@_BOTH
@pytest.mark.parametrize("num_lost", [0, 1, 3])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_publisher_that_continues_a_backup_is_followed_whatever_claims_are_lost(
    kind: Kind, is_restarted: bool, num_lost: int
) -> None:
    store = new_store()
    log = Log(store)
    log.snapshot()
    log.deltas(2)
    kept = set(store.inner.names("log"))
    log.deltas(4)
    for _ in range(num_lost):
        log = Log(store, log.rows)
        log.snapshot()
    reader = Reader(kind, [store], log.rows)
    assert reader.sync() is None
    for name in set(store.inner.names("log")) - kept:
        store.inner.delete(name)
    with mock.patch("time.time", return_value=time.time() + 3600):
        log = Log(store, log.rows)
        log.snapshot()
    reader = reader.restarted([store]) if is_restarted else reader
    reader.assert_reaches(log)
    assert reader.predictor.status().error is None


# Mirrors that lag


@_BOTH
@pytest.mark.parametrize("starts_empty", [False, True], ids=["behind", "empty"])
def test_a_restart_at_a_mirror_that_lags_continues_at_the_source(kind: Kind, starts_empty: bool) -> None:
    behind = Behind(kind, starts_empty=starts_empty)
    reader = behind.reader.restarted([behind.mirror, behind.source])
    assert set(reader.syncs(4)) == {5}
    behind.log.deltas(2)
    reader.assert_reaches(behind.log)
    behind.log.snapshot()
    mirror(behind.source, behind.mirror)
    behind.log.deltas(1)
    mirror(behind.source, behind.mirror)
    lose(behind.source)
    reader.assert_reaches(behind.log)


@_BOTH
def test_follow_does_not_go_back_to_a_mirror_that_lags(kind: Kind) -> None:
    behind = Behind(kind)
    reader = behind.reader.restarted([behind.mirror, behind.source])
    newest = behind.log.deltas(2)
    reader.predictor.follow(poll_seconds=0.001)
    eventually(lambda: reader.predictor.version not in (None, 5), seconds=20.0)
    assert reader.predictor.version > 5
    eventually(lambda: reader.predictor.version == newest, seconds=20.0)
    reader.predictor.stop()
    reader.check()


@_BOTH
@pytest.mark.parametrize("has_merged", [False, True])
def test_a_predictor_waits_for_a_mirror_that_lags(kind: Kind, has_merged: bool) -> None:
    behind = Behind(kind)
    if has_merged:
        compact(behind.mirror.inner, fold=1e-9, min_versions=2)
    reader = behind.reader.restarted([behind.mirror])
    for _ in range(4):
        error = reader.sync()
        assert reader.place == (behind.log.stream, 5)
        assert error is not None or reader.predictor.status().lag_versions != 0, "it is not up to date for all it knows"
    mirror(behind.source, behind.mirror, up_to=5)
    reader.sync()
    assert reader.place == (behind.log.stream, 5)
    behind.log.deltas(1)
    mirror(behind.source, behind.mirror)
    reader.assert_reaches(behind.log)
    assert reader.predictor.status().resyncs == 0


@_BOTH
def test_follow_reports_a_mirror_that_lags_until_it_has_caught_up(kind: Kind) -> None:
    behind = Behind(kind)
    reader = behind.reader.restarted([behind.mirror])
    reader.predictor.follow(poll_seconds=0.001)
    eventually(lambda: reader.predictor.error is not None or reader.predictor.version != 5, seconds=20.0)
    assert reader.place == (behind.log.stream, 5)
    newest = behind.log.deltas(1)
    mirror(behind.source, behind.mirror)
    eventually(lambda: reader.predictor.version == newest and reader.predictor.error is None, seconds=20.0)
    reader.predictor.stop()
    reader.check()


@_BOTH
def test_an_old_view_right_after_a_restart_is_waited_out(kind: Kind) -> None:
    """A replica, or a file system that caches names, shows the entries of a minute ago."""
    behind = Behind(kind)
    old = WrappedStorage(behind.source.inner, hides(lambda name: name in [entry_name(each) for each in (3, 4, 5)]))
    reader = behind.reader.restarted([old])
    assert set(reader.syncs(4)) == {5}
    old.rules.clear()
    behind.log.deltas(1)
    reader.assert_reaches(behind.log)
    assert reader.predictor.status().resyncs == 0


@_BOTH
def test_a_running_predictor_does_not_go_back_with_its_only_url(kind: Kind) -> None:
    behind = Behind(kind)
    later = hides(lambda name: name in [entry_name(each) for each in (3, 4, 5)])
    with behind.source.under(later):
        assert set(behind.reader.syncs(4)) == {5}
    behind.log.deltas(1)
    behind.reader.assert_reaches(behind.log)


# Orders


@_BOTH
def test_a_pin_leads_back_at_a_mirror_that_lags(kind: Kind) -> None:
    behind = Behind(kind)
    behind.reader = Reader(kind, [behind.source], behind.log.rows, rollout=Rollout(follows_pins=True))
    behind.reader.assert_reaches(behind.log)
    pin_version(behind.source.inner, 2)
    mirror(behind.source, behind.mirror, up_to=2)
    reader = behind.reader.restarted([behind.mirror, behind.source])
    assert reader.syncs(4)[-1] == 2
    assert reader.predictor.status().pinned == 2


@_BOTH
def test_an_own_rollback_leads_back_at_a_mirror_that_lags(kind: Kind) -> None:
    behind = Behind(kind)
    reader = behind.reader.restarted([behind.mirror])
    reader.predictor.rollback(2)
    reader.check()
    assert reader.place == (behind.log.stream, 2)
    assert set(reader.syncs(3)) == {2}


@_BOTH
def test_a_pin_that_only_one_url_has_is_followed(kind: Kind) -> None:
    """The mirror begins above the pinned version, so that it never gets the pin."""
    source, destination = new_store(), new_store()
    log = Log(source)
    log.snapshot()
    log.snapshot()
    mirror(source, destination)
    log.deltas(1)
    pin_version(source.inner, 1)
    mirror(source, destination)
    reader = Reader(kind, [destination, source], log.rows, rollout=Rollout(follows_pins=True))
    assert reader.syncs(4)[-1] == 1


@_BOTH
@pytest.mark.parametrize("is_lost", [False, True], ids=["source there", "source lost"])
def test_a_pin_that_was_released_is_not_followed_at_a_mirror_that_lags(kind: Kind, is_lost: bool) -> None:
    source, destination = new_store(), new_store()
    log = Log(source)
    log.snapshot()
    log.deltas(2)
    reader = Reader(kind, [source], log.rows, rollout=Rollout(follows_pins=True))
    reader.assert_reaches(log)
    pin_version(source.inner, 2)
    mirror(source, destination)
    reader = reader.restarted([source])
    assert reader.syncs(2)[-1] == 2
    log.snapshot()
    release_pin(source.inner)
    log.deltas(1)
    reader = reader.restarted([source])
    reader.assert_reaches(log)
    if is_lost:
        lose(source)
    reader = reader.restarted([destination, source])
    assert set(reader.syncs(4)) == {log.newest}


# Logs that were restored from a copy


class Restored:
    """A store in a directory that was restored from a copy of versions 1 to 3, and a predictor above them."""

    def __init__(self, kind: Kind, path: Path, version: int) -> None:
        self.path = path
        self.store = WrappedStorage(Storage(path.as_uri(), create=True, fsync=False))
        self.log = Log(self.store)
        self.log.snapshot()
        self.log.deltas(2)
        backup = shutil.copytree(path, path.with_name("backup"))
        self.log.deltas(version - 3)
        self.reader = Reader(kind, [self.store], self.log.rows)
        self.reader.assert_reaches(self.log)
        for each in path.iterdir():
            shutil.rmtree(each)
        shutil.copytree(backup, path, dirs_exist_ok=True)

    def continued(self) -> Log:
        """Return the next trainer of the restored log, a publisher of the next generation."""
        return Log(self.store, self.log.rows)


@_BOTH
@pytest.mark.parametrize("restarts", [False, True], ids=["running", "restarted"])
@pytest.mark.parametrize("version", [4, 5, 9])
def test_a_log_restored_from_a_copy_is_followed_at_the_next_generation(
    kind: Kind, restarts: bool, version: int, tmp_path: Path
) -> None:
    restored = Restored(kind, tmp_path / "stream", version)
    reader = restored.reader.restarted([restored.store]) if restarts else restored.reader
    assert set(reader.syncs(4)) == {version}, "the copy is older"
    after = restored.continued()
    assert set(reader.syncs(4)) == {version}, "a claim has no rows"
    after.snapshot()
    after.deltas(1)
    for _ in range(4):
        reader.sync()
    # Rows are of the next generation, of which the number may be lower.
    assert reader.place == (after.stream, after.newest)
    after.deltas(6)
    reader.assert_reaches(after)
    held = str(version)
    assert held in reader.predictor.status().last_resync


@_BOTH
def test_a_log_restored_from_a_copy_at_one_url_is_not_followed_while_another_has_more(
    kind: Kind, tmp_path: Path
) -> None:
    source, destination = new_store(), new_store()
    log = Log(source)
    log.snapshot()
    log.deltas(3)
    mirror(source, destination)
    reader = Reader(kind, [source, destination], log.rows)
    reader.assert_reaches(log)
    for version in (3, 4):
        source.inner.delete(entry_name(version))
    assert set(reader.syncs(4)) == {4}
    assert set(reader.restarted([source, destination]).syncs(4)) == {4}


# Copies that lack an object


def _part(store: WrappedStorage, version: int) -> str:
    entry = StreamLog(store.inner).read(version)
    assert entry is not None
    return entry.parts[0].name


def _lose_part(store: WrappedStorage, version: int) -> None:
    store.inner.delete(_part(store, version))


def _cut_part(store: WrappedStorage, version: int) -> None:
    data = store.inner.read(_part(store, version), max_bytes=1 << 20)
    assert data is not None
    store.inner.replace(_part(store, version), data[:-3].tobytes())


def _flip_part(store: WrappedStorage, version: int) -> None:
    data = store.inner.read(_part(store, version), max_bytes=1 << 20)
    assert data is not None
    data = data.copy()
    data[-1] ^= 1
    store.inner.replace(_part(store, version), data.tobytes())


def _lose_entry(store: WrappedStorage, version: int) -> None:
    store.inner.delete(entry_name(version))


def _replace_entry(store: WrappedStorage, version: int) -> None:
    store.inner.replace(entry_name(version), b"<html>Please log in</html>")


_FAULTS: dict[str, Callable[[WrappedStorage, int], None]] = {
    "part missing": _lose_part,
    "part cut": _cut_part,
    "part altered": _flip_part,
    "entry missing": _lose_entry,
    "entry altered": _replace_entry,
}


@_BOTH
@pytest.mark.parametrize("fault", _FAULTS)
@pytest.mark.parametrize("start", [True, False], ids=["snapshot", "delta"])
def test_what_one_url_lacks_is_read_from_another(kind: Kind, fault: str, start: bool) -> None:
    first, second = new_store(), new_store()
    log = Log(first)
    log.snapshot()
    reader = Reader(kind, [first, second], log.rows)
    if start:
        log.deltas(2)
    else:
        reader.assert_reaches(log)
        log.deltas(3)
    mirror(first, second)
    _FAULTS[fault](first, 1 if start else 3)
    reader.assert_reaches(log)
    assert reader.predictor.status().resyncs == 0
    log.deltas(1)  # which the second one lacks
    reader.assert_reaches(log)


@_BOTH
def test_a_part_that_each_url_lacks_elsewhere_is_read_from_the_other(kind: Kind) -> None:
    """No url has all versions, but together they have."""
    first, second = new_store(), new_store()
    log = Log(first)
    log.snapshot()
    log.deltas(4)
    mirror(first, second)
    _lose_part(first, 3)
    _flip_part(second, 4)
    reader = Reader(kind, [first, second], log.rows)
    reader.assert_reaches(log)
    assert reader.predictor.status().resyncs == 0


def test_a_part_that_no_url_has_stops_the_predictor_before_it() -> None:
    first, second = new_store(), new_store()
    log = Log(first)
    log.snapshot()
    log.deltas(3)
    mirror(first, second)
    for each in (first, second):
        _lose_part(each, 3)
    reader = Reader("model", [first, second], log.rows)
    assert reader.syncs(6)[-1] == 2
    assert isinstance(reader.sync(), StreamError)
    log.snapshot()
    reader.assert_reaches(log)


# Pins that a predictor does not follow


def _texts(predictor: Predictor) -> str:
    return " ".join(each for each in asdict(predictor.status()).values() if isinstance(each, str))


def test_a_predictor_says_that_it_does_not_follow_a_pin(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    store = new_store()
    log = Log(store)
    log.snapshot()
    log.deltas(3)
    reader = Reader("model", [store], log.rows)
    reader.assert_reaches(log)
    assert "pin" not in _texts(reader.predictor)
    pin_version(store.inner, 2)
    reader = reader.restarted([store])
    log.deltas(1)
    assert reader.syncs(4)[-1] == log.newest
    assert re.search(r"\bpin.*\b2\b|\b2\b.*\bpin", _texts(reader.predictor))
    said = [each for each in caplog.records if each.name.startswith("delta_tracker") and "pin" in each.getMessage()]
    said = [each for each in said if each.levelno >= logging.WARNING]
    assert len(said) == 1, [each.getMessage() for each in said]


# What is there, but cannot be read


@pytest.mark.advice("StorageError: DirectoryStore._has_folder")
def test_a_file_in_the_place_of_the_log_is_not_an_empty_stream(tmp_path: Path) -> None:
    writer = Writer(Storage((tmp_path / "stream").as_uri(), create=True))
    version = writer.snapshot().version
    log = tmp_path / "stream" / "log"
    log.rename(tmp_path / "log")
    log.write_bytes(b"<html>")
    model = writer.model()
    predictor = Predictor(model, writer.storage.url)
    with pytest.raises(StorageError, match="log is a file of 6 bytes instead of a directory"):
        predictor.sync()
    predictor.follow(poll_seconds=0.001)
    eventually(lambda: "log is a file of 6 bytes" in (predictor.status().error or ""))
    log.unlink()
    (tmp_path / "log").rename(log)
    eventually(lambda: predictor.version == version and predictor.error is None)
    predictor.stop()
    assert torch.equal(model[FQN], writer.table)


def test_a_file_in_the_place_of_the_log_leads_to_another_url(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"")
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    model = writer.model()
    predictor = Predictor(model, [tmp_path.as_uri(), writer.storage])
    with pytest.raises(StorageError):
        predictor.sync()
    assert predictor.sync() == writer.claim.head.version
    assert torch.equal(model[FQN], writer.table)
