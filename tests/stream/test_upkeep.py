"""Upkeep in the background of a publisher: passes do not overlap, and their failures do not reach the caller."""

from __future__ import annotations

import itertools
import logging
import threading

import pytest

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.retention import Retention
from delta_tracker.stream.maintenance.upkeep import Upkeep, UpkeepThread
from delta_tracker.stream.storage.storage import Storage
from tests.raised import has_frames
from tests.stores.rules import Gate, fails, on
from tests.stores.wrapped import WrappedStorage
from tests.stream.streams import Writer


def _passes() -> list[threading.Thread]:
    """Return the threads of running passes; those of other tests have ended."""
    return [thread for thread in threading.enumerate() if thread.name == "upkeep"]


def _wait_for_the_pass() -> None:
    for thread in _passes():
        thread.join(60)
    assert not _passes()


def test_a_stream_stays_small_while_it_is_written() -> None:
    storage = Storage("memory://")
    writer = Writer(storage, num_rows=40)
    writer.snapshot()
    upkeep = UpkeepThread(
        storage, Upkeep(retention=Retention(versions=3, grace_seconds=0), compact_every=4), retain_every=4
    )
    for row in range(40):
        upkeep.after(writer.delta([row]).version)
        _wait_for_the_pass()  # the tests of compaction have a schedule that does not wait
    upkeep.close()
    assert upkeep.error is None
    assert len(StreamLog(storage).versions()) < 10
    assert StreamLog(storage).newest_snapshot().merges is not None
    assert len(storage.names("parts")) < 12


@pytest.mark.parametrize("compact_every", [None, 4])
def test_a_retention_without_snapshots_is_named_once(
    compact_every: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    writer = Writer(Storage("memory://"), num_rows=40)
    writer.snapshot()
    settings = Upkeep(retention=Retention(versions=3, grace_seconds=0), compact_every=compact_every)
    upkeep = UpkeepThread(writer.storage, settings, retain_every=1)
    for row in range(40):
        upkeep.after(writer.delta([row]).version)
        _wait_for_the_pass()
    upkeep.close()
    found = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(found) == (compact_every is None)
    assert compact_every or "23 versions follow the newest snapshot" in found[0]
    assert compact_every or "Cadence(snapshot_every=...)" in found[0]


def test_one_pass_at_a_time_and_close_waits_for_it() -> None:
    gate = Gate(on("objects", name="parts"))
    storage = WrappedStorage(Storage("memory://"), gate)
    writer = Writer(storage.inner)
    upkeep = UpkeepThread(storage, Upkeep(retention=Retention(versions=1)), retain_every=1)
    upkeep.after(writer.snapshot().version)
    assert gate.reached.wait(60)
    upkeep.after(writer.delta([1]).version)
    assert storage.count("objects", name="parts") == 1
    (thread,) = _passes()
    assert not thread.daemon
    gate.open()
    upkeep.close()
    assert not thread.is_alive()
    upkeep.after(writer.delta([1]).version)
    assert storage.count("objects", name="parts") == 1


def test_a_failure_is_logged_once_and_cleared_when_a_pass_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    seconds = itertools.count(1.37, 1.37)
    outage = fails(on("objects"), lambda _: OSError(f"no route for {next(seconds):.2f} s"))
    storage = WrappedStorage(Storage("memory://"), outage)
    writer = Writer(storage.inner)
    failures: list[str] = []
    upkeep = UpkeepThread(storage, Upkeep(retention=Retention(versions=1)), retain_every=1, on_failure=failures.append)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            upkeep.after(writer.snapshot().version)
            _wait_for_the_pass()
            assert str(upkeep.error) == f"no route for {storage.count('objects') * 1.37:.2f} s"
    assert [record.getMessage() for record in caplog.records] == [
        "upkeep failed, the next pass retries: url=memory:// error=no route for 1.37 s"
    ]
    assert failures == ["retention"] * 3, "each is reported"
    storage.rules.clear()
    with caplog.at_level(logging.WARNING):
        upkeep.after(writer.snapshot().version)
        upkeep.close()
    assert upkeep.error is None
    assert failures == ["retention"] * 3
    assert caplog.messages[1:] == ["upkeep recovered: url=memory://"]


def test_a_retention_pass_does_not_clear_the_error_of_a_compaction(caplog: pytest.LogCaptureFixture) -> None:
    full = fails(on("put"), lambda _: OSError("no space"))
    unreachable = fails(on("names", "objects", name="merged"), lambda _: OSError("no route"))
    storage = WrappedStorage(Storage("memory://"))
    writer = Writer(storage.inner)
    upkeep = UpkeepThread(storage, Upkeep(retention=Retention(), compact_every=4), retain_every=1)
    writer.snapshot()
    errors = []
    with caplog.at_level(logging.WARNING):
        for row in range(12):  # passes 4, 8 and 12 compact
            storage.rules[:] = [full] * (row < 10) + [unreachable] * (row == 5)
            upkeep.after(writer.delta([row]).version)
            _wait_for_the_pass()
            errors.append(None if upkeep.error is None else str(upkeep.error))
    assert errors == [None] * 3 + ["no space"] * 8 + [None]
    assert caplog.messages == [
        "upkeep failed, the next pass retries: url=memory:// error=no space",
        "upkeep failed, the next pass retries: url=memory:// error=no route",
        "upkeep recovered: url=memory://",
    ]


def test_versions_are_removed_although_the_compaction_before_fails() -> None:
    storage = WrappedStorage(Storage("memory://"), fails(on("put"), lambda _: OSError("no space")))
    writer = Writer(storage.inner)
    writer.snapshot()
    upkeep = UpkeepThread(
        storage, Upkeep(retention=Retention(versions=1, grace_seconds=0), compact_every=4), retain_every=4
    )
    for row in range(12):  # the passes after every fourth version compact and retain
        if row == 4:
            writer.snapshot()
        upkeep.after(writer.delta([row]).version)
        _wait_for_the_pass()
    assert str(upkeep.error) == "no space"
    assert StreamLog(storage).versions()[:2] > [0, 2]  # the claim is kept


def test_an_error_to_start_a_pass_ends_with_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage("memory://")
    writer = Writer(storage)
    upkeep = UpkeepThread(storage, Upkeep(retention=Retention()), retain_every=1)

    def fail(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        upkeep.after(writer.snapshot().version)
    assert str(upkeep.error) == "can't start new thread"
    upkeep.after(writer.delta([1]).version)
    upkeep.close()
    assert upkeep.error is None


def test_the_memory_of_a_failed_pass_is_freed() -> None:
    storage = WrappedStorage(Storage("memory://"), fails(on("put"), lambda _: OSError("no space")))
    writer = Writer(storage.inner)
    upkeep = UpkeepThread(storage, Upkeep(compact_every=2))
    for manifest in (writer.snapshot(), writer.delta([1]), writer.delta([2])):
        upkeep.after(manifest.version)
    upkeep.close()
    assert str(upkeep.error) == "no space"
    assert not has_frames(upkeep.error)


@pytest.mark.parametrize(
    ("name", "value"), [("retention", 5), ("compact_every", 1), ("pointer_seconds", 0), ("pointer_seconds", "1")]
)
def test_invalid_upkeep_is_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        Upkeep(**{name: value})
