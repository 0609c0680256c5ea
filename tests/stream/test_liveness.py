"""Signs of life of publishers."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from delta_tracker.errors import InvalidArgumentError, StorageError
from delta_tracker.stream import heartbeat as heartbeat_module
from delta_tracker.stream.format.manifest import entry_name
from delta_tracker.stream.heartbeat import PublisherHeartbeatWriter
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.retention import Retention, retain
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.stream.takeover_request import PublisherActivity, PublisherObserver
from tests.heartbeats import read_heartbeats
from tests.stream.streams import Writer

_AN_HOUR = 3600.0


def look(storage: Storage) -> PublisherActivity:
    signs = PublisherObserver(storage, "standby").observe()
    assert signs is not None
    return signs


def age(path: Path, seconds: float) -> None:
    """Let an object be older."""
    modified = path.stat().st_mtime - seconds
    os.utime(path, (modified, modified))


def age_log(tmp_path: Path, seconds: float) -> None:
    for path in (tmp_path / "log").iterdir():
        age(path, seconds)


def test_the_newest_entry_is_a_sign_of_life(tmp_path: Path) -> None:
    storage = Storage(tmp_path.as_uri())
    liveness = PublisherObserver(storage, "standby")
    assert liveness.observe() is None
    assert not list(tmp_path.iterdir()), "nothing is written to a directory without a stream"
    writer = Writer(storage)
    age_log(tmp_path, 100)
    found = [liveness.observe()]
    head = writer.snapshot()
    found.append(liveness.observe())
    assert [signs.head.version for signs in found if signs] == [0, 1]
    assert found[0].silent_seconds == pytest.approx(100, abs=5)
    assert (found[1].head, found[1].silent_seconds) == (head, pytest.approx(0, abs=5))
    assert [beat.name for beat in read_heartbeats(storage)] == ["standby"]


def test_the_newest_entry_is_found_after_retention_deleted_all_but_a_claim_of_those_seen(tmp_path: Path) -> None:
    storage = Storage(tmp_path.as_uri())
    writer, liveness = Writer(storage), PublisherObserver(storage, "standby")
    first = liveness.observe()
    assert first is not None
    assert first.head.kind == "claim"
    for _ in range(3):
        writer.snapshot()
        last = writer.delta([1])
    retain(storage, Retention(versions=1, grace_seconds=0.0))
    assert StreamLog(storage).read(1) is None
    signs = liveness.observe()
    assert signs is not None
    assert signs.head == last


@pytest.mark.parametrize("seconds", [_AN_HOUR, -_AN_HOUR])
def test_no_clock_of_a_host_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    storage = Storage(tmp_path.as_uri())
    Writer(storage).snapshot()
    age_log(tmp_path, 50)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + seconds)
    assert look(storage).silent_seconds == pytest.approx(50, abs=5)


def test_a_time_that_the_store_truncated_is_not_negative(tmp_path: Path) -> None:
    storage = Storage(tmp_path.as_uri())
    Writer(storage).snapshot()
    age_log(tmp_path, -0.9)
    assert look(storage).silent_seconds == 0.0


def test_only_a_heartbeat_of_the_newest_generation_counts(tmp_path: Path) -> None:
    storage = Storage(tmp_path.as_uri())
    first = Writer(storage).snapshot()
    age_log(tmp_path, 100)
    beats = PublisherHeartbeatWriter(storage)
    beats.write(first)
    assert look(storage).silent_seconds == pytest.approx(0, abs=5)
    path = tmp_path / "publishers" / f"{1:020d}.json"
    age(path, 40)
    assert look(storage).silent_seconds == pytest.approx(40, abs=5)
    Writer(storage)
    age_log(tmp_path, 60)
    beats.write(first)  # it is fenced, and wakes up
    assert look(storage).silent_seconds == pytest.approx(60, abs=5)
    second = StreamLog(storage).head()
    beats.write(replace(second, writer="0" * 32))
    assert look(storage).silent_seconds == pytest.approx(60, abs=5)
    beats.write(second)
    assert look(storage).silent_seconds == pytest.approx(0, abs=5)
    (tmp_path / "publishers" / f"{2:020d}.json").write_bytes(b"{}")
    assert look(storage).silent_seconds == pytest.approx(60, abs=5)


@pytest.mark.parametrize("content", [b"", b"{}", b"[" * 10_000, b" " * 20_000])
def test_a_malformed_heartbeat_of_a_publisher_is_no_sign_of_life(content: bytes, caplog) -> None:
    storage = Storage("memory://")
    head = Writer(storage).snapshot()
    storage.replace(f"publishers/{head.generation:020d}.json", content)
    assert look(storage).heartbeat_seconds is None
    assert "ignored malformed heartbeat" in caplog.text


def test_an_observer_that_is_cut_off_has_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(tmp_path.as_uri())
    Writer(storage).snapshot()
    age_log(tmp_path, 100)

    def cut(*_: object, **__: object) -> None:
        raise StorageError(storage.url, "cut off")

    for method in ("replace", "read"):
        with monkeypatch.context() as patch:
            patch.setattr(Storage, method, cut)
            with pytest.raises(StorageError, match="cut off"):
                look(storage)


def test_a_log_that_was_replaced_is_read_again() -> None:
    storage = Storage("memory://")
    writer, liveness = Writer(storage), PublisherObserver(storage, "standby")
    writer.snapshot()
    assert liveness.observe().head.version == 1
    storage.delete(entry_name(1))
    assert liveness.observe().head.version == 0
    with pytest.raises(InvalidArgumentError):
        PublisherObserver(storage, "a/b")


def test_a_pulse_is_due_one_interval_after_the_claim_and_logs_an_outage_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    storage = Storage("memory://")
    head, now = Writer(storage).snapshot(), 100.0
    monkeypatch.setattr(heartbeat_module.time, "monotonic", lambda: now)
    beats = PublisherHeartbeatWriter(storage, 5.0)
    assert not beats.is_due()
    now = 105.0
    assert beats.is_due()

    def fail(*_: object) -> None:
        raise StorageError(storage.url, "full")

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "replace", fail)
        for _ in range(2):
            beats.write(head)
            assert not beats.is_due()
    beats.write(head)
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "could not write the publisher's heartbeat",
        "the publisher's heartbeat is written again",
    ]
