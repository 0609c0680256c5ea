"""Heartbeats: objects that predictors write next to a stream, and how any content of them is read."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from delta_tracker import Predictor, Rollout
from delta_tracker.errors import InvalidArgumentError, NoSnapshotError, StorageError, StreamError
from delta_tracker.stream import heartbeat as heartbeat_module
from delta_tracker.stream.heartbeat import Heartbeat, HeartbeatWriter, write_heartbeat
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.mirroring import Mirror
from delta_tracker.stream.reading.canary import Canary
from delta_tracker.stream.storage.storage import Storage
from tests.heartbeats import read_heartbeats
from tests.stores.rules import calls, fails, on
from tests.stores.wrapped import WrappedStorage
from tests.stream.streams import FQN, Writer

_BEAT = Heartbeat(
    name="p-1", time=1e9, stream="0" * 32, version=7, lag_versions=2, lag_seconds=0.5, resyncs=1, error="late"
)
_FIELDS = {field: getattr(_BEAT, field) for field in Heartbeat.__slots__}
_OPTIONAL = ("canary_versions", "canary_seconds", "pin", "host", "seconds", "window", "why", "next_step", "differences")
_REQUIRED = [field for field in _FIELDS if field not in _OPTIONAL]  # those of all releases


class _Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def monotonic(self) -> float:
        return self.seconds

    def time(self) -> float:
        return 1e9 + self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(heartbeat_module, "time", clock)
    return clock


def plant(storage: Storage, content: object, path: str = "predictors/p-1.json") -> None:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    storage.replace(path, data)


@pytest.mark.parametrize(
    "changes",
    [{}, {"stream": None, "version": None}, {"lag_versions": None, "lag_seconds": None}, {"error": None}, {"time": 1}],
)
def test_a_written_heartbeat_is_read(changes: dict[str, object]) -> None:
    storage = Storage("memory://")
    assert read_heartbeats(storage) == []
    beat = Heartbeat(**_FIELDS | changes)
    write_heartbeat(storage, Heartbeat(**_FIELDS))
    write_heartbeat(storage, beat)
    other = Heartbeat(**_FIELDS | {"name": "A"})
    write_heartbeat(storage, other)
    assert read_heartbeats(storage) == [other, beat]


def test_long_texts_are_cut() -> None:
    storage = Storage("memory://")
    write_heartbeat(storage, Heartbeat(**_FIELDS | dict.fromkeys(("error", "why", "next_step"), "é" * 100_000)))
    (beat,) = read_heartbeats(storage)
    assert (beat.error, beat.why, beat.next_step) == ("é" * 1000, "é" * 1000, "é" * 400)


def test_unknown_fields_of_later_releases_are_ignored() -> None:
    storage = Storage("memory://")
    plant(storage, _FIELDS | {"later": {"why": 1}})
    assert read_heartbeats(storage) == [_BEAT]


def test_a_heartbeat_of_an_older_release_is_read() -> None:
    """It has no optional fields, or the distance of a canary as a text."""
    storage = Storage("memory://")
    plant(storage, {field: _FIELDS[field] for field in _REQUIRED} | {"canary": "3 versions"})
    assert read_heartbeats(storage) == [_BEAT]


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"\xff", b"[]", b"null", b"1", b"[" * 10_000, b" " * 20_000, {},
        *(_FIELDS | {field: value} for field, value in [
            ("name", "p-2"), ("name", 1), ("time", "1"), ("time", -1), ("time", math.nan), ("time", math.inf),
            ("time", True), ("stream", "0"), ("stream", 1), ("version", -1), ("version", 1.0), ("version", 2**63),
            ("lag_versions", "1"), ("lag_seconds", math.nan), ("lag_seconds", -0.1), ("resyncs", None), ("error", 1),
        ]),
        *(_FIELDS | {field: value} for field, value in [
            ("canary_versions", "3"), ("canary_versions", -1), ("canary_versions", 1.5), ("canary_seconds", "3"),
            ("canary_seconds", math.inf), ("pin", None), ("pin", -1), ("why", None), ("next_step", None),
        ]),
        *(_FIELDS | {field: value} for field, value in [
            ("host", "x" * 254), ("seconds", -1.0), ("window", [(-1.0, 1, 0)]), ("window", [(0.0, 1, 0)] * 17),
        ]),
        *({key: value for key, value in _FIELDS.items() if key != field} for field in _REQUIRED),
    ],
)  # fmt: skip
def test_malformed_heartbeats_are_skipped_and_named(content: object, caplog) -> None:
    storage = Storage("memory://")
    plant(storage, content)
    good = Heartbeat(**_FIELDS | {"name": "good"})
    write_heartbeat(storage, good)
    assert read_heartbeats(storage) == [good]
    (record,) = [each for each in caplog.records if each.name == heartbeat_module.__name__]
    assert record.message.startswith("ignored malformed heartbeat: name=predictors/p-1.json error=")
    assert len(record.message) < 1100


@pytest.mark.parametrize(
    "path", ["predictors/.json", "predictors/deep/p-1.json", "predictors/p-1", "predictors/a b.json"]
)
def test_other_names_are_no_heartbeats(path: str) -> None:
    storage = Storage("memory://")
    plant(storage, _FIELDS | {"name": path.removeprefix("predictors/").removesuffix(".json")}, path)
    assert read_heartbeats(storage) == []


@pytest.mark.parametrize("name", ["", "a/b", "..", "-a", "a b", "a\n", "x" * 65, 1, None])
def test_an_invalid_name_is_refused(name: object) -> None:
    with pytest.raises(InvalidArgumentError, match="name="):
        HeartbeatWriter(Storage("memory://"), name)


def test_a_pulse_beats_every_few_seconds(clock: _Clock) -> None:
    storage = Storage("memory://")
    beats = HeartbeatWriter(storage, "p")
    fields = {key: value for key, value in _FIELDS.items() if key not in ("name", "time")}
    assert beats.is_due()
    beats.write(**fields)
    assert not beats.is_due()
    clock.seconds += 4.9
    assert not beats.is_due()
    clock.seconds += 0.2
    assert beats.is_due()
    beats.write(**fields | {"version": 8})
    (beat,) = read_heartbeats(storage)
    assert (beat.time, beat.version) == (1e9 + 105.1, 8), "its age tells who is gone"


def test_two_processes_of_one_name_are_named_once(clock: _Clock, caplog) -> None:
    storage = Storage("memory://")
    one, other = HeartbeatWriter(storage, "p-1"), HeartbeatWriter(storage, "p-1")
    fields = {key: value for key, value in _FIELDS.items() if key not in ("name", "time")}
    for number in range(30):
        clock.seconds += 4
        one.write(**fields)
        if number == 15:
            assert not caplog.records
        if number > 15:
            clock.seconds += 1
            other.write(**fields)
    assert len([record for record in caplog.records if "writes heartbeats of the name p-1" in record.getMessage()]) == 2


def test_a_heartbeat_has_the_window_of_the_last_ten(clock: _Clock) -> None:
    storage = Storage("memory://")
    beats = HeartbeatWriter(storage, "p")
    fields = {key: value for key, value in _FIELDS.items() if key in ("stream", "lag_seconds", "resyncs", "error")}
    for version in range(12):
        beats.write(version=version, lag_versions=20 - version, **fields)
        clock.seconds += 5.0
    (beat,) = read_heartbeats(storage)
    assert beat.window == tuple((5.0 * (11 - each), each, 20 - each) for each in range(2, 12))
    assert (beat.seconds, bool(beat.host)) == (5.0, True)


def test_a_store_that_cannot_be_written_is_named_once(clock: _Clock, caplog, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage("memory://")
    beats = HeartbeatWriter(storage, "p")
    fields = {key: value for key, value in _FIELDS.items() if key not in ("name", "time")}

    def refuse(name: str, data: bytes) -> None:
        raise StorageError("memory://", "read only")

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(storage, "replace", refuse)
            for _ in range(3):
                beats.write(**fields)
        assert read_heartbeats(storage) == []
        beats.write(**fields)
        assert len(read_heartbeats(storage)) == 1
        storage.delete("predictors/p.json")
    assert caplog.text.count("could not write the predictor's heartbeat") == 2


def test_heartbeats_to_a_store_that_fails_become_rare(clock: _Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage("memory://")
    beats = HeartbeatWriter(storage, "p")
    fields = {key: value for key, value in _FIELDS.items() if key not in ("name", "time")}
    attempts: list[float] = []

    def refuse(name: str, data: bytes) -> None:
        attempts.append(clock.seconds)
        raise StorageError("memory://", "down")

    def beat_for(seconds: int) -> None:
        for _ in range(seconds):
            clock.seconds += 1
            if beats.is_due():
                beats.write(**fields)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "replace", refuse)
        beat_for(3000)
    pauses = [later - sooner for sooner, later in itertools.pairwise(attempts)]
    assert pauses == sorted(pauses)
    assert pauses[0] <= 20
    assert pauses[-1] == 300
    beat_for(301)
    assert len(read_heartbeats(storage)) == 1
    storage.delete("predictors/p.json")
    beat_for(10)
    assert len(read_heartbeats(storage)) == 1, "the usual interval applies again"


def test_the_first_heartbeat_after_a_failover_is_not_late(clock: _Clock) -> None:
    writer = Writer(WrappedStorage(Storage("memory://")))
    writer.snapshot()
    other = Storage("memory://")
    Mirror(writer.storage, other).step()
    predictor = Predictor(writer.model(), [writer.storage, other], name="p")
    predictor.sync()
    writer.storage.rules.append(fails(on("replace")))
    for _ in range(3600):
        clock.seconds += 1
        predictor._follower._write_heartbeat()
    writer.storage.rules.append(fails())
    with pytest.raises(StorageError):
        predictor.sync()
    predictor.sync()  # at the other store
    (beat,) = read_heartbeats(other)
    assert (beat.name, beat.version) == ("p", 1)


def test_a_heartbeat_to_the_former_store_does_not_delay_the_next(clock: _Clock) -> None:
    fields = {key: value for key, value in _FIELDS.items() if key not in ("name", "time")}
    former, later = WrappedStorage(Storage("memory://"), fails(on("replace"))), Storage("memory://")
    beats = HeartbeatWriter(former, "p")
    former.rules.insert(0, calls(on("replace"), before=lambda _: beats.move_to(later)))  # as another thread does
    beats.write(**fields)
    assert beats.is_due()
    beats.write(**fields)
    assert len(read_heartbeats(later)) == 1


def test_a_predictor_that_starts_before_its_stream_warns_of_nothing(clock: _Clock, caplog, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/stream"
    predictor = Predictor({FQN: torch.zeros(20, 4)}, url, name="p")
    with pytest.raises(NoSnapshotError):
        predictor.sync()
    predictor._follower._write_heartbeat()
    assert not caplog.text
    Writer(Storage(url, create=True)).snapshot()
    clock.seconds += 5.0
    predictor.sync()
    (beat,) = read_heartbeats(Storage(url))
    assert beat.version == 1


@pytest.mark.parametrize("is_mounted", [False, True])
def test_a_heartbeat_never_creates_a_stream(clock: _Clock, tmp_path: Path, *, is_mounted: bool) -> None:
    """The directory vanishes or is an empty mount point, before the first version and after it."""
    root = tmp_path / "stream"
    writer = Writer(Storage(root.as_uri(), create=True))
    writer.snapshot()
    predictor = Predictor(writer.model(), root.as_uri(), name="p")
    other = Predictor(writer.model(), root.as_uri(), name="new")
    predictor.sync()
    assert [each.name for each in read_heartbeats(writer.storage)] == ["p"]
    shutil.rmtree(root)
    if is_mounted:
        root.mkdir()
    for each in (predictor, other, Predictor(writer.model(), root.as_uri(), name="newest")):
        clock.seconds += 5.1
        with pytest.raises(StreamError):
            each.sync()
        each._follower._write_heartbeat()
    assert list(tmp_path.rglob("*")) == [root] * is_mounted


def test_heartbeats_follow_the_directory_of_the_stream(clock: _Clock, tmp_path: Path) -> None:
    """Unmounted with a file in the mount point, then mounted again, then replaced by another stream."""
    root, volume = tmp_path / "stream", tmp_path / "volume"
    writer = Writer(Storage(root.as_uri(), create=True))
    writer.snapshot()
    predictor = Predictor(writer.model(), root.as_uri(), name="p")
    predictor.sync()
    root.rename(volume)
    (root / "lost+found").mkdir(parents=True)
    clock.seconds += 5.1
    predictor._follower._write_heartbeat()
    assert [each.name for each in root.rglob("*")] == ["lost+found"]
    (root / "lost+found").rmdir()
    root.rmdir()
    for again in (lambda: volume.rename(root), lambda: root.rename(volume)):
        again()
        if not root.exists():
            Writer(Storage(root.as_uri(), create=True)).snapshot()
        clock.seconds += 5.1
        predictor.sync()
        predictor._follower._write_heartbeat()
        (beat,) = read_heartbeats(Storage(root.as_uri()))
        assert beat.stream == StreamLog(Storage(root.as_uri())).head().stream


@pytest.mark.parametrize("canary", [None, Canary(versions=3), Canary(seconds=1234567.25)])
def test_a_heartbeat_has_the_distance_of_a_canary(canary: Canary | None) -> None:
    storage = Writer(Storage("memory://")).storage
    Predictor({FQN: torch.zeros(20, 4)}, storage, name="p", rollout=Rollout(canary=canary))._follower._write_heartbeat()
    (beat,) = read_heartbeats(storage)
    found = beat.canary_versions, beat.canary_seconds
    assert found == (None, None) if canary is None else (canary.versions, canary.seconds)


def test_a_predictor_reports_its_status(clock: _Clock) -> None:
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    predictor = Predictor(writer.model(), writer.storage, name="p")
    predictor.sync()
    (beat,) = read_heartbeats(writer.storage)
    assert (beat.name, beat.stream, beat.version) == ("p", writer.claim.head.stream, 1)
    assert (beat.lag_versions, beat.lag_seconds, beat.resyncs, beat.error) == (0, 0.0, 0, None)
    writer.delta([1])
    predictor.sync()
    assert read_heartbeats(writer.storage) == [beat], "not due"
    clock.seconds += 5.1
    predictor.sync()
    assert read_heartbeats(writer.storage)[0].version == 2
