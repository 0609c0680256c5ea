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
from collections.abc import Callable, Iterable
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from delta_tracker import Predictor
from delta_tracker.errors import StorageError
from delta_tracker.stream.format import object_reader
from delta_tracker.stream.format.manifest import entry_name
from delta_tracker.stream.format.object_reader import read_object
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.maintenance.retention import Retention, retain
from delta_tracker.stream.mirroring import Mirror
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import StateSpec, TableStates
from tests.stores.rules import Moment, hides, watches
from tests.stores.wrapped import Operation, Rule, WrappedStorage
from tests.stream.streams import FQN, Writer

_STATES = TableStates("ADAM", ((0, 4),), (StateSpec("momentum1", torch.float32, "columns"),))
_OLD = Retention(versions=1, grace_seconds=0.0)


def watched(url: str, *rules: Rule) -> WrappedStorage:
    """Return a destination with rules around it."""
    return WrappedStorage(Storage(url, create=True, fsync=False), *rules)


class Scenario:
    """A source, which a mirror copies in two stages.

    Args:
        is_merged: True if the source has only a merged snapshot to start from.
    """

    def __init__(self, *, is_merged: bool) -> None:
        torch.manual_seed(0)
        self.source = WrappedStorage(Storage("memory://"), hides(self._is_later))
        self.limit = 1 << 30  # the newest version that was published yet
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
        with mock.patch.object(object_reader, "_READ_BYTES", 100):
            for version in self.stages if stages is None else stages:
                self.limit = version
                mirror().run(stop=threading.Event(), poll_seconds=0.001, once=True)

    def _is_later(self, name: str) -> bool:
        return name.startswith("log/") and name > entry_name(self.limit)

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
                read_object(storage, stored)
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


def points_of(scenario: Scenario, root: Path) -> tuple[list[tuple[int, Moment]], list[tuple[int, Moment]]]:
    """Return the points of the destination and of the source, of an undisturbed run."""
    found: tuple[list[tuple[int, Moment]], list[tuple[int, Moment]]] = ([], [])
    rules = [watches(lambda operation, when, to=to: to.append((operation.number, when))) for to in found]
    destination = watched((root / "dry").as_uri(), rules[0])
    scenario.source.take()
    with scenario.source.under(rules[1]):
        scenario.play(lambda: scenario.mirror(destination))
    assert scenario.check_prefix(destination.url) == scenario.stages[-1]
    return found


def kill_at(scenario: Scenario, root: Path, point: tuple[int, Moment], act: Callable[[], None]) -> None:
    """Disturb a mirror at a point of its destination with ``act``, which does not return."""

    def reached(operation: Operation, when: Moment) -> None:
        if (operation.number, when) == point:
            act()

    destination = watched(root.as_uri(), watches(reached))
    scenario.play(lambda: scenario.mirror(destination))
    raise AssertionError("it outlived the point")


def check_killed(scenario: Scenario, root: Path) -> None:
    """Check the destination after a kill, and that another mirror completes it."""
    scenario.check_prefix(root.as_uri())
    destination = Storage(root.as_uri())
    scenario.play(lambda: scenario.mirror(destination), scenario.stages[-1:])
    assert scenario.check_prefix(root.as_uri()) == scenario.stages[-1]


def fail_at(scenario: Scenario, root: Path, point: tuple[int, Moment], *, is_source: bool) -> None:
    """Let a store fail at a point, once, and check that the same mirror continues."""

    def reached(operation: Operation, when: Moment) -> None:
        if (operation.number, when) == point and not fired:
            fired.append(point)
            raise StorageError(operation.url, "connection reset")

    fired: list[tuple[int, Moment]] = []
    rule = watches(reached)
    destination = watched(root.as_uri(), *[rule] * (not is_source))
    scenario.source.take()
    with scenario.source.under(*[rule] * is_source):  # outside the rule that hides later versions, as in points_of()
        for stage in scenario.stages:
            mirror = scenario.mirror(destination)
            try:
                scenario.play(lambda mirror=mirror: mirror, [stage])
            except StorageError:
                scenario.check_prefix(root.as_uri())
                scenario.play(lambda mirror=mirror: mirror, [stage])
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
