"""The watch of a stream reads only what is new, and computes rates over its window."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from delta_tracker.cli import watch as watch_module
from delta_tracker.cli.watch import TopView, Watch
from delta_tracker.stream import log as log_module
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Storage
from tests.stores.rules import Dated
from tests.stores.wrapped import WrappedStorage
from tests.stream.streams import FQN, Writer


class Clock:
    """Clock of commits and of the checks for a gap."""

    def __init__(self) -> None:
        self.now = 1e9

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


def asked(storage: WrappedStorage) -> dict[str, int]:
    """Return the numbers of listings by prefix, and of reads by folder, since the last call."""
    return Counter(
        f"list {each.name}" if each.kind in ("names", "objects") else each.name.split("/")[0]
        for each in storage.take()
        if each.kind in ("names", "objects", "read")
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(log_module, "time", clock)
    monkeypatch.setattr(watch_module, "time", clock)
    return clock


@pytest.fixture
def storage(tmp_path: Path, clock: Clock) -> WrappedStorage:
    return WrappedStorage(Storage(tmp_path / "stream", create=True, fsync=False), Dated(clock.time))


def publish(writer: Writer, clock: Clock, count: int, seconds: float = 1.0) -> None:
    for number in range(count):
        clock.now += seconds
        writer.delta([number % 20, 19] if number % 20 != 19 else [19])


def test_a_refresh_reads_what_is_new_and_nothing_else(storage: WrappedStorage, clock: Clock) -> None:
    writer = Writer(storage)
    writer.snapshot()
    publish(writer, clock, 300, 0.5)
    watch = Watch(StreamLog(storage), window_seconds=20)
    asked(storage)
    watch.refresh(clock.now)
    # Without a pointer, one listing finds the head; then downwards until the window is full: 100 entries are kept.
    assert asked(storage) == {"control": 1, "list log": 1, "log": 100}
    assert len(watch.recent(clock.now)) == 40
    for _ in range(3):
        watch.refresh(clock.now)
        assert asked(storage) == {"log": 1}, "the name of the next version, and that is not there"
    publish(writer, clock, 3)
    asked(storage)
    watch.refresh(clock.now)
    assert asked(storage) == {"log": 4}
    assert watch.head == writer.claim.head
    clock.now += 11
    watch.refresh(clock.now)
    assert asked(storage) == {"control": 1, "log": 2, "list log": 1}, "at intervals it checks for entries after a gap"
    assert watch.starts == 1
    publish(writer, clock, 400, 0.5)
    for _ in range(3):
        watch.refresh(clock.now)
    assert len(watch.entries) == 100
    assert watch.head == writer.claim.head


def test_a_long_window_is_read_in_bounds(storage: WrappedStorage, clock: Clock, monkeypatch) -> None:
    monkeypatch.setattr(watch_module, "_MAX_READS", 50)
    monkeypatch.setattr(watch_module, "_MIN_KEPT", 10)
    writer = Writer(storage)
    publish(writer, clock, 120, 0.01)
    watch = Watch(StreamLog(storage), window_seconds=86_400)
    asked(storage)
    watch.refresh(clock.now)
    assert asked(storage)["log"] <= 50
    assert watch.seconds(clock.now) == 1.0, "of the window it knows only the part that it has read"
    publish(writer, clock, 120, 0.01)
    asked(storage)
    watch.refresh(clock.now)
    assert asked(storage) == {"log": 50}
    for _ in range(3):
        watch.refresh(clock.now)
    assert watch.head == writer.claim.head


def test_the_rates_are_those_of_the_window(storage: WrappedStorage, clock: Clock) -> None:
    writer = Writer(storage)
    writer.snapshot()
    publish(writer, clock, 30, 2.0)
    clock.now += 5
    writer.snapshot()
    manifests = [StreamLog(storage).read(version) for version in range(1, 33)]
    inside = [each for each in manifests if each.created > clock.now - 20]
    assert len(inside) == 9
    view = TopView(storage.url, clock.now, Watch(StreamLog(storage), window_seconds=20), read=clock.now)
    view.watch.refresh(clock.now)
    found = view.to_dict()
    assert found["window_seconds"] == 20
    assert found["versions_per_second"] == 9 / 20
    assert found["rows_per_second"] == sum(each.num_rows for each in inside) / 20
    assert found["bytes_per_second"] == sum(each.num_bytes for each in inside) / 20
    rows = sum(each.num_rows for each in inside if each.kind == "delta")
    assert found["tables"] == {
        FQN: {"rows_per_second": rows / 20, "bytes_per_second": rows * 16 / 20, "last_version": 31}
    }
    assert found["head"]["version"] == 32
    assert [each["version"] for each in found["versions"]] == list(range(32, 12, -1))
    clock.now += 100
    late = TopView(storage.url, clock.now, view.watch, read=clock.now).to_dict()
    assert (late["versions_per_second"], late["head"]["age_seconds"]) == (0, 100)


def test_it_restarts_when_the_stream_does(storage: WrappedStorage, clock: Clock, tmp_path: Path) -> None:
    writer = Writer(storage)
    writer.snapshot()
    publish(writer, clock, 20)
    watch = Watch(StreamLog(storage), window_seconds=60)
    watch.refresh(clock.now)
    publish(writer, clock, 5)
    (tmp_path / "stream" / "log" / f"{23:020d}.json").unlink()
    watch.refresh(clock.now)
    assert (watch.head.version, watch.starts) == (22, 1), "it cannot know yet that there is more"
    clock.now += 11
    watch.refresh(clock.now)
    assert (watch.head.version, watch.starts) == (26, 2)
    shutil.rmtree(tmp_path / "stream")
    other = Writer(Storage(storage.url, create=True))
    publish(other, clock, 40)
    watch.refresh(clock.now)
    assert watch.head == other.claim.head, "the next entry names another parent"
    assert {entry.generation for entry in watch.entries} == {1}
    assert len(watch.entries) == 41
