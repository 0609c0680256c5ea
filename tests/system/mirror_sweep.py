"""Sweep over every storage operation of a mirror: ``python -m tests.system.mirror_sweep DIRECTORY`` kills processes.

At each point a mirror is killed, or a store fails. Afterwards the destination must be a prefix of the source, and
another mirror must complete it. ``make test`` raises an exception that no handler catches instead of killing a process,
at a part of the points.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor

from delta_tracker import Predictor
from delta_tracker.errors import StorageError
from delta_tracker.stream import mirror as mirror_module
from delta_tracker.stream.format.part_reader import check_object
from delta_tracker.stream.log import StreamLog, entry_name
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.maintenance.retention import Retention, retain
from delta_tracker.stream.mirror import Mirror
from delta_tracker.stream.storage.storage import Storage, StoredObject
from delta_tracker.types import StateSpec, TableStates
from tests.stream.streams import FQN, Writer

When = Literal["before", "within", "after"]
Reached = Callable[[int, When], None]
_STATES = TableStates("ADAM", ((0, 4),), (StateSpec("momentum1", torch.float32, "columns"),))
_OLD = Retention(versions=1, grace_seconds=0.0)


class Killed(BaseException):
    """Simulates a killed process, whose exception handlers do not run."""


class Watched(Storage):
    """A store that calls ``reached`` with the number of each operation, before, within and after it."""

    def __init__(self, url: str, reached: Reached | None = None) -> None:
        is_file = url.startswith("file:")
        super().__init__(url, create=is_file, fsync=not is_file)
        self.reached = reached
        self.num_operations = 0
        self._is_inside = False

    def _around(self, call: Callable[[], Any]) -> Any:
        if self.reached is None or self._is_inside:
            return call()
        number, self.num_operations = self.num_operations, self.num_operations + 1
        self.reached(number, "before")
        self._is_inside = True
        try:
            result = call()
        finally:
            self._is_inside = False
        self.reached(number, "after")
        return result

    def put(self, name: str, buffers: Iterable[memoryview]) -> None:
        number = self.num_operations

        def watched() -> Iterator[memoryview]:
            for index, buffer in enumerate(buffers):
                if index == 1 and self.reached is not None:
                    self.reached(number, "within")
                yield buffer

        self._around(lambda: super(Watched, self).put(name, watched()))

    def create(self, name: str, data: bytes) -> bool:
        return self._around(lambda: super(Watched, self).create(name, data))

    def read(self, name: str, **options: Any) -> Any:
        return self._around(lambda: super(Watched, self).read(name, **options))

    def read_range(self, name: str, begin: int, end: int) -> Any:
        return self._around(lambda: super(Watched, self).read_range(name, begin, end))

    def size(self, name: str) -> int | None:
        return self._around(lambda: super(Watched, self).size(name))

    def delete(self, name: str) -> None:
        self._around(lambda: super(Watched, self).delete(name))

    def objects(self, prefix: str, *, after: str | None = None) -> list[StoredObject]:
        return self._around(lambda: super(Watched, self).objects(prefix, after=after))


class Source(Watched):
    """A source of which only the versions up to ``limit`` were published yet."""

    limit = 1 << 30

    def read(self, name: str, **options: Any) -> Any:
        return None if name.startswith("log/") and name > entry_name(self.limit) else super().read(name, **options)

    def objects(self, prefix: str, *, after: str | None = None) -> list[StoredObject]:
        found = super().objects(prefix, after=after)
        return [each for each in found if prefix != "log" or each.name <= entry_name(self.limit)]


class Scenario:
    """A source, which a mirror copies in two stages.

    Args:
        is_merged: True if the source has only a merged snapshot to start from.
    """

    def __init__(self, *, is_merged: bool) -> None:
        torch.manual_seed(0)
        self.source = Source("memory://")
        self.tables: dict[int, Tensor] = {}
        writer = Writer(self.source, states=_STATES)
        writer.training = [b"rank 0"]
        self._write(writer, "snapshot", 3)
        first = writer.claim.head.version
        writer.claim = StreamLog(self.source).claim()
        self._record(writer)
        self._write(writer, "delta", 2)
        compact(self.source, fold=1e-9 if is_merged else 10.0)
        if is_merged:
            self._write(writer, "delta", 1)
            retain(self.source, _OLD, now=lambda: time.time() + 1)
            first = writer.claim.head.version
        self._write(writer, "delta" if is_merged else "snapshot", 2)
        self.stages = [first, writer.claim.head.version]

    def mirror(self, destination: Storage) -> Mirror:
        """Return a mirror that copies the larger objects in several pieces."""
        return Mirror(
            self.source,
            destination,
            retention=Retention(versions=3, grace_seconds=0.0),
            memory_bytes=300,
            pointer_seconds=None,  # another thread writes it, so that the operations would be random
        )

    def play(self, mirror: Callable[[], Mirror], stages: Iterable[int] | None = None) -> None:
        """Copy the source up to each of the versions ``stages``, with a new mirror for each."""
        with mock.patch.object(mirror_module, "_PIECE_BYTES", 100):
            for version in self.stages if stages is None else stages:
                self.source.limit = version
                mirror().run(stop=threading.Event(), poll_seconds=0.001, once=True)

    def check_prefix(self, url: str) -> int:
        """Check that the destination is a prefix of the source, and return its newest version, -1 if it is empty."""
        storage = Storage(url)
        log = StreamLog(storage)
        for name in (*storage.names("log"), *storage.names("merged")):
            there, expected = (each.read(name, max_bytes=1 << 20) for each in (storage, self.source))
            assert there is not None
            assert expected is not None
            assert there.tobytes() == expected.tobytes(), name
        versions = log.versions()
        if not versions:
            return -1
        lowest = next(each for each in range(versions[-1], -2, -1) if each - 1 not in versions)
        claims = [each for each in versions if self._kind(log, each) == "claim"]
        assert {*versions} <= {*range(lowest, versions[-1] + 1), *claims, *(each - 1 for each in claims)}
        complete = [log.read(each) for each in range(lowest, versions[-1] + 1) if each + 1 not in claims]
        for entry in (*complete, *(log.read_merged(each) for each in log.merged())):
            assert entry is not None
            for stored in entry.objects:
                check_object(stored, storage.read(stored.name, max_bytes=stored.num_bytes))
        table = torch.zeros(20, 4)
        predictor = Predictor({FQN: table}, storage)
        assert predictor.sync() == versions[-1]
        assert predictor.status().resyncs == 0
        assert torch.equal(table, self.tables[versions[-1]])
        return versions[-1]

    def _kind(self, log: StreamLog, version: int) -> str:
        entry = log.read(version)
        assert entry is not None
        return entry.kind

    def _write(self, writer: Writer, kind: str, count: int) -> None:
        for number in range(count):
            writer.delta([number, 5]) if kind == "delta" or number else writer.snapshot()
            self._record(writer)

    def _record(self, writer: Writer) -> None:
        self.tables[writer.claim.head.version] = writer.table.clone()


def points_of(scenario: Scenario, root: Path) -> tuple[list[tuple[int, When]], list[tuple[int, When]]]:
    """Return the points of the destination and of the source, of an undisturbed run."""
    found: tuple[list[tuple[int, When]], list[tuple[int, When]]] = ([], [])
    destination = Watched((root / "dry").as_uri(), lambda number, when: found[0].append((number, when)))
    scenario.source.num_operations = 0
    scenario.source.reached = lambda number, when: found[1].append((number, when))
    scenario.play(lambda: scenario.mirror(destination))
    scenario.source.reached = None
    assert scenario.check_prefix(destination.url) == scenario.stages[-1]
    return found


def kill_at(scenario: Scenario, root: Path, point: tuple[int, When], act: Callable[[], None]) -> None:
    """Disturb a mirror at a point of its destination with ``act``, which does not return."""

    def reached(number: int, when: When) -> None:
        if (number, when) == point:
            act()

    destination = Watched(root.as_uri(), reached)
    scenario.play(lambda: scenario.mirror(destination))
    raise AssertionError("it outlived the point")


def check_killed(scenario: Scenario, root: Path) -> None:
    """Check the destination after a kill, and that another mirror completes it."""
    scenario.check_prefix(root.as_uri())
    destination = Storage(root.as_uri())
    scenario.play(lambda: scenario.mirror(destination), scenario.stages[-1:])
    assert scenario.check_prefix(root.as_uri()) == scenario.stages[-1]


def fail_at(scenario: Scenario, root: Path, point: tuple[int, When], *, is_source: bool) -> None:
    """Let a store fail at a point, once, and check that the same mirror continues."""

    def reached(number: int, when: When) -> None:
        if (number, when) == point:
            fired.append(point)
            raise StorageError("file:///", "connection reset")

    fired: list[tuple[int, When]] = []
    destination = Watched(root.as_uri(), None if is_source else reached)
    scenario.source.num_operations = 0
    scenario.source.reached = reached if is_source else None
    for stage in scenario.stages:
        mirror = scenario.mirror(destination)
        try:
            scenario.play(lambda mirror=mirror: mirror, [stage])
        except StorageError:
            scenario.source.reached = None  # it fails once
            scenario.check_prefix(root.as_uri())
            scenario.play(lambda mirror=mirror: mirror, [stage])
    scenario.source.reached = None
    assert fired == [point]
    assert scenario.check_prefix(root.as_uri()) == scenario.stages[-1]


def main(root: Path) -> None:
    """Kill a process at every point of the destination."""
    for is_merged in (False, True):
        scenario = Scenario(is_merged=is_merged)
        points, _ = points_of(scenario, root / f"dry{is_merged}")
        for index, point in enumerate(points):
            place = root / f"{is_merged}{index}"
            child = os.fork()
            if not child:
                with contextlib.suppress(BaseException):
                    kill_at(scenario, place, point, lambda: os.kill(os.getpid(), signal.SIGKILL))
                os._exit(1)
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status), f"it was not killed at {point}"
            check_killed(scenario, place)
            shutil.rmtree(place)
        print(len(points))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
