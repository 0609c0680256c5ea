"""Mirrors: what they copy, in which order, where they stop, and that readers of the copy get the source's rows."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
import xxhash

from delta_tracker import ModelTarget, Predictor, Rollout
from delta_tracker.errors import (
    CorruptPartError,
    InvalidArgumentError,
    MalformedError,
    MirrorDivergedError,
    StorageError,
    UnreadablePointerError,
)
from delta_tracker.stream import mirroring as mirror_module
from delta_tracker.stream.format import object_reader
from delta_tracker.stream.format.manifest import Merged, entry_name
from delta_tracker.stream.format.parse import parse_manifest
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.maintenance.retention import Retention, retain
from delta_tracker.stream.mirroring import Mirror
from delta_tracker.stream.pin import Pin, newest_pin
from delta_tracker.stream.pinning import pin_version
from delta_tracker.stream.pointer import POINTER_NAME, read_pointer
from delta_tracker.stream.reading.path import path_to
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import StateSpec, TableStates
from tests.predictor.cache_server import cache_server
from tests.predictor.pointed import point_at_the_head
from tests.stores.rules import after, calls, fails, hides, nth, on
from tests.stores.wrapped import Operation, WrappedStorage
from tests.stream.streams import FQN, Writer
from tests.waiting import eventually

_ALL = Retention(versions=1, grace_seconds=0.0)
_PREFIXES = ("log", "merged", "parts", "control", "predictors", "publishers", "drafts", "probe")
_STATES = TableStates("ADAM", ((0, 4),), (StateSpec("momentum1", torch.float32, "columns"),))


def prefix(source: Storage) -> WrappedStorage:
    """Return a destination that fails the test if an entry is not the source's, or comes before its objects."""
    destination = WrappedStorage(Storage("memory://"))

    def check(entry: Operation) -> None:
        name, data = entry.name, entry.arguments["data"]
        there = source.read(name, max_bytes=1 << 20)
        assert there is not None
        assert there.tobytes() == data, f"{name} is not the source's"
        has_none = len(data) < 10 or name.startswith("control/")
        for each in () if has_none else parse_manifest(name, data).objects:
            assert destination.inner.size(each.name) == each.num_bytes

    destination.rules.append(calls(on("create"), before=check))
    return destination


def everything(storage: Storage) -> dict[str, bytes]:
    found = {}
    for name in (name for prefix in _PREFIXES for name in storage.names(prefix) if name != POINTER_NAME):
        data = storage.read(name, max_bytes=1 << 30)
        assert data is not None
        found[name] = data.tobytes()
    return found


def entries(storage: Storage) -> list[int]:
    return StreamLog(storage).versions()


def table_at(storage: Storage, num_rows: int = 20) -> tuple[int | None, torch.Tensor]:
    table = torch.full((num_rows, 4), -1.0)
    predictor = Predictor(ModelTarget({FQN: table}, dense=False), storage)
    predictor.sync()
    assert predictor.status().resyncs == 0
    return predictor.version, table


def copy(mirror: Mirror) -> None:
    mirror.run(stop=threading.Event(), poll_seconds=0.001, once=True)


@pytest.fixture
def writer() -> Writer:
    torch.manual_seed(0)
    writer = Writer(Storage("memory://"))
    writer.delta([7])
    writer.snapshot()
    for number in range(3):
        writer.delta([number, 10])
    return writer


@pytest.mark.parametrize("has_states", [False, True])
def test_a_copy_has_the_same_bytes_from_the_newest_snapshot_on(has_states: bool) -> None:
    torch.manual_seed(0)
    writer = Writer(Storage("memory://"), states=_STATES if has_states else None)
    writer.training = [b"rank 0", b"rank 1"] if has_states else []
    writer.delta([7])
    writer.snapshot()
    writer.delta([1, 2])
    destination = prefix(writer.storage)
    mirror = Mirror(writer.storage, destination)
    copy(mirror)
    source = everything(writer.storage)
    found = everything(destination)
    assert entries(destination) == [2, 3]
    assert found.items() <= source.items()
    assert {each.name for version in (2, 3) for each in StreamLog(destination).read(version).objects} < found.keys()
    assert table_at(destination) == (3, pytest.approx(writer.table))

    writer.claim = StreamLog(writer.storage).claim()  # another publisher
    writer.delta([3])
    assert mirror.step()
    assert mirror.step()
    assert not mirror.step()
    assert entries(destination) == [2, 3, 4, 5]
    assert everything(destination).items() <= everything(writer.storage).items()
    version, table = table_at(destination)
    assert version == 5
    assert torch.equal(table, writer.table)
    copy(Mirror(writer.storage, destination))  # another process
    assert entries(destination) == [2, 3, 4, 5]


def test_nothing_is_copied_before_the_first_snapshot() -> None:
    writer, destination = Writer(Storage("memory://")), Storage("memory://")
    mirror = Mirror(writer.storage, destination)
    assert not mirror.step()
    writer.delta([1])
    assert not mirror.step()
    assert mirror.head is None
    assert everything(destination) == {}
    writer.snapshot()
    copy(mirror)
    assert table_at(destination)[0] == 2
    assert mirror.head == StreamLog(writer.storage).head()


@pytest.mark.parametrize("memory_bytes", [0, 1 << 20])
@pytest.mark.parametrize("has_states", [False, True])
def test_a_corrupt_object_is_not_copied(has_states: bool, memory_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_reader, "_READ_BYTES", 100)
    writer = Writer(Storage("memory://"), states=_STATES if has_states else None)
    writer.training = [b"rank 0"] if has_states else []
    entry = writer.snapshot()
    for stored in entry.objects:
        intact = writer.storage.read(stored.name, max_bytes=1 << 20)
        assert intact is not None
        for position in {0, 99, 100, len(intact) // 2, len(intact) - 20, len(intact) - 1}:
            data = intact.copy()
            data[position] ^= 1
            writer.storage.replace(stored.name, data.tobytes())
            destination = Storage("memory://")
            with pytest.raises(CorruptPartError, match=stored.name):
                copy(Mirror(writer.storage, destination, memory_bytes=memory_bytes))
            assert stored.name not in everything(destination)
            assert entries(destination) == []
        for data in (intact[:-1], intact[:0]):
            writer.storage.replace(stored.name, data.tobytes())
            with pytest.raises(CorruptPartError, match=stored.name):
                copy(Mirror(writer.storage, Storage("memory://"), memory_bytes=memory_bytes))
        writer.storage.replace(stored.name, intact.tobytes())
    destination = prefix(writer.storage)
    copy(Mirror(writer.storage, destination, memory_bytes=memory_bytes))
    assert everything(destination).items() <= everything(writer.storage).items()


@pytest.mark.parametrize("memory_bytes", [0, 1 << 20])
def test_an_object_of_an_interrupted_copy_is_checked(writer: Writer, memory_bytes: int) -> None:
    destination = Storage("memory://")
    snapshot, delta = (StreamLog(writer.storage).read(version) for version in (2, 3))
    assert snapshot is not None
    assert delta is not None
    wrong = bytes(snapshot.parts[0].num_bytes)
    destination.replace(snapshot.parts[0].name, wrong)
    intact = writer.storage.read(delta.parts[0].name, max_bytes=1 << 20)
    assert intact is not None
    destination.replace(delta.parts[0].name, intact.tobytes())
    before = destination.requests["write"]
    copy(Mirror(writer.storage, destination, memory_bytes=memory_bytes, pointer_seconds=None))
    assert everything(destination).items() <= everything(writer.storage).items()
    assert destination.requests["write"] - before == 4 + 3, "four entries, and all objects but the intact one"


def test_a_mirror_stops_if_another_program_appends_to_the_destination(writer: Writer) -> None:
    destination = Storage("memory://")
    mirror = Mirror(writer.storage, destination)
    copy(mirror)
    StreamLog(destination).claim()
    writer.delta([1])
    before = everything(destination)
    with pytest.raises(MirrorDivergedError, match="another program has appended"):
        mirror.step()
    for each in (mirror, Mirror(writer.storage, destination)):
        with pytest.raises(MirrorDivergedError, match="at version 6: the entries have other bytes"):
            each.step()
    after = everything(destination)
    assert {name: data for name, data in after.items() if name.startswith("log/")} == {
        name: data for name, data in before.items() if name.startswith("log/")
    }


def test_a_mirror_stops_at_another_stream(writer: Writer) -> None:
    destination = Storage("memory://")
    copy(Mirror(writer.storage, destination))
    other = Writer(Storage("memory://"))
    for _ in range(8):
        other.snapshot()
    before = everything(destination)
    with pytest.raises(MirrorDivergedError, match="the entries have other bytes"):
        Mirror(other.storage, destination).step()
    shorter = Writer(Storage("memory://"))
    shorter.snapshot()
    with pytest.raises(MirrorDivergedError, match="neither this version nor a newer one"):
        Mirror(shorter.storage, destination).step()
    assert everything(destination) == before


@pytest.mark.advice("StorageError: _empty_error DirectoryStore._has_folder")
@pytest.mark.parametrize("is_emptied", [False, True], ids=["missing", "mount point"])
@pytest.mark.parametrize("restarts", [False, True], ids=["running", "restarted"])
def test_a_mirror_waits_for_a_source_that_is_not_mounted(
    tmp_path: Path,
    is_emptied: bool,
    restarts: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mirror_module, "_CHECK_SECONDS", 0.0)
    path = tmp_path / "source"
    writer, destination = Writer(Storage(path.as_uri(), create=True, fsync=False)), Storage("memory://")
    writer.snapshot()
    mirror = Mirror(Storage(path.as_uri()), destination)
    copy(mirror)
    writer.delta([1])
    away = path.rename(tmp_path / "away")
    if is_emptied:
        path.mkdir()
    if restarts:
        mirror = Mirror(Storage(path.as_uri()), destination)
    stop = threading.Event()
    thread = threading.Thread(target=mirror.run, kwargs={"stop": stop, "poll_seconds": 0.001})
    thread.start()
    try:
        eventually(lambda: "Mount its volume" in caplog.text)
        if is_emptied:
            path.rmdir()
        away.rename(path)
        eventually(lambda: entries(destination) == [1, 2])
    finally:
        stop.set()
        thread.join()
    assert table_at(destination) == (2, pytest.approx(writer.table))


def test_a_source_that_vanishes_during_a_copy_is_waited_for(writer: Writer) -> None:
    """Whichever operation is the first that finds nothing."""
    source = WrappedStorage(writer.storage)
    copy(Mirror(source, Storage("memory://")))
    for number in range(1, source.count() + 1):
        source, destination = WrappedStorage(writer.storage), Storage("memory://")
        source.rules.append(hides(lambda _: True, after(number)))
        mirror = Mirror(source, destination)
        with suppress(StorageError):
            while mirror.step():
                pass
        source.rules.clear()
        copy(mirror)
        assert entries(destination) == [2, 3, 4, 5]


def test_an_empty_destination_says_that_it_waits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mirror = Mirror(Storage((tmp_path / "source").as_uri()), Storage("memory://"))
    for _ in range(3):
        assert not mirror.step()
    assert [each.getMessage() for each in caplog.records] == [
        f"waiting for the first snapshot: url={(tmp_path / 'source').as_uri()}"
    ]


def test_a_page_instead_of_the_pointer_of_the_source_is_reported(writer: Writer) -> None:
    point_at_the_head(writer.storage)
    with cache_server(writer.storage) as cache:
        destination = Storage("memory://")
        copy(Mirror(Storage(cache.url), destination))
        writer.delta([1])
        writer.storage.replace(POINTER_NAME, b"<html>Please log in</html>")
        for target in (destination, Storage("memory://")):
            with pytest.raises(UnreadablePointerError, match="an HTML or XML page: '<html>Please log in"):
                copy(Mirror(Storage(cache.url), target))
        point_at_the_head(writer.storage)
        copy(Mirror(Storage(cache.url), destination))
        assert entries(destination)[-1] == 6


def test_a_mirror_stops_at_an_entry_that_does_not_follow(writer: Writer) -> None:
    """The source was restored from a backup, and continued: the destination has versions that it lost."""
    destination = Storage("memory://")
    mirror = Mirror(writer.storage, destination)
    copy(mirror)
    writer.storage.delete(entry_name(5))
    writer.claim = StreamLog(writer.storage).claim()  # version 5
    writer.delta([1])
    with pytest.raises(MirrorDivergedError, match="at version 6: its entry does not follow"):
        mirror.step()
    with pytest.raises(MirrorDivergedError, match="at version 5"):
        Mirror(writer.storage, destination).step()


@pytest.mark.advice("MirrorDivergedError: Mirror._diverged")
def test_a_mirror_that_was_passed_by_retention_needs_an_empty_destination(writer: Writer) -> None:
    destination = Storage("memory://")
    mirror = Mirror(writer.storage, destination)
    copy(mirror)
    for _ in range(3):
        writer.snapshot()
    retain(writer.storage, _ALL, now=lambda: time.time() + 1)
    assert entries(writer.storage)[-2:] == [7, 8]
    before = everything(destination)
    assert not mirror.step(), "the source is listed once a minute"
    with pytest.raises(MirrorDivergedError, match="at version 6: the source has deleted this version"):
        Mirror(writer.storage, destination).step()
    assert everything(destination) == before
    empty = Storage("memory://")
    copy(Mirror(writer.storage, empty))
    assert table_at(empty)[0] == 8


def test_a_claim_whose_name_retention_had_deleted_is_not_copied(writer: Writer) -> None:
    destination = Storage("memory://")
    copy(Mirror(writer.storage, destination))
    for _ in range(3):
        writer.snapshot()
    retain(writer.storage, _ALL, now=lambda: time.time() + 1)
    # The claim of a publisher that had read version 5 as the head, and was suspended.
    late = Storage("memory://")
    copy(Mirror(destination, late))
    StreamLog(late).claim()
    data = late.read(entry_name(6), max_bytes=1 << 20)
    assert data is not None
    assert writer.storage.create(entry_name(6), data.tobytes())
    with pytest.raises(MirrorDivergedError, match="the source has deleted this version"):
        Mirror(writer.storage, destination).step()
    assert entries(destination)[-1] == 5


@pytest.mark.parametrize("is_claim", [False, True])
def test_an_altered_entry_is_copied_once_the_log_continues_after_it(writer: Writer, is_claim: bool) -> None:
    """A publisher whose entry was altered on the way to the store continues after the stored bytes."""
    destination = prefix(writer.storage)
    mirror = Mirror(writer.storage, destination)
    copy(mirror)
    if is_claim:
        writer.claim = StreamLog(writer.storage).claim()
    version = writer.claim.head.version + 1
    altered = [b"{", b"}"]
    for number, data in enumerate(altered):
        assert writer.storage.create(entry_name(version + number), data)
        writer.claim.head = replace(
            writer.claim.head,
            version=version + number,
            parent=writer.claim.head.link,
            xxh3=xxhash.xxh3_128_hexdigest(data),
        )
    assert not mirror.step(), "nothing shows yet that the altered entry is part of the log"
    copy(Mirror(writer.storage, destination, retention=_ALL))
    writer.snapshot()
    assert mirror.step()
    again = Mirror(writer.storage, destination)  # its newest entry at the destination is malformed
    while again.step():
        pass
    assert entries(destination) == entries(writer.storage)[2:]
    copy(Mirror(writer.storage, destination))
    version, table = table_at(destination)
    assert version == writer.claim.head.version
    assert torch.equal(table, writer.table)


def test_a_malformed_entry_of_another_log_is_not_copied(writer: Writer) -> None:
    destination = prefix(writer.storage)
    mirror = Mirror(writer.storage, destination)
    copy(mirror)
    assert writer.storage.create(entry_name(6), b"{")
    other = Writer(Storage("memory://"))
    for _ in range(8):
        other.snapshot()
    data = other.storage.read(entry_name(7), max_bytes=1 << 20)
    assert data is not None
    assert writer.storage.create(entry_name(7), data.tobytes())
    with pytest.raises(MalformedError):
        mirror.step()
    assert entries(destination)[-1] == 5


def test_a_mirror_starts_at_a_merged_snapshot_if_no_other_is_left(writer: Writer) -> None:
    assert compact(writer.storage, fold=1e-9) is not None
    writer.delta([3])
    writer.delta([4])
    retain(writer.storage, _ALL, now=lambda: time.time() + 1)
    assert 2 not in entries(writer.storage)
    destination = prefix(writer.storage)
    copy(Mirror(writer.storage, destination))
    assert entries(destination) == [6, 7]
    assert everything(destination).items() <= everything(writer.storage).items()
    version, table = table_at(destination)
    assert version == 7
    assert torch.equal(table, writer.table)


def test_a_mirror_starts_at_a_merged_snapshot_that_ends_before_a_claim(writer: Writer) -> None:
    """Retention keeps the entry before a claim, but not its parts."""
    assert compact(writer.storage, fold=1e-9) is not None
    storage = writer.storage
    writer.claim = StreamLog(storage).claim()
    writer.delta([3])
    writer.delta([4])
    retain(storage, _ALL, now=lambda: time.time() + 1)
    before = StreamLog(storage).read(5)
    assert before is not None
    assert [storage.size(each.name) for each in before.objects] == [None]
    destination = Storage("memory://")
    copy(Mirror(storage, destination))
    assert entries(destination) == [5, 6, 7, 8]
    assert everything(destination).items() <= everything(storage).items()
    version, table = table_at(destination)
    assert version == 8
    assert torch.equal(table, writer.table)


def test_an_only_snapshot_without_its_part_is_reported_as_damage(writer: Writer) -> None:
    """Retention would keep the part of a snapshot before a claim, as long as there is no newer one."""
    snapshot = writer.snapshot()
    writer.claim = StreamLog(writer.storage).claim()
    writer.storage.delete(snapshot.parts[0].name)
    with pytest.raises(CorruptPartError, match="does not exist"):
        Mirror(writer.storage, Storage("memory://")).step()


def test_merged_entries_are_copied_once_the_log_has_reached_them(writer: Writer) -> None:
    destination = prefix(writer.storage)
    mirror = Mirror(writer.storage, destination)
    merged = compact(writer.storage, fold=10.0)
    assert merged is not None
    assert mirror.step()
    assert mirror.copy_merged() == 0, "the destination has version 2, and the merged delta ends at 5"
    copy(mirror)
    assert destination.names("merged") == writer.storage.names("merged")
    assert mirror.copy_merged() == 0
    newer = [writer.delta([1]) for _ in range(4)]
    longer = compact(writer.storage, fold=10.0, min_versions=2)
    assert longer is not None
    assert newer
    copy(mirror)
    assert everything(destination).items() <= everything(writer.storage).items()
    assert StreamLog(destination).longest_merged(2) == StreamLog(writer.storage).longest_merged(2)


def test_a_source_behind_a_cache_is_copied_exactly(writer: Writer) -> None:
    """The cache serves damaged parts, and has old answers for entries, which the mirror reads past it."""
    merged = compact(writer.storage, fold=10.0)
    assert merged is not None
    data = pinned(writer, 1, 4)
    point_at_the_head(writer.storage)
    with cache_server(writer.storage, refreshes=False) as cache:
        for version in (3, 4):
            cache.flip(entry_name(version))
        cache.hold(entry_name(5))
        snapshot = StreamLog(writer.storage).read(2)
        assert snapshot is not None
        cache.flip(snapshot.parts[0].name)
        cache.truncate(merged.parts[0].name)
        destination = prefix(writer.storage)
        copy(Mirror(Storage(cache.url), destination))
        found = everything(destination)
        assert entries(destination) == [2, 3, 4, 5]
        assert found.items() <= everything(writer.storage).items()
        assert Merged.of(merged).name in found
        assert data in found.values()
        assert cache.uncached[snapshot.parts[0].name] == cache.plain[snapshot.parts[0].name] == 1
        third = StreamLog(writer.storage).read(3)
        assert third is not None
        assert cache.uncached[third.parts[0].name] == 0, "parts are read through the cache"
        writer.delta([1])
        copy(Mirror(Storage(cache.url), destination))
        assert entries(destination)[-1] == 5, "the pointer does not show version 6 yet"
        point_at_the_head(writer.storage)
        copy(Mirror(Storage(cache.url), destination))
        assert entries(destination)[-1] == 6
        other = Writer(Storage("memory://"))
        for _ in range(8):
            other.snapshot()
        point_at_the_head(other.storage)
        cache.origin = other.storage
        with pytest.raises(MirrorDivergedError):
            Mirror(Storage(cache.url), destination).step()


def test_a_copy_is_read_over_http_by_its_own_pointer(writer: Writer) -> None:
    destination = Storage("memory://")
    mirror = Mirror(writer.storage, destination)
    copy(mirror)
    with cache_server(destination) as cache:
        for number in range(3):
            version, table = table_at(Storage(cache.url))
            assert version == 5 + number
            assert torch.equal(table, writer.table)
            if number == 2:
                destination.delete(POINTER_NAME)
                mirror = Mirror(writer.storage, destination)
            writer.delta([number])
            copy(mirror)
        compact(writer.storage, fold=10.0)
        copy(mirror)
        pointer = read_pointer(destination)
        assert pointer is not None
        assert (pointer.version, pointer.oldest, pointer.merged) == (8, 2, ((3, 8),))


def pinned(writer: Writer, counter: int, version: int) -> bytes:
    entry = StreamLog(writer.storage).read(version)
    assert entry is not None
    pin = Pin(
        counter=counter,
        stream=entry.stream,
        kind="pin",
        version=version,
        xxh3=entry.xxh3,
        bad=version + 1,
        reason="",
        time=0.0,
    )
    data = msgspec.json.encode(pin)
    assert writer.storage.create(f"control/pins/{counter:020d}.json", data)
    return data


def test_pins_are_copied_once_the_destination_has_the_pinned_version(writer: Writer) -> None:
    destination = Storage("memory://")
    mirror = Mirror(writer.storage, destination)
    data = [pinned(writer, 1, 1), pinned(writer, 2, 4)]
    assert mirror.step()
    assert mirror.copy_pins() == 0, "the destination has version 2"
    copy(mirror)
    names = [f"control/pins/{counter:020d}.json" for counter in (1, 2)]
    assert {name: each for name, each in everything(destination).items() if name in names} == dict(
        zip(names, data, strict=True)
    )
    data.append(pinned(writer, 3, 5))
    again = Mirror(writer.storage, destination)
    assert again.copy_pins() == 3
    assert again.copy_pins() == mirror.copy_pins() - 1 == 0
    pinned(writer, 4, 2)
    destination.create(f"control/pins/{4:020d}.json", b"another")
    with pytest.raises(MirrorDivergedError, match=f"{4:020d}"):
        again.copy_pins()


def test_a_malformed_newest_pin_is_copied_with_the_one_before_it(writer: Writer) -> None:
    destination = Storage("memory://")
    mirror = Mirror(writer.storage, destination)
    writer.storage.create(f"control/pins/{1:020d}.json", b"{}")
    copy(mirror)
    assert mirror.copy_pins() == 0, "no predictor follows it"
    pinned(writer, 2, 4)
    writer.storage.create(f"control/pins/{3:020d}.json", b"{}")
    assert mirror.copy_pins() == 3
    assert newest_pin(destination) == newest_pin(writer.storage) is not None


@pytest.mark.parametrize("is_merged", [False, True])
def test_a_mirror_that_starts_while_a_pin_applies_copies_the_path_of_the_pin(writer: Writer, is_merged: bool) -> None:
    if is_merged:
        merged = compact(writer.storage, fold=1e-9)
        assert merged is not None
        assert merged.kind == "snapshot"
        writer.delta([3])
    good = StreamLog(writer.storage).versions()[-1]
    expected = writer.table.clone()
    writer.delta([4])
    writer.snapshot()
    pin_version(writer.storage, good)
    retain(writer.storage, _ALL)
    destination = prefix(writer.storage)
    copy(Mirror(writer.storage, destination))
    assert newest_pin(destination) == newest_pin(writer.storage)
    assert entries(destination)[-1] == entries(writer.storage)[-1]
    table = torch.full((20, 4), -1.0)
    predictor = Predictor(ModelTarget({FQN: table}, dense=False), destination, rollout=Rollout(follows_pins=True))
    predictor.sync()
    assert predictor.version == good
    assert torch.equal(table, expected)


def test_a_mirror_starts_above_a_pin_whose_path_is_not_complete(
    writer: Writer, caplog: pytest.LogCaptureFixture
) -> None:
    good = StreamLog(writer.storage).versions()[-1]
    writer.delta([4])
    writer.snapshot()
    newest = StreamLog(writer.storage).versions()[-1]
    pin_version(writer.storage, good)
    writer.storage.delete(entry_name(good - 1))
    destination = prefix(writer.storage)
    copy(Mirror(writer.storage, destination))
    assert "cannot follow the pin" in caplog.text
    assert newest_pin(destination) is None
    table = torch.zeros(20, 4)
    assert (
        Predictor(ModelTarget({FQN: table}, dense=False), destination, rollout=Rollout(follows_pins=True)).sync()
        == newest
    )
    assert torch.equal(table, writer.table)


def test_the_destination_has_its_own_retention(writer: Writer) -> None:
    destination = Storage("memory://")
    mirror = Mirror(writer.storage, destination, retention=_ALL)
    for _ in range(20):
        writer.snapshot()
        copy(mirror)
    assert len(entries(writer.storage)) > 20
    assert len(entries(destination)) <= 3
    version, table = table_at(destination)
    assert version == writer.claim.head.version
    assert torch.equal(table, writer.table)
    path = path_to(StreamLog(destination), version)
    assert [each.version for each in path] == [version]


def test_failures_of_the_stores_are_repeated(writer: Writer) -> None:
    fault = fails(nth(range(1, 6), on("create")), "connection reset")
    destination, stop = WrappedStorage(Storage("memory://"), fault), threading.Event()
    with pytest.raises(StorageError, match="connection reset"):
        copy(Mirror(writer.storage, destination))
    copied: list[int] = []

    def seen(entry: object) -> None:
        copied.append(entry.version)
        if entry.version == 5:
            stop.set()

    Mirror(writer.storage, destination).run(stop=stop, poll_seconds=0.001, on_entry=seen)
    assert copied == [2, 3, 4, 5]


@pytest.mark.parametrize(
    ("destination", "argument"),
    [
        ("http://127.0.0.1:1/stream", "destination"),
        ("s3://bucket/source", "destination"),
        ("s3://bucket/source/", "destination"),
    ],
)
def test_invalid_destinations_are_refused(destination: str, argument: str) -> None:
    source = Storage("s3://bucket/source", options={"region": "us-east-1"})
    with pytest.raises(InvalidArgumentError, match=argument):
        Mirror(source, Storage(destination))


@pytest.mark.parametrize("spelling", ["slash", "dot", "link"])
def test_a_mirror_on_its_own_source_is_refused(tmp_path: Path, spelling: str) -> None:
    directory = tmp_path / "source"
    source = Storage(directory.as_uri(), create=True)
    link = tmp_path / "link"
    link.symlink_to(directory)
    uri = directory.as_uri()
    url = {"slash": uri + "/", "dot": tmp_path.as_uri() + "/./source", "link": link.as_uri()}[spelling]
    with pytest.raises(InvalidArgumentError, match="another store than the source"):
        Mirror(source, Storage(url, create=True), retention=_ALL)
