"""Retention and compaction killed at every operation, and concurrent with readers and publishers."""

from __future__ import annotations

import copy
import random
import threading
from pathlib import Path

import pytest

from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.maintenance.retention import Retention, retain
from delta_tracker.stream.storage.storage import Storage
from tests.stream.histories import Clock, ClockedStorage, History, Reader


class Killed(ClockedStorage):
    """Fails before or after its n-th operation and at all later ones, like a killed process."""

    left = -1
    is_after = False
    num_operations = 0

    def _around(self, call):
        self.num_operations += 1
        if self.left == 0:
            raise KeyboardInterrupt
        if self.left > 0:
            self.left -= 1
        if self.left == 0 and not self.is_after:
            raise KeyboardInterrupt
        found = call()
        if self.left == 0:
            raise KeyboardInterrupt
        return found

    def put(self, name, buffers):
        self._around(lambda: super(Killed, self).put(name, buffers))

    def create(self, name, data):
        return self._around(lambda: super(Killed, self).create(name, data))

    def read(self, name, **bound):
        return self._around(lambda: super(Killed, self).read(name, **bound))

    def read_range(self, name, begin, end):
        return self._around(lambda: super(Killed, self).read_range(name, begin, end))

    def size(self, name):
        return self._around(lambda: super(Killed, self).size(name))

    def delete(self, name):
        self._around(lambda: super(Killed, self).delete(name))

    def objects(self, prefix, *, after=None):
        return self._around(lambda: super(Killed, self).objects(prefix, after=after))


def _compacted(fold: float):
    return lambda storage: compact(storage, fold=fold, now=storage.clock)


def _retained(storage: Storage) -> None:
    retain(storage, Retention(versions=1, grace_seconds=0), storage.clock)


@pytest.mark.parametrize("work", [_compacted(1e9), _compacted(1e-9), _retained], ids=["delta", "snapshot", "retention"])
@pytest.mark.parametrize("is_after", [False, True])
def test_after_a_kill_anywhere_readers_continue_and_another_pass_finishes(work, is_after: bool) -> None:
    """Visit every operation on the store."""
    count, is_through = 0, False
    while not is_through:
        clock = Clock()
        with clock.of_the_log():
            storage = Killed(clock)
            history = History(storage, 8)
            behind = _readers_on_the_way(history)
            storage.num_operations, storage.left, storage.is_after = 0, count + 1, is_after
            try:
                work(storage)
                is_through = True
            except KeyboardInterrupt:
                assert storage.num_operations == count + 1
            storage.left = -1
            for reader in [copy.copy(each) for each in behind] + [Reader(history)]:
                reader.sync()
                assert reader.held.version == history.version
            clock.seconds += 4000
            work(storage)
            storage.replace("predictors/live.json", b"")
            for _ in range(2):  # the second pass removes what the first superseded
                retain(storage, Retention(versions=1), clock)
            assert set(storage.names("parts")) == _named(history)
            for reader in [*behind, Reader(history)]:
                reader.sync()
                assert reader.held.version == history.version
        count += 1
    assert count > 10


def _readers_on_the_way(history: History) -> list[Reader]:
    """Return readers at three versions of a stream with merged versions and a fuzzy snapshot before its head."""
    readers = [Reader(history, seed) for seed in range(3)]
    for reader, fold in zip(readers, [1e9, 1e-9, 1e9], strict=True):
        reader.sync()
        history.delta(2)
        history.delta(2)
        compact(history.storage, fold=fold, now=history.storage.clock)
    history.snapshot(is_fuzzy=True)
    history.delta(2)
    history.delta(2)
    history.storage.clock.seconds += 10
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
