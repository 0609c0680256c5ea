"""Sources: which mirror a predictor may continue from when its store fails, and that no row is wrong then."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from delta_tracker import Gate, Predictor, Rollout
from delta_tracker.errors import (
    CorruptPartError,
    HeldVersionError,
    InvalidArgumentError,
    MissingVersionError,
    OlderCopyError,
    StorageError,
    StreamError,
    StreamReplacedError,
)
from delta_tracker.predictor import reader as reader_module
from delta_tracker.stream.format.manifest import entry_name
from delta_tracker.stream.heartbeat import HeartbeatWriter
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.mirroring import Mirror, promote
from delta_tracker.stream.pinning import pin_version
from delta_tracker.stream.reading import source as sources_module
from delta_tracker.stream.reading.fault_delay import FaultDelay
from delta_tracker.stream.reading.position import Position
from delta_tracker.stream.reading.runtime import Runtime
from delta_tracker.stream.reading.source import Sources
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.stream.storage.url import REMOTE_POLL_SECONDS
from tests.heartbeats import read_heartbeats
from tests.predictor.cache_server import cache_server
from tests.predictor.pointed import point_at_the_head
from tests.predictor.serving import eventually
from tests.stores.rules import after, fails, reads
from tests.stores.wrapped import WrappedStorage
from tests.stream.histories import Clock
from tests.stream.streams import FQN, Writer


def flaky() -> WrappedStorage:
    return WrappedStorage(Storage("memory://"))


def cut(storage: WrappedStorage, is_down: bool) -> None:
    storage.rules[:] = [fails(reads)] if is_down else []


def mirrored(writer: Writer, destination: Storage) -> Mirror:
    mirror = Mirror(writer.storage, destination)
    while mirror.step():
        pass
    return mirror


def place_of(writer: Writer) -> Position:
    return Position.after(writer.claim.head)


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module, "_FIRST_PAUSE_SECONDS", 0.0)


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    with clock.of_the_log():
        yield clock


def test_invalid_sources_are_refused() -> None:
    storage = Storage("memory://")
    with pytest.raises(InvalidArgumentError, match="at least one"):
        Sources([])
    with pytest.raises(InvalidArgumentError, match="each store once"):
        Sources([storage, storage])
    with pytest.raises(InvalidArgumentError, match="each store once"):
        Sources(["http://127.0.0.1:1/a", "http://127.0.0.1:1/a/"])
    assert Sources([storage, Storage("memory://")]).current.storage is storage


def test_a_change_of_the_source_does_not_count_as_a_version() -> None:
    writer = Writer(flaky())
    writer.snapshot()
    other = flaky()
    mirrored(writer, other)
    cut(writer.storage, True)
    predictor = Predictor({FQN: torch.zeros(20, 4)}, [writer.storage, other])
    with pytest.raises(StorageError):
        predictor.sync(1)
    assert predictor.sync(1) == writer.claim.head.version


def test_a_predictor_continues_from_a_mirror_with_the_same_entry() -> None:
    writer = Writer(flaky())
    writer.snapshot()
    writer.delta([1])
    other = flaky()
    mirror = mirrored(writer, other)
    table = torch.zeros(20, 4)
    predictor = Predictor({FQN: table}, [writer.storage, other])
    predictor.sync()
    writer.delta([2])
    mirror.step()
    cut(writer.storage, is_down=True)
    with pytest.raises(StorageError):
        predictor.sync()
    assert predictor.sync() == 3
    assert torch.equal(table, writer.table)
    assert predictor.status().resyncs == 0

    cut(writer.storage, is_down=False)  # it does not return by itself
    writer.delta([3])
    assert predictor.sync() == 3
    assert writer.storage.count()
    assert mirror.step()
    assert predictor.sync() == 4
    assert torch.equal(table, writer.table)


def test_a_predictor_that_follows_pins_starts_from_a_mirror() -> None:
    writer = Writer(flaky())
    writer.snapshot()
    writer.delta([1])
    other = flaky()
    mirrored(writer, other)
    cut(writer.storage, is_down=True)
    table = torch.zeros(20, 4)
    predictor = Predictor({FQN: table}, [writer.storage, other], rollout=Rollout(follows_pins=True))
    with pytest.raises(StorageError):
        predictor.sync()
    assert predictor.sync() == 2
    assert torch.equal(table, writer.table)


def test_an_interrupted_rollback_is_completed_at_a_mirror() -> None:
    writer = Writer(flaky())
    writer.snapshot()
    first = writer.table.clone()
    for row in range(3):
        writer.delta([row])
    other = flaky()
    mirrored(writer, other)
    table = torch.zeros(20, 4)
    predictor = Predictor({FQN: table}, [writer.storage, other])
    predictor.sync()
    for number in range(100):  # the first failure after the rollback has begun
        writer.storage.rules[:] = [fails(after(number, reads))]
        with suppress(StorageError):
            predictor.rollback(1)
        if predictor.status().pinned == 1:
            break
    cut(writer.storage, is_down=True)
    with suppress(StorageError):  # the second failure in a row leads to the mirror
        predictor.sync()
    assert predictor.sync() == 1
    assert torch.equal(table, first)


def test_a_rollback_uses_the_url_that_has_the_version() -> None:
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    other = Storage("memory://")
    mirrored(writer, other)  # and then falls behind
    for row in range(3):
        writer.delta([row])
    wanted = writer.table.clone()
    writer.delta([3])
    former = Predictor({FQN: torch.zeros(20, 4)}, writer.storage)
    former.sync()
    table = writer.table.clone()
    predictor = Predictor({FQN: table}, [other, writer.storage])
    predictor.load_state_dict(former.state_dict())
    predictor.rollback(4)
    assert torch.equal(table, wanted)
    with pytest.raises(
        InvalidArgumentError, match="Pass one of the versions up to 1"
    ):  # of the url that was asked first
        Predictor({FQN: table}, [other, writer.storage]).rollback(4)  # without rows, any stream may be meant


def test_follow_continues_from_a_mirror() -> None:
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    first, other = WrappedStorage(writer.storage), Storage("memory://")
    mirror = mirrored(writer, other)
    table = torch.zeros(20, 4)
    predictor = Predictor({FQN: table}, [first, other])
    predictor.follow(poll_seconds=0.001)
    eventually(lambda: predictor.version == 1)
    cut(first, is_down=True)
    writer.delta([1])
    assert mirror.step()
    eventually(lambda: predictor.version == 2 and predictor.error is None)
    predictor.stop()
    assert torch.equal(table, writer.table)
    assert predictor.status().resyncs == 0


@pytest.mark.parametrize("follows", [False, True])
def test_a_predictor_starts_at_another_source_if_the_first_has_no_stream(tmp_path: Path, *, follows: bool) -> None:
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    table = torch.zeros(20, 4)
    predictor = Predictor({FQN: table}, [tmp_path.as_uri(), writer.storage])
    if follows:
        predictor.follow(poll_seconds=0.001)
        eventually(lambda: predictor.version == writer.claim.head.version)
        predictor.stop()
    else:
        assert predictor.sync() == writer.claim.head.version
    assert torch.equal(table, writer.table)


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize("state", ["emptied", "another stream"])
def test_another_stream_is_followed_only_if_no_source_has_the_applied_one(clock: Clock, state: str) -> None:
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    mirror = flaky()
    copier = mirrored(writer, mirror)
    table = torch.zeros(20, 4)
    predictor = Predictor({FQN: table}, [former := WrappedStorage(writer.storage), mirror])
    predictor.sync()
    former.inner = Storage("memory://")
    clock.seconds += 2
    if state == "another stream":
        Writer(former.inner).snapshot()
    with pytest.raises(StreamReplacedError):
        predictor.sync()
    assert predictor.version == 1
    clock.seconds -= 1
    writer.delta([1])
    assert copier.step()
    assert predictor.sync() == 2
    assert torch.equal(table, writer.table)

    cut(mirror, is_down=True)
    for _ in range(4):
        with contextlib.suppress(StreamError):
            predictor.sync()
    assert predictor.status().stream == writer.claim.head.stream, "the mirror may have later versions"
    cut(mirror, is_down=False)
    mirror.inner = Storage("memory://")
    if state == "emptied":
        Writer(former.inner).snapshot()
        with pytest.raises(StreamReplacedError):  # as old as the applied version
            predictor.sync()
        clock.seconds += 1
        former.inner = Storage("memory://")
        Writer(former.inner).snapshot()
    assert predictor.sync() == 1
    assert predictor.status().stream != writer.claim.head.stream
    assert "version 2 to 1" in predictor.status().last_resync


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize("leaves", ["nothing", "an empty directory"])
def test_a_directory_that_was_unmounted_may_have_the_applied_stream(tmp_path: Path, leaves: str) -> None:
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    root = tmp_path / "promoted"
    mirrored(writer, promoted := Storage(root.as_uri(), create=True))
    promote(promoted)
    second = Writer(promoted)
    second.snapshot()
    table = torch.zeros(20, 4)
    predictor = Predictor({FQN: table}, [writer.storage, root.as_uri()])
    predictor.sync()
    stream = predictor.status().stream
    assert stream == second.claim.head.stream
    root.rename(tmp_path / "volume")
    if leaves == "an empty directory":
        root.mkdir()
    for _ in range(4):
        with contextlib.suppress(StreamError):
            predictor.sync()
    assert predictor.status().stream == stream, "a reader goes back to a former stream"
    if leaves == "an empty directory":
        root.rmdir()
    (tmp_path / "volume").rename(root)
    second.delta([1])
    assert predictor.sync() == second.claim.head.version
    assert torch.equal(table, second.table)


def test_a_pinned_version_is_not_left_for_a_stream_that_no_promotion_connects() -> None:
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    good = writer.table.clone()
    writer.delta([1])
    pin_version(writer.storage, 1)
    mirror = flaky()
    mirrored(writer, mirror).copy_pins()
    table = torch.zeros(20, 4)
    predictor = Predictor(
        {FQN: table}, [former := WrappedStorage(writer.storage), mirror], rollout=Rollout(follows_pins=True)
    )
    assert predictor.sync() == 1
    former.inner = Storage("memory://")
    Writer(former.inner).snapshot()
    cut(mirror, is_down=True)
    for _ in range(3):
        with pytest.raises(StreamReplacedError):
            predictor.sync()
    assert torch.equal(table, good)


def test_a_restored_log_with_lower_numbers_is_newer_by_its_generation() -> None:
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    copy = Storage("memory://")
    mirrored(writer, copy)
    for _ in range(4):
        newest = writer.delta([1])
    table = writer.table.clone()
    predictor = Predictor({FQN: table}, copy)
    predictor.load_state_dict(Position.after(newest).to_dict())
    with pytest.raises(OlderCopyError, match="up to version 1, and version 5 is applied"):
        predictor.sync()
    assert predictor.status().lag_versions is None
    after = Writer(copy)
    while after.snapshot().version < 5:
        assert predictor.sync() == after.claim.head.version
        assert torch.equal(table, after.table)
    after.snapshot()
    assert predictor.sync() == 6
    assert predictor.state_dict()["generation"] == after.claim.head.generation


@pytest.mark.parametrize("has_source", [False, True])
def test_an_older_copy_over_http_is_no_newer_stream(tmp_path: Path, *, has_source: bool) -> None:
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    mirror = WrappedStorage(Storage(tmp_path.as_uri()))
    mirrored(writer, mirror)
    newest = writer.delta([1])
    table = writer.table.clone()
    with cache_server(Storage(tmp_path.as_uri())) as cache:
        point_at_the_head(mirror)
        predictor = Predictor({FQN: table}, [cache.url, writer.storage] if has_source else cache.url)
        predictor._reader.source.fault_delay = FaultDelay(seconds=0.0)
        predictor.load_state_dict(Position.after(newest).to_dict())
        if has_source:
            writer.delta([2])
            assert predictor.sync() == 3
        else:
            with pytest.raises(OlderCopyError, match="up to version 1, and version 2 is applied"):
                predictor.sync()
            assert predictor.status().lag_versions is None
        assert torch.equal(table, writer.table)


@pytest.mark.parametrize("fault", ["part", "entry"])
@pytest.mark.parametrize("copy", ["lags", "fails"])
def test_what_is_lost_is_not_read_from_a_copy_that_does_not_have_it(fault: str, copy: str) -> None:
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    other = flaky()
    mirrored(writer, other)
    table = torch.zeros(20, 4)
    predictor = Predictor({FQN: table}, [writer.storage, other])
    predictor.sync()
    before = table.clone()
    lost = writer.delta([1])
    writer.delta([2])
    cut(other, copy == "fails")
    writer.storage.delete(lost.parts[0].name if fault == "part" else entry_name(lost.version))
    with pytest.raises((CorruptPartError, MissingVersionError)):
        predictor.sync()
    assert predictor.version == 1
    assert torch.equal(table, before)
    newest = writer.snapshot()
    assert predictor.sync() == newest.version
    assert torch.equal(table, writer.table)


@pytest.mark.parametrize("is_given", [False, True])
def test_heartbeats_follow_a_failover(monkeypatch: pytest.MonkeyPatch, *, is_given: bool) -> None:
    monkeypatch.setattr(HeartbeatWriter, "is_due", lambda self: True)
    writer = Writer(flaky())
    writer.snapshot()
    other, given = flaky(), Storage("memory://")
    mirrored(writer, other)
    predictor = Predictor(
        {FQN: torch.zeros(20, 4)}, [writer.storage, other], name="p", heartbeats=given if is_given else None
    )
    predictor.sync()
    cut(writer.storage, True)
    predictor.follow(poll_seconds=0.001)
    eventually(lambda: predictor._reader.storage is other)
    writer.storage.delete("predictors/p.json")
    eventually(lambda: bool(read_heartbeats(given if is_given else other)))
    predictor.stop()
    stores = {"first": writer.storage, "other": other, "given": given}
    cut(writer.storage, False)
    assert [name for name, store in stores.items() if read_heartbeats(store)] == (["given"] if is_given else ["other"])


def test_the_polling_interval_is_that_of_the_present_source(tmp_path: Path) -> None:
    local = WrappedStorage(Storage(tmp_path))
    writer = Writer(local)
    writer.snapshot()
    with cache_server(Storage(tmp_path.as_uri())) as cache:
        point_at_the_head(local)
        predictor = Predictor(writer.model(), [local, cache.url])
        predictor.follow()
        eventually(lambda: predictor.version == writer.claim.head.version)
        assert predictor.status().poll_seconds < REMOTE_POLL_SECONDS
        cut(local, is_down=True)
        eventually(lambda: predictor.status().poll_seconds >= REMOTE_POLL_SECONDS)
        predictor.stop()


def _shorter(writer: Writer, copy: Storage) -> None:
    mirrored(writer, copy)
    for version in StreamLog(copy).versions()[-2:]:
        copy.delete(entry_name(version))


def _claimed(writer: Writer, copy: Storage) -> None:
    _shorter(writer, copy)
    StreamLog(copy).claim()


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize(
    ("fill", "is_used"), [(mirrored, True), (_shorter, False), (_claimed, False), (lambda *_: None, False)]
)
def test_a_source_without_the_applied_version_is_not_used(
    fill: Callable[[Writer, Storage], object], is_used: bool
) -> None:
    writer = Writer(flaky())
    writer.snapshot()
    for number in range(3):
        writer.delta([number])
    other = Storage("memory://")
    fill(writer, other)
    predictor = Predictor(writer.model(), [writer.storage, other])
    predictor.sync()
    cut(writer.storage, is_down=True)
    for _ in range(4):
        with contextlib.suppress(StorageError):
            predictor.sync()
        assert predictor.version == 4
    assert (predictor._reader.storage is other) == is_used


def test_a_failed_source_is_asked_again_after_a_growing_pause() -> None:
    clock = Clock()
    sources = Sources([Storage("memory://"), Storage("memory://")], runtime=Runtime(monotonic=clock))
    first, other = sources.all
    asked = []
    for second in range(1500):
        if other in sources.due():
            asked.append(second)
            sources.failed(other)
        clock.seconds += 1
    assert asked == [0, 30, 90, 210, 450, 750, 1050, 1350]
    clock.seconds += 300
    sources.failed(first)
    sources.use(other)
    assert sources.due() == [other], "the first one has just failed"
    clock.seconds += 300
    assert sources.due() == [other, first]


@pytest.mark.usefixtures("no_pause")
def test_a_promoted_mirror_is_another_stream() -> None:
    """Up to the fork, a promoted mirror has the entries of the source. Beyond it, it has other rows."""
    writer = Writer(flaky())
    writer.snapshot()
    writer.delta([1])
    promoted = flaky()
    mirrored(writer, promoted)
    promote(promoted)
    second = Writer(promoted)
    table = torch.zeros(20, 4)
    predictor = Predictor({FQN: table}, [writer.storage, promoted])
    predictor.sync()
    before = table.clone()
    cut(writer.storage, is_down=True)
    for _ in range(2):
        with pytest.raises(StorageError):
            predictor.sync()
    assert torch.equal(table, before), "the rows stay until the first snapshot"
    assert predictor.version == 2
    second.change(list(range(20)))
    second.snapshot()
    predictor.sync()
    assert torch.equal(table, second.table)


def test_a_promotion_is_followed_over_http_to_a_mirror_that_begins_later(tmp_path: Path) -> None:
    """The mirror has the claim of the promotion, but not the version after it."""
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    promoted, mirror = Storage("memory://"), Storage(tmp_path.as_uri(), create=True)
    mirrored(writer, promoted)
    promote(promoted)
    second = Writer(promoted)
    second.change([5])
    newest = second.snapshot().version
    with cache_server(mirror) as cache:
        Mirror(promoted, mirror).run(stop=threading.Event(), poll_seconds=0.001, once=True)
        assert [version for version in StreamLog(mirror).versions() if version < newest] == [2]
        table = torch.zeros(20, 4)
        predictor = Predictor({FQN: table}, [writer.storage, cache.url])
        assert predictor.sync(1) == 1
        assert predictor.sync() == newest
    assert torch.equal(table, second.table)


def _held(writer: Writer, mirror: Storage) -> Predictor:
    """Return a predictor of a source and a mirror, whose gate holds the newest version of the source, number 2."""
    writer.snapshot()
    mirrored(writer, mirror)
    predictor = Predictor(writer.model(), [writer.storage, mirror], rollout=Rollout(gate=Gate()))
    predictor.sync()
    writer.table[3] = torch.nan
    writer.write("delta", writer.blocks([3]))
    with pytest.raises(HeldVersionError):
        predictor.sync()
    return predictor


def test_a_snapshot_of_a_promoted_mirror_skips_a_held_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """The former source can still be read, so that only a look at all urls finds the snapshot."""
    writer, mirror = Writer(Storage("memory://")), flaky()
    predictor = _held(writer, mirror)
    promote(mirror)
    newest = Writer(mirror).snapshot().version
    mirror.take()
    with pytest.raises(HeldVersionError):
        predictor.sync()
    assert not mirror.count(), "all urls are asked once a minute"
    monkeypatch.setattr(reader_module, "_SURVEY_SECONDS", 0.0)
    assert predictor.sync() == newest
    assert predictor.status().stream != writer.claim.head.stream
    assert predictor.status().error is None


def test_a_merged_version_of_a_mirror_does_not_skip_a_held_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "_SURVEY_SECONDS", 0.0)
    writer, mirror = Writer(Storage("memory://")), Storage("memory://")
    predictor = _held(writer, mirror)
    writer.delta([3])
    mirrored(writer, mirror)
    assert compact(mirror, fold=1e9) is not None
    mirror.delete(entry_name(2))
    with pytest.raises(HeldVersionError):
        predictor.sync()
    assert predictor.version == 1
