"""Retention and compaction killed at every operation, and concurrent with readers and publishers."""

from __future__ import annotations

import copy
import functools
import itertools
import random
import threading
from pathlib import Path
from unittest import mock

import pytest

from delta_tracker.stream import log
from delta_tracker.stream.format.parse import parse_manifest
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.maintenance.retention import Retention, retain
from delta_tracker.stream.storage.storage import Storage
from tests.stores.rules import Killed, after, disconnects, fails, nth
from tests.stores.wrapped import Rule, WrappedStorage
from tests.stream.histories import Clock, History, Reader, clocked
from tests.sweeps import SWEEPS_ARE_WHOLE


def _compacted(fold: float):
    return lambda storage, clock: compact(storage, fold=fold, now=clock)


def _retained(storage: Storage, clock: Clock) -> None:
    retain(storage, Retention(versions=1, grace_seconds=0), clock)


def _killed(number: int, *, is_after: bool) -> Rule:
    """Return a rule that fails before or after an operation, and at all later ones."""
    return disconnects(nth(number), Killed) if is_after else fails(after(number - 1), Killed)


@pytest.mark.sweep("short")
@pytest.mark.parametrize("work", [_compacted(1e9), _compacted(1e-9), _retained], ids=["delta", "snapshot", "retention"])
@pytest.mark.parametrize("is_after", [False, True])
def test_after_a_kill_anywhere_readers_continue_and_another_pass_finishes(work, is_after: bool) -> None:
    """Visit every operation on the store, or without sweeps every fourth."""
    clock = Clock()
    # parsing takes a quarter of the time
    with clock.of_the_log(), mock.patch.object(log, "parse_manifest", functools.cache(parse_manifest)):
        storage = clocked(clock)
        history = History(storage, 8)
        behind = _readers_on_the_way(history, clock)
        start = _Objects(storage, clock)
        is_through = False
        for number in itertools.count(1, 1 if SWEEPS_ARE_WHOLE else 4):
            start.restore()
            storage.take()
            with storage.under(_killed(number, is_after=is_after)):
                try:
                    work(storage, clock)
                    is_through = True
                except Killed:
                    assert storage.count() == number
            for reader in [*map(_copied, behind), Reader(history)]:
                reader.sync()
                assert reader.held.version == history.version
            clock.seconds += 4000
            work(storage, clock)
            storage.replace("predictors/live.json", b"")
            for _ in range(2):  # the second pass removes what the first superseded
                retain(storage, Retention(versions=1), clock)
            assert set(storage.names("parts")) == _named(history)
            for reader in [*map(_copied, behind), Reader(history)]:
                reader.sync()
                assert reader.held.version == history.version
            if is_through:
                break
    assert number > 10


def _copied(reader: Reader) -> Reader:
    copied = copy.copy(reader)
    copied.log = copy.copy(reader.log)
    return copied


class _Objects:
    """The objects of a store and the time, to which both return before each kill."""

    def __init__(self, storage: WrappedStorage, clock: Clock) -> None:
        self._storage, self._clock = storage, clock
        (self._dated,) = storage.rules
        self._data = {name: storage.read(name, max_bytes=1 << 20).tobytes() for name in self._names()}
        self._times, self._seconds = dict(self._dated.times), clock.seconds

    def restore(self) -> None:
        for name in self._names():
            if name not in self._data:
                self._storage.delete(name)
        for name, data in self._data.items():
            self._storage.put(name, [memoryview(data)])
        self._dated.times = dict(self._times)
        self._clock.seconds = self._seconds

    def _names(self) -> list[str]:
        folders = ("drafts", "parts", "log", "merged", "control", "predictors")
        return [name for folder in folders for name in self._storage.names(folder)]


def _readers_on_the_way(history: History, clock: Clock) -> list[Reader]:
    """Return readers at three versions of a stream with merged versions and a fuzzy snapshot before its head."""
    readers = [Reader(history, seed) for seed in range(3)]
    for reader, fold in zip(readers, [1e9, 1e-9, 1e9], strict=True):
        reader.sync()
        history.delta(2)
        history.delta(2)
        compact(history.storage, fold=fold, now=clock)
    history.snapshot(is_fuzzy=True)
    history.delta(2)
    history.delta(2)
    clock.seconds += 10
    return readers


def _named(history: History) -> set[str]:
    entries = [history.log.read(version) for version in history.log.versions()]
    entries += [history.log.read_merged(each) for each in history.log.merged()]
    return {part.name for entry in entries for part in entry.parts}


class Crowd:
    """Threads that each repeat one operation; the first failure ends all of them."""

    def __init__(self, *works) -> None:
        self.done = threading.Event()
        self.failures: list[BaseException] = []
        self.threads = [threading.Thread(target=self._run, args=(work,)) for work in works]
        for thread in self.threads:
            thread.start()

    def end(self) -> None:
        self.done.set()
        for thread in self.threads:
            thread.join()
        assert self.failures == []

    def _run(self, work) -> None:
        try:
            while not self.done.is_set():
                work()
        except BaseException as error:  # noqa: BLE001  asserted at the end
            self.failures.append(error)
            self.done.set()


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_concurrent_readers_publishers_retention_and_compactions(kind: str, tmp_path: Path) -> None:
    """In any interleaving, readers hold exactly the versions' rows."""
    storage = Storage("memory://" if kind == "memory" else f"file://{tmp_path}/s", create=True, fsync=kind == "memory")
    history = History(storage, 9)
    readers = [Reader(history, seed) for seed in range(3)]
    merged, removed = [], []
    crowd = Crowd(
        *(reader.sync for reader in readers),
        *[lambda: merged.append(compact(storage))] * 2,
        *[lambda: removed.append(retain(storage, Retention(versions=5, grace_seconds=0)).versions)] * 2,
    )
    chance = random.Random(9)
    for number in range(10_000):
        if crowd.failures or (number > 60 and sum(removed) > 40 and len([each for each in merged if each]) > 3):
            break
        name = chance.choice(["delta"] * 8 + ["snapshot", "fuzzy", "claim"])
        history.snapshot(is_fuzzy=True) if name == "fuzzy" else getattr(history, name)()
    crowd.end()
    for reader in readers:
        reader.sync()
        assert reader.held.version == history.version
