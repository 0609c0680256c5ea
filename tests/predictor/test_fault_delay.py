"""Faults of a cache cost a reader over http one read past the cache, but no resync and no wrong row."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from delta_tracker import Canary, Predictor, Rollout, Storage
from delta_tracker.errors import (
    CorruptPartError,
    InvalidArgumentError,
    MissingVersionError,
    StaleCacheError,
    StreamError,
    UnreadablePointerError,
)
from delta_tracker.monitor import Monitor
from delta_tracker.predictor import follower
from delta_tracker.predictor import reader as reader_module
from delta_tracker.stream.format.manifest import Link, Manifest, entry_name
from delta_tracker.stream.format.table_choice import TABLES_NAME
from delta_tracker.stream.pin import PinReader
from delta_tracker.stream.pinning import pin_version, release_pin
from delta_tracker.stream.pointer import POINTER_NAME
from delta_tracker.stream.reading.fault_delay import FaultDelay, RereadStore
from delta_tracker.stream.reading.position import Position
from tests.monitor.figures import Figures
from tests.predictor.cache_server import CacheServer, cache_server
from tests.predictor.pointed import point_at_the_head
from tests.predictor.serving import eventually
from tests.predictor.waits import shorten_waits
from tests.stream.streams import FQN, Writer


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_waits(monkeypatch, back_off_seconds=0.02, gap_check_seconds=0.05)
    monkeypatch.setattr(follower, "_STALE_SECONDS", 0.02)
    monkeypatch.setattr(reader_module, "_SPREAD_SECONDS", 0.01)


class Served(Writer):
    """A stream whose pointer is written after each version, and its cache."""

    def __init__(self, cache: CacheServer) -> None:
        super().__init__(cache.origin)
        self.cache = cache

    def write(self, *args, **options) -> Manifest:
        manifest = super().write(*args, **options)
        point_at_the_head(self.storage)
        return manifest


@pytest.fixture
def served() -> Iterator[Served]:
    with cache_server(Storage("memory://")) as cache:
        writer = Served(cache)
        writer.snapshot()
        yield writer


def _predictor(
    served: Served, *, clock: Callable[[], float] = lambda: 0.0, monitor: Monitor | None = None
) -> tuple[Predictor, dict]:
    """Return a predictor that holds the newest version, and its model. A delay lasts 10 seconds of ``clock``."""
    model = served.model()
    predictor = Predictor(model, served.cache.url, monitor=monitor)
    predictor._reader.source.fault_delay = FaultDelay(10.0, clock)
    predictor._reader.source.log.pointer._seconds = 0.0  # polls each time
    predictor.sync()
    return predictor, model


def _bad_entry(cache: CacheServer, manifest: Manifest) -> str:
    cache.flip(entry_name(manifest.version))
    return entry_name(manifest.version)


def _missing_entry(cache: CacheServer, manifest: Manifest) -> str:
    cache.hold(entry_name(manifest.version))
    return entry_name(manifest.version)


def _short_entry(cache: CacheServer, manifest: Manifest) -> str:
    cache.truncate(entry_name(manifest.version))
    return entry_name(manifest.version)


def _bad_part(cache: CacheServer, manifest: Manifest) -> str:
    cache.flip(manifest.parts[0].name)
    return manifest.parts[0].name


def _missing_part(cache: CacheServer, manifest: Manifest) -> str:
    cache.hold(manifest.parts[0].name)
    return manifest.parts[0].name


def _short_part(cache: CacheServer, manifest: Manifest) -> str:
    cache.truncate(manifest.parts[0].name)
    return manifest.parts[0].name


_FAULTS = [_bad_entry, _missing_entry, _short_entry, _bad_part, _missing_part, _short_part]


@pytest.mark.parametrize("fault", _FAULTS)
@pytest.mark.parametrize("refreshes", [False, True])
def test_an_object_that_is_wrong_in_the_cache_is_read_past_it_once(
    served: Served, fault: Callable[[CacheServer, Manifest], str], refreshes: bool
) -> None:
    monitor = Monitor()
    predictor, model = _predictor(served, monitor=monitor)
    served.cache.refreshes = refreshes
    name = fault(served.cache, served.delta([1, 2]))
    assert predictor.sync() == served.claim.head.version
    assert torch.equal(model[FQN], served.table)
    assert predictor.status().resyncs == 0
    served.cache.uncached.pop(TABLES_NAME, None)  # a missing part may have been left out, which no copy decides
    assert served.cache.uncached[name] == 1
    assert set(served.cache.uncached) <= {name, POINTER_NAME}
    assert max(served.cache.uncached.values()) == 1
    assert Figures(monitor).of("past_cache_reads", predictor="predictor") == served.cache.uncached.total()
    served.delta([3])
    before = served.cache.uncached.total()
    predictor.sync()
    assert served.cache.uncached.total() == before, "the delay is over"


@pytest.mark.parametrize("fault", [_bad_part, _missing_part, _short_part])
def test_a_resync_reads_a_snapshot_that_is_wrong_in_the_cache_past_it(
    served: Served, fault: Callable[[CacheServer, Manifest], str]
) -> None:
    clock, model = itertools.count(0.0, 50.0), served.model()  # objects are reread after 300 seconds
    predictor = Predictor(model, served.cache.url, rollout=Rollout(canary=Canary(versions=1)))
    predictor._reader.source.fault_delay = FaultDelay(10.0, lambda: next(clock))
    predictor._reader.source.log.pointer._seconds = 0.0
    skipped = served.delta([1])
    predictor.sync()
    before, snapshot = predictor.version, served.snapshot()
    name, table = fault(served.cache, snapshot), served.table.clone()
    served.storage.delete(entry_name(skipped.version))
    served.cache.forget(entry_name(skipped.version))
    for _ in range(5):
        with contextlib.suppress(MissingVersionError, StaleCacheError):
            predictor.sync()  # the canary does not allow the snapshot yet
    assert (predictor.version, served.cache.uncached[name]) == (before, 0)
    served.delta([2])
    for _ in range(9):
        with contextlib.suppress(MissingVersionError, StaleCacheError):
            predictor.sync()
    assert predictor.version == snapshot.version
    assert torch.equal(model[FQN], table)
    assert served.cache.uncached[name] == 1


@pytest.mark.parametrize("fault", [_bad_part, _missing_part, _short_part])
def test_a_host_cache_reads_a_part_that_is_wrong_in_the_http_cache_past_it(
    served: Served, fault: Callable[[CacheServer, Manifest], str], tmp_path: Path
) -> None:
    model = served.model()
    predictor = Predictor(model, served.cache.url, cache=tmp_path)
    predictor._reader.source.log.pointer._seconds = 0.0
    predictor.sync()
    name = fault(served.cache, served.delta([1, 2]))
    assert predictor.sync() == served.claim.head.version
    assert torch.equal(model[FQN], served.table)
    assert predictor.status().resyncs == 0
    assert served.cache.uncached[name] == 1


@pytest.mark.parametrize("kind", ["pin", "release"])
@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("fault", _FAULTS)
def test_pins_and_releases_are_followed_past_a_damaged_cache(
    served: Served, tmp_path: Path, kind: str, is_cached: bool, fault: Callable[[CacheServer, Manifest], str]
) -> None:
    model = served.model()
    good = served.delta([1])
    bits = served.table.clone()
    served.delta([2])
    predictor = Predictor(
        model, served.cache.url, rollout=Rollout(follows_pins=True), cache=tmp_path if is_cached else None
    )
    predictor._reader.source.pins = PinReader(seconds=0.0)
    predictor._reader.source.fault_delay = FaultDelay(10.0, clock=lambda: 0.0)
    predictor._reader.source.log.pointer._seconds = 0.0
    predictor.sync()
    if kind == "pin":
        name = fault(served.cache, good)
        pin_version(served.storage, good.version)
    else:
        pin_version(served.storage, good.version)
        predictor.sync()
        good = served.snapshot()
        bits = served.table.clone()
        name = fault(served.cache, good)
        release_pin(served.storage)
    for _ in range(3):  # a predictor may wait for its cache before it goes on
        with contextlib.suppress(StaleCacheError):
            predictor.sync()
    assert predictor.version == good.version
    assert torch.equal(model[FQN], bits)
    assert served.cache.uncached[name] <= 1


def test_several_wrong_objects_of_one_version_are_read_past_the_cache_once_each(served: Served) -> None:
    predictor, model = _predictor(served)
    served.cache.refreshes = False
    manifest = served.delta([1, 2])
    names = [_short_entry(served.cache, manifest), _bad_part(served.cache, manifest)]
    predictor.sync()
    assert torch.equal(model[FQN], served.table)
    assert [served.cache.uncached[name] for name in names] == [1, 1]


def test_an_entry_that_confirmed_a_pointer_is_not_read_past_the_cache_again(served: Served) -> None:
    predictor, model = _predictor(served)
    served.cache.refreshes = False
    for number in range(20):  # far enough to look for a merged delta, which confirms the pointer
        manifest = served.delta([number])
    name = _missing_entry(served.cache, manifest)
    assert predictor.sync() == manifest.version
    assert torch.equal(model[FQN], served.table)
    assert served.cache.uncached[name] == 1


@pytest.mark.advice("StaleCacheError: Reader._accept_fault StreamLog.head StreamLog._confirmed_by")
@pytest.mark.parametrize("damage", ["delete", "alter"])
def test_a_fault_of_the_origin_is_believed_after_a_while(served: Served, damage: str) -> None:
    now = [0.0]
    predictor, model = _predictor(served, clock=lambda: now[0])
    manifest = served.delta([1])
    name = manifest.parts[0].name
    if damage == "delete":
        served.storage.delete(name)
    else:
        served.storage.replace(name, b"x" * manifest.parts[0].num_bytes)
    with pytest.raises(StaleCacheError) as stale:
        predictor.sync()
    assert stale.value.name == name
    assert predictor.version == 1
    served.snapshot()
    with pytest.raises(StaleCacheError):
        predictor.sync()
    assert served.cache.uncached[name] == 1
    predictor.follow(0.01)
    eventually(lambda: isinstance(predictor.error, StaleCacheError))
    assert predictor.version == 1
    now[0] = 10.0
    eventually(lambda: predictor.version == served.claim.head.version)
    predictor.stop()
    assert torch.equal(model[FQN], served.table)
    assert predictor.status().resyncs == 1
    assert served.cache.uncached[name] == 1


def test_a_stale_cache_does_not_count_as_a_failing_store(served: Served) -> None:
    """The second failure in a row would lead to the other url, and the third one to a resync."""
    predictor = Predictor(served.model(), [served.cache.url, served.storage])
    predictor._reader.source.log.pointer._seconds = 0.0
    predictor.sync()
    served.storage.delete(served.delta([1]).parts[0].name)
    for _ in range(5):
        with pytest.raises(StaleCacheError):
            predictor.sync()
    served.snapshot()
    with pytest.raises(StaleCacheError):
        predictor.sync()
    assert predictor.status().resyncs == 0


def test_a_version_that_retention_deleted_is_not_waited_for(served: Served) -> None:
    predictor, model = _predictor(served)
    manifests = [served.delta([number]) for number in range(3)]
    newest = served.snapshot()
    for manifest in manifests:
        for part in manifest.parts:
            served.storage.delete(part.name)
        if manifest.version != 2:  # a cache still has this entry
            served.storage.delete(entry_name(manifest.version))
    point_at_the_head(served.storage, oldest=newest.version)
    assert predictor.sync() == newest.version
    assert torch.equal(model[FQN], served.table)


def test_a_replaced_stream_is_found_after_a_while(served: Served) -> None:
    predictor, model = _predictor(served, clock=itertools.count().__next__)
    for prefix in ("log", "parts"):
        for name in served.storage.names(prefix):
            served.storage.delete(name)
            served.cache.forget(name)
    served.storage.delete(POINTER_NAME)
    other = Served(served.cache)
    for number in range(3):
        other.snapshot()
        other.delta([number])
    predictor.follow(0.01)
    eventually(lambda: predictor.version == other.claim.head.version and torch.equal(model[FQN], other.table))
    predictor.stop()


def test_a_pointer_ahead_of_its_entry_causes_no_resync(served: Served) -> None:
    predictor, model = _predictor(served)
    point_at_the_head(served.storage, version=served.claim.head.version + 1)
    for _ in range(3):
        with contextlib.suppress(StaleCacheError):
            predictor.sync()
    assert sum(served.cache.uncached.values()) <= 3
    served.cache.forget(entry_name(served.claim.head.version + 1))
    served.delta([1])
    eventually(lambda: _synced(predictor) == served.claim.head.version)
    assert torch.equal(model[FQN], served.table)
    assert predictor.status().resyncs == 0


def _synced(predictor: Predictor) -> int | None:
    with contextlib.suppress(StreamError):
        predictor.sync()
    return predictor.version


def test_the_wait_before_a_read_past_the_cache_ends_at_stop(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "_SPREAD_SECONDS", 3600.0)
    predictor, _ = _predictor(served)
    name = _missing_part(served.cache, served.delta([1]))
    predictor.follow(0.01)
    eventually(lambda: served.cache.plain[name] > 0)
    predictor.stop()
    assert not any(thread.name == "predictor" for thread in threading.enumerate())


def test_directories_and_buckets_resync_at_once(tmp_path: Path) -> None:
    writer = Writer(Storage(f"file://{tmp_path}", create=True))
    writer.snapshot()
    predictor = Predictor(writer.model(), writer.storage)
    predictor.sync()
    (tmp_path / writer.delta([1]).parts[0].name).unlink()
    with pytest.raises(CorruptPartError):
        predictor.sync()
    writer.snapshot()
    assert predictor.sync() == writer.claim.head.version


def test_a_doubt_lasts_for_its_time_and_belongs_to_one_position() -> None:
    now = [0.0]
    fault_delay, storage = FaultDelay(10.0, clock=lambda: now[0]), Storage("http://127.0.0.1:1")
    place = Position("0" * 32, Link(4, "0" * 32), 1, 0)
    part, entry = CorruptPartError("parts/x", "short"), MissingVersionError(5, 6)
    assert fault_delay.reread([part], place, storage, print) is not None
    assert fault_delay.reread([part], place, storage, print) is None, "once per delay"
    now[0] = 9.0
    assert fault_delay.reread([entry], place, storage, print) is not None, "another object"
    assert not fault_delay.is_over
    now[0] = 10.0
    assert fault_delay.is_over, "another kind of fault does not begin another delay"
    assert fault_delay.reread([part], Position("0" * 32, Link(5, "0" * 32), 1, 0), storage, print) is not None
    assert not fault_delay.is_over
    fault_delay.clear()
    assert fault_delay.reread([part], place, storage, print) is not None


def test_a_view_is_not_for_writing() -> None:
    view = RereadStore(Storage("http://127.0.0.1:1"), print).view()
    with pytest.raises(StreamError):
        view.put("a", [])
    with pytest.raises(InvalidArgumentError):
        view.read("../a", max_bytes=1)


_ANSWERS = {
    "page": (b"<!DOCTYPE html><title>Please log in</title>" + b" " * 500, "an HTML or XML page: '<!DOCTYPE html>"),
    "large page": (b"<html>" + b"x" * (65 << 10), "66566 bytes"),
    "garbage": (bytes(range(128, 228)), "100 bytes: '"),
    "empty": (b"", "an empty answer"),
    "gzip": (gzip.compress(b"{}"), "compressed with gzip"),
    "other json": (b'{"error": "not authorised"}', "not authorised"),
}


@pytest.mark.advice("UnreadablePointerError: load_pointer")
@pytest.mark.parametrize("answer", _ANSWERS)
def test_an_answer_that_is_no_pointer_is_reported_until_it_is_right(served: Served, answer: str) -> None:
    data, text = _ANSWERS[answer]
    predictor, model = _predictor(served)
    fresh = Predictor(served.model(), served.cache.url)
    fresh._reader.source.log.pointer._seconds = 0.0
    served.storage.replace(POINTER_NAME, data)
    for each in (predictor, fresh):
        with pytest.raises(UnreadablePointerError, match=re.escape(text)) as raised:
            each.sync()
        assert f"Make {served.cache.url}/{POINTER_NAME} the JSON object that the publisher wrote" in str(raised.value)
        assert each.status().lag_versions is None
        each.follow(0.01)
        eventually(lambda each=each: "UnreadablePointerError" in (each.status().error or ""))
    assert predictor.version == 1, "what was applied stays"
    served.delta([1])  # which writes the right pointer
    for each in (predictor, fresh):
        eventually(lambda each=each: each.version == 2 and each.error is None)
        each.stop()
        assert each.status().lag_versions == 0
    assert torch.equal(model[FQN], served.table)


def test_an_answer_that_is_no_pointer_leads_to_another_url(served: Served) -> None:
    predictor = Predictor(served.model(), [served.cache.url, served.storage])
    predictor._reader.source.log.pointer._seconds = 0.0
    predictor.sync()
    served.storage.replace(POINTER_NAME, b"<html>")
    for _ in range(3):
        with contextlib.suppress(UnreadablePointerError):
            predictor.sync()
    served.write("delta", served.blocks([1]))
    served.storage.replace(POINTER_NAME, b"<html>")
    assert predictor.sync() == 2
