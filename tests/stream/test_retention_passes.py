"""Passes of one process delete what separate passes delete, and read only what is new if there is nothing to delete."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.maintenance.retention import ORPHAN_SECONDS, Retained, Retention, RetentionPasses, retain
from delta_tracker.stream.storage.storage import Storage
from tests.stores.wrapped import WrappedStorage
from tests.stream.histories import Clock, History, clocked
from tests.stream.streams import Writer
from tests.sweeps import SWEEPS_ARE_WHOLE


@pytest.mark.parametrize("num_versions", [10, 300])
def test_a_pass_that_deletes_nothing_reads_only_new_entries(num_versions: int) -> None:
    storage = WrappedStorage(Storage("memory://"))
    writer = Writer(storage)
    writer.snapshot()
    for _ in range(num_versions):
        writer.delta([1])
    passes = RetentionPasses(StreamLog(storage), Retention(versions=10_000, seconds=1e6, num_bytes=1 << 40))
    assert passes.run() == Retained()
    assert len(storage.take()) > num_versions
    for _ in range(3):
        writer.delta([1])
        storage.take()
        assert passes.run() == Retained()
        assert storage.count() <= 6


def test_orphans_are_deleted_by_a_pass_after_ten_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    with clock.of_the_log():
        history = History(clocked(clock), 1)
        passes = RetentionPasses(history.log, Retention(), clock)
        assert passes.run() == Retained()
        part = f"parts/{1:020d}-g1-r0-{'a' * 16}.safetensors"
        history.storage.put(part, [memoryview(b"1234")])
        clock.seconds += 2 * ORPHAN_SECONDS
        history.delta()
        assert passes.run() == Retained()
        monkeypatch.setattr(passes, "_due", 0.0)
        assert passes.run() == Retained(orphans=1, num_bytes=4)


def test_a_replaced_log_is_read_anew() -> None:
    """The versions of the new log are larger than those that the passes know."""
    storage = Storage("memory://")
    small = Writer(storage, num_rows=4)
    for _ in range(3):
        small.snapshot()
    num_bytes = sum(StreamLog(storage).read(version).total_bytes for version in range(1, 4))
    passes = RetentionPasses(StreamLog(storage), Retention(num_bytes=2 * num_bytes, grace_seconds=0))
    assert passes.run() == Retained()
    for name in storage.names("log"):
        storage.delete(name)
    large = Writer(storage, num_rows=400)
    for _ in range(3):
        large.snapshot()
    assert passes.run().versions == 1
    assert StreamLog(storage).versions() == [0, 2, 3]


def test_entries_that_another_process_deletes_do_not_end_the_log_for_later_passes() -> None:
    """The newest entry that the passes know is a claim, which is kept forever; the ones after it are deleted."""
    storage = Storage("memory://")
    writer = Writer(storage)
    passes = RetentionPasses(StreamLog(storage), Retention(versions=2, grace_seconds=0))
    assert passes.run() == Retained()
    for _ in range(3):
        writer.snapshot()
    assert retain(storage, Retention(versions=1, grace_seconds=0)).versions == 1
    writer.snapshot()
    assert passes.run().versions == 1
    assert StreamLog(storage).versions() == [0, 3, 4]


def _bounds(choose: random.Random, bound: str) -> Retention:
    value = {"versions": choose.randint(1, 8), "seconds": choose.randint(0, 300), "num_bytes": choose.randint(1, 9000)}
    return replace(Retention(grace_seconds=choose.choice([0, 50, 200])), **{bound: value[bound]})


@pytest.mark.sweep("long")
@pytest.mark.parametrize("bound", ["versions", "seconds", "num_bytes"])
@settings(deadline=None, max_examples=100 if SWEEPS_ARE_WHOLE else 4)
@example(seed=101)  # the newest snapshot is the entry before a claim, so it is kept forever
@example(seed=449)
@example(seed=1685)  # another process deletes entries right above the newest one that the passes know
@given(seed=st.integers(0, 1 << 30))
def test_passes_of_one_process_delete_what_separate_ones_delete_within_the_grace(bound: str, seed: int) -> None:
    """After each pass, a separate pass finds nothing to delete. Other processes run passes at the same time."""
    choose, clock = random.Random(seed), Clock()
    with clock.of_the_log():
        history = History(clocked(clock), seed)
        retention = _bounds(choose, bound)
        passes = RetentionPasses(StreamLog(history.storage), retention, clock)
        for _ in range(30):
            clock.seconds += choose.choice([0, 10, 100])
            step = choose.choice(["delta"] * 5 + ["snapshot", "claim", "compact", "other"])
            if step == "compact":
                compact(history.storage, fold=choose.choice([1e9, 1e-9]), now=clock)
            elif step == "other":
                retain(history.storage, _bounds(choose, bound), clock)
            else:
                getattr(history, step)()
            if choose.random() < 0.7:
                passes.run()
                found = retain(history.storage, retention, clock)
                assert found == Retained(), retention
