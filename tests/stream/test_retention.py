"""Retention: removed objects, kept objects, and fenced publishers."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_tracker.errors import FencedError, InvalidArgumentError, MalformedError, StorageError
from delta_tracker.stream.format.manifest import Manifest, Merged, entry_name
from delta_tracker.stream.format.state_tree import pack
from delta_tracker.stream.log import StreamLog, part_name
from delta_tracker.stream.maintenance import retention as retention_module
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.maintenance.retention import HEARTBEAT_SECONDS, ORPHAN_SECONDS, Retained, Retention, retain
from delta_tracker.stream.reading.source import Lag
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import StateSpec, TableStates
from tests.stores.rules import Dated, calls, fails, nth, on
from tests.stores.wrapped import Operation, WrappedStorage
from tests.stream.histories import Clock, History, Reader, clocked
from tests.stream.streams import Writer
from tests.sweeps import SWEEPS_ARE_WHOLE


@pytest.fixture
def clock():
    clock = Clock()
    with clock.of_the_log():
        yield clock


@pytest.fixture
def history(clock: Clock) -> History:
    """Make the versions 0 claim, 1 snapshot, 2..5 deltas, 6 snapshot, 7..9 deltas, ten seconds apart."""
    history = History(clocked(clock), 1)
    for kind in ["delta"] * 4 + ["snapshot"] + ["delta"] * 3:
        clock.seconds += 10
        getattr(history, kind)()
    return history


def versions(history: History) -> list[int]:
    return history.log.versions()


def named(history: History) -> set[str]:
    """Return the parts of all entries."""
    log = history.log
    manifests = [log.read(version) for version in log.versions()] + [log.read_merged(each) for each in log.merged()]
    return {part.name for manifest in manifests for part in manifest.parts}


def everything(storage: Storage) -> list[str]:
    return [name for prefix in ("drafts", "log", "merged", "parts") for name in storage.names(prefix)]


def assert_follows(history: History) -> None:
    reader = Reader(history)
    reader.sync()
    assert (reader.held.version, reader.resyncs) == (history.version, 0)


@pytest.mark.parametrize(
    ("bound", "first"),
    [
        ({"versions": 8}, 2),
        ({"versions": 5}, 5),
        ({"versions": 1}, 6),  # what a new reader needs stays
        ({"seconds": 60}, 3),
        ({"seconds": 0}, 6),
        ({"num_bytes": 1}, 6),
        ({"versions": 8, "seconds": 60}, 3),
        ({"versions": 5, "seconds": 60}, 5),
        ({}, 0),
    ],
)
def test_versions_beyond_a_bound_are_removed(history: History, clock: Clock, bound: dict, first: int) -> None:
    before = {name: history.storage.size(name) for name in history.storage.names("parts")}
    retained = retain(history.storage, Retention(grace_seconds=0, **bound), clock)
    assert versions(history) == sorted({0, *range(first, 10)})  # a claim stays
    assert set(history.storage.names("parts")) == named(history)
    gone = before.keys() - named(history)
    assert retained == Retained(versions=max(0, first - 1), num_bytes=sum(before[name] for name in gone))
    assert_follows(history)
    assert retain(history.log, Retention(grace_seconds=0, **bound), clock) == Retained()


def test_bytes_count_from_the_head(history: History, clock: Clock) -> None:
    sizes = [history.log.read(version).num_bytes for version in range(10)]
    retain(history.storage, Retention(grace_seconds=0, num_bytes=sum(sizes[4:])), clock)
    assert versions(history) == [0, *range(4, 10)]


def test_readers_of_the_previous_snapshot_have_the_grace_period(history: History, clock: Clock) -> None:
    reader = Reader(history)
    reader.held, reader.state = history.log.read(1), history.states[1]
    retention = Retention(versions=1, grace_seconds=50)
    clock.seconds += 19  # the snapshot is 49 seconds old
    assert retain(history.storage, retention, clock) == Retained()
    reader.sync(2)
    clock.seconds += 1
    assert retain(history.storage, retention, clock).versions == 5
    assert versions(history) == [0, 6, 7, 8, 9]
    reader.sync()
    assert (reader.resyncs, reader.held.version) == (1, 9)


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_snapshot_that_lost_an_object_replaces_no_older_one(history: History, clock: Clock, damage: str) -> None:
    name = history.log.read(6).parts[0].name
    data = history.storage.read(name, max_bytes=10**6)
    if damage == "missing":
        history.storage.delete(name)
    else:
        history.storage.put(name, [memoryview(data)[:-7]])
    retention = Retention(versions=1, grace_seconds=0)
    retain(history.storage, retention, clock)
    assert versions(history) == list(range(10)), "a reader can start at version 1"
    history.snapshot()
    clock.seconds += 1
    retain(history.storage, retention, clock)
    assert versions(history) == [0, 9, 10]


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_merged_snapshot_that_lost_an_object_replaces_no_version(history: History, clock: Clock, damage: str) -> None:
    merged = compact(history.storage, fold=1e-9, now=clock)
    assert (merged.kind, merged.version) == ("snapshot", 9)
    name = merged.parts[0].name
    if damage == "missing":
        history.storage.delete(name)
    else:
        history.storage.put(name, [memoryview(b"<html>")])
    clock.seconds += 1
    retain(history.storage, Retention(versions=1, grace_seconds=0), clock)
    assert versions(history) == [0, *range(6, 10)]


def test_a_merged_snapshot_is_a_start_once_it_is_older_than_the_grace(history: History, clock: Clock) -> None:
    retention = Retention(versions=1, grace_seconds=50)
    clock.seconds += 100
    merged = compact(history.storage, fold=1e-9, now=clock)
    history.delta()
    history.delta()
    history.delta()
    assert (merged.kind, merged.version) == ("snapshot", 9)
    retain(history.storage, retention, clock)
    assert versions(history) == [0, *range(6, 13)]
    clock.seconds += 50
    retain(history.storage, retention, clock)
    assert versions(history) == [0, 10, 11, 12]
    assert history.log.merged() == [Merged(9, 0, "snapshot")]
    assert_follows(history)
    # The next one supersedes it when its own grace is over.
    assert compact(history.storage, fold=1e-9, now=clock).version == 12
    retain(history.storage, retention, clock)
    assert [each.last for each in history.log.merged()] == [9, 12]
    clock.seconds += 50
    assert retain(history.storage, retention, clock).merged == 1
    assert [each.last for each in history.log.merged()] == [12]
    assert versions(history) == [0, 11, 12]  # the head and its parent
    assert set(history.storage.names("parts")) == named(history)
    assert_follows(history)


def test_superseded_merged_deltas_are_removed(history: History, clock: Clock) -> None:
    retention = Retention(grace_seconds=50)
    compact(history.storage, fold=1e9, now=clock)
    history.delta()
    history.delta()
    clock.seconds += 60
    compact(history.storage, fold=1e9, now=clock)
    assert history.log.merged() == [Merged(9, 7, "delta"), Merged(11, 7, "delta")]
    assert retain(history.storage, retention, clock) == Retained()
    clock.seconds += 50
    assert retain(history.storage, retention, clock).merged == 1
    assert history.log.merged() == [Merged(11, 7, "delta")]
    history.snapshot()
    history.delta()
    clock.seconds += 49
    assert retain(history.storage, retention, clock) == Retained()
    clock.seconds += 1
    assert retain(history.storage, retention, clock).merged == 1
    assert set(history.storage.names("parts")) == named(history)


def test_consecutive_merged_deltas_are_kept(clock: Clock) -> None:
    history = History(clocked(clock), 1)
    for _ in range(5):
        history.delta(1)
    for log in (_Until(history.storage, 3), StreamLog(history.storage)):
        compact(log, fold=1e9, max_bytes=1 << 20, now=clock)
    assert history.log.merged() == [Merged(3, 2, "delta"), Merged(6, 2, "delta")]
    later = history.log.read_merged(Merged(6, 2, "delta"))
    history.storage.delete(Merged(6, 2, "delta").name)
    assert history.log.create_merged(replace(later, parent=history.log.read(3).link))
    assert retain(history.storage, Retention(grace_seconds=0), clock) == Retained()
    assert history.log.merged() == [Merged(3, 2, "delta"), Merged(6, 4, "delta")]


class _Until(StreamLog):
    """A log whose head is at most a given version."""

    def __init__(self, storage: Storage, last: int) -> None:
        super().__init__(storage)
        self.last = last

    def read(self, version):
        return super().read(version) if version <= self.last else None

    def head(self):
        return self.read(self.last)


def test_a_part_that_a_later_version_names_stays(history: History, clock: Clock) -> None:
    again = history.log.read(3)
    history.held.commit(again)
    retain(history.storage, Retention(versions=1, grace_seconds=0), clock)
    assert versions(history) == [0, 6, 7, 8, 9, 10]
    assert all(history.storage.size(part.name) == part.num_bytes for part in again.parts)


def test_a_clock_that_was_put_back_makes_no_gap(history: History, clock: Clock) -> None:
    history.snapshot()
    clock.seconds -= 1000
    history.delta()
    clock.seconds += 1000
    history.snapshot()
    history.delta()
    retain(history.storage, Retention(seconds=75, grace_seconds=0), clock)
    assert versions(history) == [0, *range(2, 14)]


@pytest.mark.parametrize("ahead", [3600.0, -3600.0])
def test_a_wrong_clock_of_a_publisher_changes_no_age(clock: Clock, ahead: float) -> None:
    clock.seconds = time.time() - 1000
    with clock.of_the_log(ahead):
        history = History(clocked(clock), 1)
        for kind in ["delta"] * 4 + ["snapshot"] + ["delta"] * 3:
            clock.seconds += 10
            getattr(history, kind)()
        assert retain(history.storage, Retention(seconds=60, grace_seconds=50)) == Retained()
        assert retain(history.storage, Retention(seconds=60, grace_seconds=30)).versions == 2
        assert versions(history) == [0, *range(3, 10)]
        clock.seconds += 60
        history.snapshot()
        clock.seconds += 31
        history.delta()
        assert retain(history.storage, Retention(seconds=60, grace_seconds=30)).versions == 7
        assert versions(history) == [0, 10, 11]
    assert_follows(history)


@pytest.mark.parametrize("name", ["parts/foreign", "drafts/mine", "probe/mine", "predictors/x/y.json"])
def test_an_object_of_another_program_changes_no_age(clock: Clock, name: str) -> None:
    """The object is dated 7000 s after the others, but not after this host's time."""
    assert_nothing_expires(clock, name, time.time() - 7200)


@pytest.mark.parametrize("name", [f"probe/{'0' * 32}", "predictors/host-7.json", entry_name(9)])
def test_an_object_dated_in_the_future_changes_no_age(clock: Clock, name: str) -> None:
    assert_nothing_expires(clock, name, time.time() - 30)


def assert_nothing_expires(clock: Clock, name: str, began: float) -> None:
    """Check that a stream written from ``began`` on stays whole if ``name`` is dated 7000 s after its end."""
    clock.seconds = began
    dated = Dated(clock)
    history = History(WrappedStorage(Storage("memory://"), dated), 1)
    for kind in ("delta", "snapshot", "delta"):
        for _ in range(3):
            getattr(history, kind)()
    storage = history.storage
    in_flight = part_name(5, 1, "c")  # a compaction has not created its entry yet
    storage.put(in_flight, [memoryview(b"123")])
    clock.seconds += 10
    if storage.size(name) is None:
        storage.replace(name, b"123")
    dated.times[name] = clock.seconds + 7000
    assert retain(storage, Retention(versions=1, grace_seconds=600)) == Retained()
    assert storage.size(in_flight) == 3


@pytest.mark.parametrize(("ahead", "num_versions"), [(7200.0, 5), (0.0, 5), (-7200.0, 0)])
def test_a_clock_of_this_host_may_delay_retention_but_expires_nothing_early(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, ahead: float, num_versions: int
) -> None:
    clock.seconds = 1e9
    history = History(clocked(clock), 1)
    for kind in ["delta"] * 4 + ["snapshot"] + ["delta"] * 3:
        clock.seconds += 10
        getattr(history, kind)()
    monkeypatch.setattr(
        retention_module, "time", SimpleNamespace(time=lambda: clock.seconds + ahead, monotonic=time.monotonic)
    )
    retention = Retention(versions=1, grace_seconds=50)
    clock.seconds += 19
    history.storage.replace("predictors/live.json", b"")  # the snapshot is 49 seconds old
    assert retain(history.storage, retention) == Retained()
    clock.seconds += 1
    history.storage.replace("predictors/live.json", b"")
    assert retain(history.storage, retention).versions == num_versions


@pytest.mark.sweep("long")
@given(st.integers(0, 2**32))
@settings(deadline=None, max_examples=100 if SWEEPS_ARE_WHOLE else 3)
def test_no_reader_within_the_grace_period_loses_its_next_version(seed: int) -> None:
    """Publishers, compactions and retention run on hosts with random clocks, on a store that may truncate times.

    The lag of a reader is never negative, and is 0 only if no version is missing.
    """
    chance, clock = random.Random(seed), Clock()
    storage = clocked(clock, resolution=chance.choice([0.0, 1.0]))

    def skewed() -> float:
        return chance.choice([-7200.0, -3600.0, 0.0, 30.0, 3600.0])

    with clock.of_the_log(skewed()):
        history = History(storage, seed)
    readers = [Reader(history, seed + number) for number in range(2)]
    lags = [Lag() for _ in readers]
    synced = [clock.seconds] * 2
    skew = 0.0
    for _ in range(60):
        clock.seconds += chance.choice([0.1, 5.0, 50.0, 200.0])
        for number, reader in enumerate(readers):
            if clock.seconds - synced[number] > 500 or chance.random() < 0.1:
                reader.sync()
                synced[number] = clock.seconds - 200.0 * (chance.random() < 0.2)
        kind = chance.choice(["delta"] * 5 + ["claim", "snapshot", "snapshot", "compact", "retain", "retain"])
        if kind == "claim":
            skew = skewed()
        with clock.of_the_log(skew):
            if kind == "compact":
                host = skewed()
                compact(storage, fold=chance.choice([1e-9, 1e9]), now=lambda host=host: clock.seconds + host)
            elif kind == "retain":
                retain(storage, Retention(versions=1, seconds=chance.choice([None, 1.0]), grace_seconds=1000))
            else:
                getattr(history, kind)()
        for reader, lag in zip(readers, lags, strict=True):
            _check_lag(history, reader, lag)
    for reader in readers:
        reader.sync()
        assert (reader.resyncs, reader.held.version) == (0, history.version)


def _check_lag(history: History, reader: Reader, lag: Lag) -> None:
    held = None if reader.held is None else reader.held.version
    count, seconds = lag.of(history.log, held)
    assert (count > 0) == (seconds > 0)
    assert count == history.version - held if held is not None else count > 0
    assert 0 <= seconds <= 60 * 200 + 1


def test_claims_and_the_entries_before_them_stay_without_parts(clock: Clock) -> None:
    history = History(clocked(clock), 1)
    clock.seconds += 10
    for kind in ("delta", "claim", "claim", "delta", "delta", "claim", "snapshot", "delta"):
        getattr(history, kind)()
    storage = history.storage
    sizes = {name: storage.size(name) for name in storage.names("parts")}
    first = retain(storage, Retention(versions=1, grace_seconds=0), clock)
    assert versions(history) == [0, 2, 3, 4, 6, 7, 8, 9]  # the claims 0, 3, 4 and 7
    stays = {part.name for version in (8, 9) for part in history.log.read(version).parts}
    assert set(storage.names("parts")) == stays
    gone = sum(num_bytes for name, num_bytes in sizes.items() if name not in stays)
    assert first == Retained(versions=2, num_bytes=gone)
    assert retain(storage, Retention(versions=1, grace_seconds=0), clock) == Retained()
    assert_follows(history)


def test_parts_that_a_pass_left_of_an_entry_that_stays_go_with_the_next_one(clock: Clock) -> None:
    history = History(clocked(clock), 1)
    for kind in ("claim", "snapshot", "delta"):
        getattr(history, kind)()
    storage = history.storage
    (part,) = history.log.read(1).parts
    with storage.under(fails(on("delete", name=part.name), KeyboardInterrupt)), pytest.raises(KeyboardInterrupt):
        retain(storage, Retention(versions=1, grace_seconds=0), clock)
    assert storage.size(part.name) is not None
    assert retain(storage, Retention(versions=1, grace_seconds=0), clock).num_bytes == part.num_bytes
    assert storage.size(part.name) is None


def test_orphans_are_removed_by_the_clock_of_the_store(history: History, clock: Clock) -> None:
    storage = history.storage
    old = [part_name(version, 1, "r0") for version in (3, 9)] + ["drafts/0123456789abcdef"]
    stays = [part_name(10, 1, "r0"), "parts/foreign.safetensors", "parts/x/y", "drafts/mine", "other/0123456789abcdef"]
    for name in old + stays:
        storage.put(name, [memoryview(b"123")])
    far = lambda: clock.seconds + 1e6  # noqa: E731  this process' clock is wrong
    clock.seconds += ORPHAN_SECONDS
    storage.replace("predictors/live.json", b"")
    assert retain(storage, Retention(), far) == Retained()
    clock.seconds += 1
    storage.replace("predictors/live.json", b"")
    assert retain(storage, Retention(), lambda: 0.0) == Retained(orphans=3, num_bytes=9)
    assert [storage.size(name) for name in old] == [None] * 3
    assert [storage.size(name) for name in stays] == [3] * 5
    assert_follows(history)


def test_heartbeats_and_probes_of_the_dead_are_removed(history: History, clock: Clock) -> None:
    storage = history.storage
    probe, beat = f"probe/{'0' * 32}", "predictors/host-7.json"
    stays = ["predictors/host 7.json", "predictors/x/y.json", "probe/mine", f"probe/x/{'0' * 32}"]
    for name in (probe, beat, *stays):
        storage.replace(name, b"123")
    clock.seconds += ORPHAN_SECONDS
    storage.replace("predictors/live.json", b"")
    assert retain(storage, Retention()) == Retained()
    clock.seconds += 1
    storage.replace("predictors/live.json", b"")
    assert retain(storage, Retention()) == Retained(orphans=1, num_bytes=3)
    assert (storage.size(probe), storage.size(beat)) == (None, 3)
    clock.seconds += HEARTBEAT_SECONDS
    storage.replace("predictors/live.json", b"")
    assert retain(storage, Retention()) == Retained(orphans=1, num_bytes=3)
    assert storage.size(beat) is None
    assert [storage.size(name) for name in (*stays, "predictors/live.json")] == [3, 3, 3, 3, 0]


def test_heartbeats_of_publishers_that_have_ended_are_removed(history: History, clock: Clock) -> None:
    storage = history.storage
    ended, live = (f"publishers/{number:020d}.json" for number in (1, 2))
    for name in (ended, live, "publishers/1.json"):
        storage.replace(name, b"123")
    for seconds, expected in ((HEARTBEAT_SECONDS, Retained()), (1, Retained(orphans=1, num_bytes=3))):
        clock.seconds += seconds
        storage.replace(live, b"123")
        assert retain(storage, Retention()) == expected
    assert [storage.size(name) for name in (ended, live, "publishers/1.json")] == [None, 3, 3]


def test_the_draft_of_a_running_upload_stays(tmp_path: Path) -> None:
    history = History(Storage(tmp_path.as_uri(), fsync=False), 1)
    storage, early = history.storage, time.time() - 2 * ORPHAN_SECONDS
    dead = tmp_path / "drafts" / "0123456789abcdef"
    dead.write_bytes(b"123")

    def slow() -> Iterator[memoryview]:
        yield memoryview(b"first")
        assert len(storage.names("drafts")) == 2
        for name in storage.names("drafts"):
            os.utime(tmp_path / name, (early, early))
        assert retain(storage, Retention()) == Retained(orphans=1, num_bytes=3)
        assert not dead.exists()
        yield memoryview(b"last")

    storage.put("parts/slow", slow())
    assert storage.read("parts/slow", max_bytes=100).tobytes() == b"firstlast"
    assert storage.names("drafts") == []


def test_parts_of_an_entry_that_comes_while_orphans_are_listed_stay(clock: Clock) -> None:
    """Parts are listed before entries are read: a commit in between references parts that were listed."""
    dated = Dated(clock)
    storage = WrappedStorage(Storage("memory://"), dated)
    history = History(storage, 3)

    def age(operation: Operation, _: object) -> None:
        dated.times[operation.name] -= 2 * ORPHAN_SECONDS  # it was written long ago

    storage.rules.insert(0, calls(on("put"), after=age))
    history.delta()
    history.delta()
    commits = calls(nth(1, on("objects", name="parts")), after=lambda *_: compact(storage, fold=1e9, now=clock))
    assert retain(WrappedStorage(storage, commits), Retention(), clock) == Retained()
    assert_follows(history)


@pytest.mark.parametrize("name", [entry_name(3), Merged(9, 7, "delta").name])
def test_an_entry_that_cannot_be_read_stops_it_before_it_begins(history: History, clock: Clock, name: str) -> None:
    storage = history.storage
    storage.delete(name)
    storage.create(name, b"{}")
    before = everything(storage)
    with pytest.raises(MalformedError):
        retain(storage, Retention(versions=1, grace_seconds=0), clock)
    assert everything(storage) == before


def test_nothing_is_removed_from_an_empty_store() -> None:
    storage = Storage("memory://")
    storage.put(part_name(0, 1, "r0"), [memoryview(b"1")])
    assert retain(storage, Retention(versions=1)) == Retained()
    assert len(storage.names("parts")) == 1


@pytest.mark.parametrize("num_later", [1, 2, 5])
def test_a_sleeper_past_retention_is_fenced_and_leaves_nothing(clock: Clock, num_later: int) -> None:
    history = History(clocked(clock), 4)
    sleeper = history.held
    history.claim()
    history.snapshot()
    for _ in range(num_later):
        history.delta()
    clock.seconds += 1000
    retain(history.storage, Retention(versions=1), clock)
    before = versions(history)
    draft = history.log.read(history.version)
    with pytest.raises(FencedError):
        sleeper.commit(draft)
    assert versions(history) == before
    history.delta()
    assert_follows(history)


def test_two_sleepers_of_neighboring_versions_are_both_fenced(clock: Clock) -> None:
    """For a moment the entry of one has the name of the other's parent, but not its bytes."""
    history = History(clocked(clock), 4)
    first = history.held
    history.claim()
    second = history.held
    assert second.head.version == first.head.version + 1
    history.claim()
    history.snapshot()
    history.delta()
    draft = history.log.read(history.version)
    clock.seconds += 1000
    retain(history.storage, Retention(versions=1), clock)
    before = versions(history)

    class Between(StreamLog):
        def read(self, version):
            if version == first.head.version:  # the first one has created its entry, and checks its parent
                with pytest.raises(FencedError):
                    second.commit(draft)
            return super().read(version)

    first._log = Between(history.storage)
    with pytest.raises(FencedError):
        first.commit(draft)
    assert versions(history) == before


@pytest.mark.parametrize("kind", ["claim", "snapshot", "delta"])
def test_a_sleeper_between_entry_and_answer_deletes_nothing(clock: Clock, kind: str) -> None:
    """Its entry is part of the log, although its parent was removed before it wakes up."""
    history = History(clocked(clock), 5)
    storage, history.states[2] = history.storage, history.state
    kept = [0, 1, 2, 3, 4, 5] if kind == "claim" else [0, 2, 3, 4, 5]  # a claim, and the entry before it

    def sleep(*_: object) -> None:
        clock.seconds += 1000
        other = History.__new__(History)
        other.__dict__ |= history.__dict__
        other.claim()
        other.snapshot()
        other.delta()
        clock.seconds += 1000
        retain(storage, Retention(versions=4), clock)
        assert history.log.versions() == kept

    storage.rules.append(calls(nth(1, on("create")), after=sleep))
    if kind == "claim":
        assert history.log.claim().head.version == 2
    else:
        getattr(history, kind)()
    assert versions(history) == kept


def test_a_head_whose_parent_was_removed_is_kept(clock: Clock) -> None:
    """Retention keeps the parent of the head, so a publisher that slept after its last entry continues."""
    history = History(clocked(clock), 6)
    history.snapshot()
    clock.seconds += 1000
    retain(history.storage, Retention(versions=1), clock)
    assert versions(history) == [0, 1, 2]
    history.delta()
    assert versions(history) == [0, 1, 2, 3]


def test_a_claim_of_a_store_that_was_empty_starts_no_second_stream(clock: Clock) -> None:
    storage = clocked(clock)

    def sleep(_: Operation) -> None:
        history = History(storage, 7)
        history.snapshot()
        history.delta()
        clock.seconds += 1000
        retain(storage, Retention(versions=1), clock)

    held = StreamLog(WrappedStorage(storage, calls(nth(1, on("create")), before=sleep))).claim()
    assert (held.head.version, held.head.generation) == (4, 2)
    assert StreamLog(storage).versions() == [0, 2, 3, 4]


def test_entries_that_a_sleeper_left_below_the_log_are_removed(history: History, clock: Clock) -> None:
    storage = history.storage
    stray = storage.read(entry_name(2), max_bytes=1 << 20).tobytes()
    retain(storage, Retention(versions=1, grace_seconds=0), clock)
    storage.create(entry_name(2), stray)
    assert retain(storage, Retention(grace_seconds=0), clock).versions == 1
    assert versions(history) == [0, 6, 7, 8, 9]
    assert_follows(history)


def test_a_listing_that_misses_an_entry_makes_no_gap(history: History, clock: Clock) -> None:
    class Sparse(StreamLog):
        def versions(self, *, after=-1):
            return [version for version in super().versions(after=after) if version not in (4, 8)]

    retain(Sparse(history.storage), Retention(), clock)
    assert versions(history) == list(range(10))


@pytest.mark.parametrize("count", [1, 2, 3, 100])
def test_two_concurrent_passes_remove_what_one_removes(history: History, clock: Clock, count: int) -> None:
    """A complete second pass runs in the middle of the first."""
    storage, retention = history.storage, Retention(versions=1, grace_seconds=0)
    rival = calls(nth(count, on("delete")), before=lambda _: retain(storage, retention, clock))
    retain(WrappedStorage(storage, rival), retention, clock)
    assert versions(history) == [0, 6, 7, 8, 9]
    assert set(storage.names("parts")) == named(history)
    assert_follows(history)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("versions", 0),
        ("versions", 1.5),
        ("versions", True),
        ("num_bytes", 0),
        ("seconds", -1),
        ("seconds", float("nan")),
        ("grace_seconds", None),
        ("grace_seconds", float("inf")),
    ],
)
def test_invalid_bounds_are_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        Retention(**{name: value})


@pytest.mark.advice("StorageError: _Compaction._create")
def test_a_compaction_that_takes_too_long_names_no_parts(history: History, clock: Clock) -> None:
    storage = history.storage

    def wait(_: Operation) -> None:
        clock.seconds += ORPHAN_SECONDS / 2 + 1

    slow = calls(on("put"), before=wait)
    with storage.under(slow), pytest.raises(StorageError, match=r"took 1801 s.*Compact more often"):
        compact(storage, now=clock)
    assert history.log.merged() == []
    assert compact(storage, now=clock)
    assert history.log.merged()


@contextmanager
def _disk_calls(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Record deletions and syncs of directories as ``delete log`` and ``sync log``."""
    calls: list[str] = []
    unlink, fsync = os.unlink, os.fsync

    def delete(path: str | Path) -> None:
        calls.append(f"delete {os.path.relpath(path, root).partition('/')[0]}")
        unlink(path)

    def sync(descriptor: int) -> None:
        calls.append(f"sync {os.path.relpath(Path(f'/proc/self/fd/{descriptor}').readlink(), root)}")
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", delete)
        patch.setattr(os, "fsync", sync)
        yield calls


@pytest.mark.parametrize("num_deltas", [3, 30])
def test_a_pass_syncs_before_and_between_its_deletions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_deltas: int
) -> None:
    storage = Storage(tmp_path.as_uri())
    writer = Writer(storage)
    writer.snapshot()
    for _ in range(num_deltas):
        writer.delta([1])
    compact(storage, fold=10.0)
    writer.snapshot()
    with _disk_calls(tmp_path, monkeypatch) as calls:
        assert retain(storage, Retention(versions=1, grace_seconds=0)).versions == num_deltas
    groups = [what for what, _ in itertools.groupby(calls)]
    directories = {"sync log", "sync merged", "sync ."}
    assert groups.index("delete merged") < groups.index("delete parts")
    assert groups[groups.index("delete parts") + 1 :] == ["delete control"]
    first = groups.index("delete log")
    announced = {
        "sync control",
        "sync control/retention",
        "delete drafts",
        *(each for each in groups if each.startswith("sync drafts/")),
    }
    assert set(groups[:first]) - announced == directories, "a reader may depend on a newer entry that is not on disk"
    deletions = groups[first : groups.index("delete merged") + 1]
    assert deletions == ["delete log", "delete merged"]
    assert set(groups[first + 2 : -2]) == directories, "the entries may be there again, and their parts gone"
    with _disk_calls(tmp_path, monkeypatch) as calls:
        assert retain(storage, Retention(versions=1, grace_seconds=0)) == Retained()
    assert calls == [], "nothing to delete"


@pytest.fixture
def states_writer(clock: Clock) -> Writer:
    """Make the versions 0 claim, 1 snapshot, 2 delta, 3 snapshot, 4 delta of format 2, ten seconds apart."""
    states = TableStates("EXACT_TEST", ((0, 4),), (StateSpec("sum", torch.float32, "range"),))
    writer = Writer(clocked(clock), states=states)
    writer.training = [pack({"rank": rank}, "state") for rank in range(2)]
    for number in range(4):
        clock.seconds += 10
        writer.delta([number]) if number % 2 else writer.snapshot()
    return writer


def objects(manifest: Manifest | None) -> dict[str, int]:
    assert manifest is not None
    return {each.name: each.num_bytes for each in manifest.objects}


def test_the_states_and_training_states_of_kept_versions_stay(states_writer: Writer, clock: Clock) -> None:
    storage, log = states_writer.storage, StreamLog(states_writer.storage)
    kept = objects(log.read(3)) | objects(log.read(4))
    gone = objects(log.read(1)) | objects(log.read(2))
    assert (len(kept), len(gone)) == (8, 8), "each has a part, its states and two training states"
    retained = retain(storage, Retention(grace_seconds=0, versions=1), clock)
    assert set(storage.names("parts")) == kept.keys()
    assert retained == Retained(versions=2, num_bytes=sum(gone.values()))
    clock.seconds += 2 * ORPHAN_SECONDS
    kept |= objects(states_writer.delta([5]))
    assert retain(storage, Retention(grace_seconds=0), clock) == Retained()
    assert set(storage.names("parts")) == kept.keys()


def test_a_training_state_that_a_merged_entry_shares_stays(states_writer: Writer, clock: Clock) -> None:
    storage, log = states_writer.storage, StreamLog(states_writer.storage)
    states_writer.delta([5])
    snapshot, last = log.read(3), log.read(4)
    assert snapshot is not None
    assert last is not None
    merged = replace(last, kind="snapshot", parent=None, snapshot=4, parts=snapshot.parts, merges=last.link)
    assert log.create_merged(merged)
    retain(storage, Retention(grace_seconds=0, versions=1), clock)
    assert log.versions() == [0, 4, 5], "the parent of the head stays"
    clock.seconds += 10
    states_writer.delta([6])
    retain(storage, Retention(grace_seconds=0, versions=1), clock)
    assert log.versions() == [0, 5, 6]
    assert objects(merged).keys() <= set(storage.names("parts"))


def test_the_bytes_of_all_objects_count(states_writer: Writer, clock: Clock) -> None:
    log = StreamLog(states_writer.storage)
    (three, four) = (sum(objects(log.read(version)).values()) for version in (3, 4))
    retain(log, Retention(grace_seconds=0, num_bytes=three + four - 1), clock)
    assert log.versions() == [0, 3, 4]  # the parent of the head stays
    states_writer.snapshot()
    five = sum(objects(log.read(5)).values())
    retain(log, Retention(grace_seconds=0, num_bytes=five + four), clock)
    assert log.versions() == [0, 4, 5]
    retain(log, Retention(grace_seconds=0, num_bytes=five + four - 1), clock)
    assert log.versions() == [0, 4, 5]


def test_orphans_of_failed_versions_with_states_are_deleted(states_writer: Writer, clock: Clock) -> None:
    storage = states_writer.storage
    named = set(storage.names("parts"))
    for author in ("r0", "r0s", "r1t", "c", "cs"):
        storage.put(part_name(4, 1, author), [memoryview(b"left")])
    clock.seconds += 2 * ORPHAN_SECONDS
    states_writer.delta([5])
    assert retain(storage, Retention(), clock).orphans == 5
    assert named <= set(storage.names("parts"))
