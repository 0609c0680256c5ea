"""The writer of the pointer object: what it writes, how often, and that its failures reach nobody."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.maintenance.retention import Retention, retain
from delta_tracker.stream.pointer import POINTER_NAME, HeadPointer, PointedSnapshot, read_pointer
from delta_tracker.stream.pointer_writer import PointerWriter
from delta_tracker.stream.reading.runtime import Runtime
from delta_tracker.stream.storage.storage import Storage
from tests.ranks import RankPool
from tests.stores.rules import Gate, fails, nth, on
from tests.stores.wrapped import WrappedStorage
from tests.stream.streams import Writer
from tests.sweeps import SWEEPS_ARE_WHOLE
from tests.waiting import eventually

_DEADLINE = 60.0
_CASES = "tests.publisher.pointer_cases"


@contextmanager
def _pointing(storage: Storage, *, seconds: float = 0.001) -> Iterator[PointerWriter]:
    writer = PointerWriter(storage, seconds=seconds)
    try:
        yield writer
    finally:
        with mock.patch("delta_tracker.stream.pointer_writer._CLOSE_SECONDS", _DEADLINE):  # for the last write
            writer.close()


def _expected(storage: Storage) -> HeadPointer:
    """The pointer of a log by an obviously correct computation."""
    log = StreamLog(storage)
    head, snapshot = log.head(), log.newest_snapshot()
    assert head is not None
    versions = set(log.versions())
    oldest = head.version
    while oldest - 1 in versions:
        oldest -= 1
    deltas = [(each.first, each.last) for each in log.merged() if each.kind == "delta"]
    kept = [
        (first, last)
        for first, last in deltas
        if not any(a <= first and last <= b and (a, b) != (first, last) for a, b in deltas)
    ]
    return HeadPointer(
        stream=head.stream,
        generation=head.generation,
        version=head.version,
        xxh3=head.xxh3,
        oldest=oldest,
        snapshot=None
        if snapshot is None
        else PointedSnapshot(version=snapshot.version, merged=snapshot.merges is not None),
        merged=tuple(sorted(kept, key=lambda each: each[1])[-64:]),
        time=0.0,
        older=tuple(sorted(each for each in versions if each < oldest)[-64:]),
        snapshots=tuple(sorted(each.last for each in log.merged() if each.kind == "snapshot")[-64:]),
    )


def _read(storage: Storage) -> HeadPointer | None:
    found = read_pointer(storage)
    return None if found is None else replace(found, time=0.0)


@pytest.mark.sweep("short")
def test_the_pointer_is_right_in_random_histories() -> None:
    for seed in range(100 if SWEEPS_ARE_WHOLE else 10):
        random_ = random.Random(seed)
        writer = Writer(Storage("memory://"))
        log = StreamLog(writer.storage)
        pointer = PointerWriter(writer.storage)
        for _ in range(12):
            action = random_.random()
            if action < 0.6:
                entry = writer.delta([random_.randrange(20)])
            elif action < 0.75:
                entry = writer.snapshot()
            elif action < 0.85:
                writer.claim = log.claim()
                entry = writer.claim.head
            else:
                if random_.random() < 0.7:
                    compact(log, fold=random_.choice([1e-9, 0.5, 1e9]))
                else:
                    retain(log, Retention(versions=1, grace_seconds=0.0), now=lambda: time.time() + 1)
                pointer.rescan()
                entry = writer.claim.head
            if random_.random() < 0.8:
                pointer.write_now(entry)
                assert _read(writer.storage) == _expected(writer.storage)


def test_the_pointer_follows_the_commits() -> None:
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    with _pointing(writer.storage) as pointer:
        for row in range(5):
            pointer.after(writer.delta([row]))
            eventually(lambda: _read(writer.storage) == _expected(writer.storage))


def test_many_commits_are_one_write_and_nothing_is_written_at_rest() -> None:
    storage = WrappedStorage(Storage("memory://"))
    writer = Writer(storage)
    writer.snapshot()
    with _pointing(writer.storage, seconds=3600.0) as pointer:
        pointer.after(writer.delta([1]))
        eventually(lambda: storage.count("replace") == 1)
        for row in range(20):
            pointer.after(writer.delta([row]))
        assert storage.count("replace") == 1
    assert storage.count("replace") == 2, "the newest one is written at the end"
    assert _read(writer.storage) == _expected(writer.storage)
    pointer.write_now()
    assert storage.count("replace") == 2


def test_failures_are_logged_once_and_retried(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delta_tracker.stream.pointer_writer._MAX_PAUSE_SECONDS", 0.001)
    writer = Writer(WrappedStorage(Storage("memory://"), fails(nth(range(1, 6), on("replace")), "it is full")))
    with _pointing(writer.storage) as pointer:
        pointer.after(writer.snapshot())
        eventually(lambda: _read(writer.storage) is not None)
    assert [each.levelname for each in caplog.records if "the pointer was not" in each.message] == ["WARNING"]
    assert [each.levelname for each in caplog.records if "is written again" in each.message] == ["WARNING"]


def test_a_fenced_writer_points_at_the_newest_entry_after_a_listing() -> None:
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    late = PointerWriter(writer.storage)
    late.write_now(writer.delta([1]))
    late.rescan()
    writer.claim = StreamLog(writer.storage).claim()
    writer.snapshot()
    late.write_now()
    assert _read(writer.storage) == _expected(writer.storage)


def test_the_log_is_listed_every_ten_minutes() -> None:
    writer, now = Writer(Storage("memory://")), 1000.0
    pointer = PointerWriter(writer.storage, runtime=Runtime(monotonic=lambda: now))
    num_lists = []
    for seconds in (0.0, 599.0, 1.0, 599.0, 1.0):
        now += seconds
        head = writer.snapshot()
        before = writer.storage.requests["list"]
        pointer.write_now(head)
        num_lists.append(writer.storage.requests["list"] - before)
    assert num_lists == [2, 0, 2, 0, 2]


def test_a_pointer_that_another_publisher_moved_back_is_repaired_by_the_next_listing() -> None:
    writer = Writer(Storage("memory://"))
    pointer = PointerWriter(writer.storage)
    pointer.write_now(writer.snapshot())
    before = writer.storage.read(POINTER_NAME, max_bytes=1 << 16)
    assert before is not None
    pointer.write_now(writer.delta([1]))
    writer.storage.replace(POINTER_NAME, before.tobytes())
    pointer.rescan()
    pointer.write_now()
    assert _read(writer.storage) == _expected(writer.storage)


def test_close_interrupts_a_write_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(on("replace"))
    writer = Writer(WrappedStorage(Storage("memory://"), gate))
    monkeypatch.setattr("delta_tracker.stream.pointer_writer._CLOSE_SECONDS", 0.2)
    pointer = PointerWriter(writer.storage)
    pointer.after(writer.snapshot())
    assert gate.reached.wait(_DEADLINE)
    pointer.close()
    gate.open()


@pytest.mark.parametrize("hangs", [False, True], ids=["fails", "hangs"])
def test_a_publisher_publishes_while_its_pointer_cannot_be_written(
    one_rank: RankPool, tmp_path: Path, *, hangs: bool
) -> None:
    one_rank.run(f"{_CASES}:publishes_without_the_pointer", url=f"file://{tmp_path}/stream", hangs=hangs)


def test_a_publisher_writes_the_pointer_and_lists_after_upkeep(two_ranks: RankPool, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/stream"
    answers = two_ranks.run(f"{_CASES}:points_at_the_head", url=url)
    assert StreamLog(Storage(url)).merged()
    for answer in answers:
        assert answer == {
            "head": _expected(Storage(url)).version,
            "pointer": _expected(Storage(url)).to_json().decode(),
        }


@pytest.mark.parametrize("is_first", [True, False])
def test_readers_without_listings_find_a_version_of_unknown_outcome(
    one_rank: RankPool, tmp_path: Path, *, is_first: bool
) -> None:
    case = f"{_CASES}:points_at_a_version_of_unknown_outcome"
    one_rank.run(case, url=f"file://{tmp_path}/stream", is_first=is_first)


def test_the_thread_of_a_dropped_publisher_ends(one_rank: RankPool, tmp_path: Path) -> None:
    one_rank.run(f"{_CASES}:ends_with_the_publisher", url=f"file://{tmp_path}/stream")


def test_a_publisher_may_write_no_pointer(one_rank: RankPool, tmp_path: Path) -> None:
    one_rank.run(f"{_CASES}:writes_no_pointer", url=f"file://{tmp_path}/stream")
