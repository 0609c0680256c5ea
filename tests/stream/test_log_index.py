"""What a reader of a log without listings finds, against one that lists."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from delta_tracker.errors import StaleCacheError, UnsupportedStoreError
from delta_tracker.stream.format.manifest import entry_name
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.maintenance.retention import Retention, retain
from delta_tracker.stream.pinning import pin_version
from delta_tracker.stream.pointer import POINTER_NAME
from delta_tracker.stream.reading.path import path_to
from delta_tracker.stream.reading.runtime import REAL, Runtime
from delta_tracker.stream.storage.storage import Storage
from tests.predictor.cache_server import CacheServer, cache_server
from tests.predictor.pointed import point_at_the_head
from tests.stream.streams import Writer
from tests.sweeps import SWEEPS_ARE_WHOLE


@pytest.fixture
def writer() -> Writer:
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    return writer


@pytest.fixture
def served(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> Iterator[CacheServer]:
    monkeypatch.setattr("delta_tracker.stream.log._SPREAD_SECONDS", 0.0)
    with cache_server(writer.storage) as cache:
        yield cache


def _over_http(cache: CacheServer, runtime: Runtime = REAL) -> StreamLog:
    log = StreamLog(Storage(cache.url), runtime)
    log.pointer._seconds = 0.0
    return log


def _equal(pointed: StreamLog, listed: StreamLog) -> None:
    """Check that both logs lead a reader to the same versions."""
    head = listed.head()
    assert head is not None
    assert pointed.head() == head
    oldest = pointed.versions()[0]
    assert pointed.versions() == [each for each in listed.versions() if each >= oldest]
    assert oldest == 0 or listed.read(oldest - 1) is None
    assert pointed.newest_snapshot() == listed.newest_snapshot()
    for version in range(oldest, head.version + 1):
        assert pointed.read(version) == listed.read(version)
        assert pointed.longest_merged(version) == listed.longest_merged(version)
        assert pointed.newest_version(version) == listed.newest_version(version) == head.version
        entry = listed.read(version)
        assert entry is not None
        assert pointed.is_committed(entry)


@pytest.mark.sweep("short")
def test_a_pointed_log_equals_the_listed_one_in_random_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delta_tracker.stream.log._SPREAD_SECONDS", 0.0)
    for seed in range(30 if SWEEPS_ARE_WHOLE else 4):
        random_ = random.Random(seed)
        writer = Writer(Storage("memory://"))
        writer.snapshot()
        listed = StreamLog(writer.storage)
        with cache_server(writer.storage) as cache:
            for _ in range(5):
                for _ in range(random_.randrange(6)):
                    if random_.random() < 0.8:
                        writer.delta([random_.randrange(20)])
                    elif random_.random() < 0.5:
                        writer.snapshot()
                    else:
                        writer.claim = listed.claim()
                if random_.random() < 0.5:
                    compact(listed, fold=random_.choice([1e-9, 0.5, 1e9]))
                if random_.random() < 0.3:
                    retain(listed, Retention(versions=1, grace_seconds=0.0), now=lambda: time.time() + 1)
                point_at_the_head(writer.storage, oldest=_oldest(listed))
                _equal(_over_http(cache), listed)


def _oldest(log: StreamLog) -> int:
    versions = log.versions()
    return next(
        version for version in versions if versions[-1] - version == len(versions) - 1 - versions.index(version)
    )


def test_a_log_over_http_without_a_pointer_is_empty(writer: Writer, served: CacheServer) -> None:
    log = _over_http(served)
    assert log.head() is None
    assert log.versions() == []
    assert log.merged() == []
    assert log.newest_snapshot() is None
    assert log.newest_version(3) == 3
    assert log.read(1) == StreamLog(writer.storage).read(1)
    with pytest.raises(UnsupportedStoreError, match="not possible over http"):
        log.storage.objects("log")


def test_entries_below_the_oldest_are_refused(writer: Writer, served: CacheServer) -> None:
    for row in range(4):
        writer.delta([row])
    point_at_the_head(writer.storage, oldest=3)
    log = _over_http(served)
    assert log.read(2) is not None  # nothing is known yet
    assert log.versions() == [3, 4, 5]
    assert log.read(2) is None
    assert log.read(3) is not None


def test_the_list_of_a_forged_pointer_is_bounded(writer: Writer, served: CacheServer) -> None:
    newest = point_at_the_head(writer.storage, version=1 << 22).version
    log = _over_http(served)
    versions = log.versions()
    assert versions == list(range(newest - len(versions) + 1, newest + 1))
    assert len(versions) <= 1 << 20
    with pytest.raises(StaleCacheError):
        log.head()


def test_the_newest_version_is_found_beyond_a_claim_that_retention_kept(writer: Writer) -> None:
    writer.delta([1])
    writer = Writer(writer.storage)  # its claim and the delta before it stay
    for row in range(3):
        writer.delta([row])
    writer.snapshot()
    retain(writer.storage, Retention(versions=1, grace_seconds=0))
    log = StreamLog(writer.storage)
    assert log.versions() == [0, 2, 3, 6, 7]
    for after in (1, 2, 3):
        assert log.newest_version(after) == 7


def test_the_newest_version_takes_few_requests_and_no_listing(writer: Writer) -> None:
    log = StreamLog(writer.storage)
    log.pointer._seconds = 3600.0
    for num_versions in (0, 1, 2, 3, 9, 30):
        for row in range(num_versions):
            writer.delta([row % 20])
        held = writer.claim.head.version - num_versions
        before = dict(log.storage.requests)
        assert log.newest_version(held) == writer.claim.head.version
        asked = {kind: count - before[kind] for kind, count in log.storage.requests.items()}
        assert asked["list"] == 0
        assert asked["size"] <= 2 + 2 * num_versions.bit_length()
    pointer = point_at_the_head(writer.storage)
    log.pointer._seconds = 0.0
    before = dict(log.storage.requests)
    assert log.newest_version(1) == pointer.version
    assert log.storage.requests["size"] - before["size"] == 2
    point_at_the_head(writer.storage, version=10**9)  # forged: the store has no such entry
    assert log.newest_version(1) == pointer.version


def test_the_newest_version_is_exact_without_a_pointer_after_a_retention(writer: Writer) -> None:
    for _ in range(4):
        writer.delta([1])
    writer.snapshot()
    log = StreamLog(writer.storage)
    retain(log, Retention(versions=1, grace_seconds=0.0), now=lambda: time.time() + 1)
    assert log.read(2) is None
    assert log.newest_version(2) == writer.claim.head.version


def test_no_entry_above_the_pointer_is_requested_at_once(writer: Writer, served: CacheServer) -> None:
    point_at_the_head(writer.storage)
    now = 1000.0
    log = _over_http(served, Runtime(monotonic=lambda: now, uniform=lambda low, _: low))
    assert log.may_have(1)
    assert not log.may_have(2)
    now += 9.9
    assert not log.may_have(2)
    now += 0.2
    assert log.may_have(2)  # the writer of the pointer may be dead
    assert not log.may_have(2)
    writer.delta([1])
    point_at_the_head(writer.storage)
    assert log.may_have(2)
    assert StreamLog(writer.storage).may_have(99)


def test_a_cached_404_of_the_head_is_passed_by_once(writer: Writer, served: CacheServer) -> None:
    point_at_the_head(writer.storage)
    name = entry_name(1)
    served.hold(name)
    assert _over_http(served).head() == StreamLog(writer.storage).head()
    assert served.uncached == {name: 1}


def test_a_pointer_ahead_of_its_entry_is_a_stale_cache(writer: Writer, served: CacheServer) -> None:
    point_at_the_head(writer.storage, version=7, xxh3="0" * 32)
    log = _over_http(served)
    for _ in range(5):
        with pytest.raises(StaleCacheError, match=entry_name(7)):
            log.head()
    assert served.uncached == {entry_name(7): 1}, "one request past the cache"
    assert log.read(1) is not None


def test_a_head_that_disappears_is_asked_for_past_the_cache_once(writer: Writer, served: CacheServer) -> None:
    point_at_the_head(writer.storage)
    log, name = _over_http(served), entry_name(1)
    assert log.head() is not None
    writer.storage.delete(name)
    served.forget(name)
    for _ in range(5):
        with pytest.raises(StaleCacheError, match=name):
            log.head()
    assert served.uncached == {name: 1}


def test_an_entry_of_another_hash_than_the_pointers_is_a_stale_cache(writer: Writer, served: CacheServer) -> None:
    point_at_the_head(writer.storage, xxh3="0" * 32)
    with pytest.raises(StaleCacheError, match=entry_name(1)):
        _over_http(served).head()
    assert set(served.uncached) == {entry_name(1)}
    assert POINTER_NAME in served.plain


def test_a_claim_is_committed_although_a_cache_lacks_the_entry_after_it(writer: Writer, served: CacheServer) -> None:
    claim = StreamLog(writer.storage).read(0)
    assert claim is not None
    point_at_the_head(writer.storage)
    served.hold(entry_name(1))
    assert _over_http(served).is_committed(claim)
    assert served.uncached == {entry_name(1): 1}


def test_a_path_from_an_older_merged_snapshot_is_found_over_http(writer: Writer, served: CacheServer) -> None:
    for row in range(4):
        writer.delta([row])
    merged = compact(writer.storage, fold=1e-9)
    assert merged is not None
    assert merged.kind == "snapshot"
    version = writer.delta([7]).version
    pin_version(writer.storage, version)
    writer.delta([8])
    writer.snapshot()
    retain(writer.storage, Retention(versions=1, grace_seconds=0.0))
    listed = StreamLog(writer.storage)
    point_at_the_head(writer.storage, oldest=_oldest(listed))
    path = path_to(listed, version)
    assert path[0].merges is not None
    assert listed.read(merged.version) is None
    assert path_to(_over_http(served), version) == path
