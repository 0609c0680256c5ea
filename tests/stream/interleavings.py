"""Model check of the real log: publishers sleep or die at every point around claims, commits and retention.

A publisher's program runs until one of its operations on the store. There it may sleep while others claim, publish and
remove old versions, or it may die. :func:`explore` runs a program once for each combination of these choices. The store
records the truth: an entry is part of the log if its name was new when it was created, and late if retention had
freed the name. ``python -m tests.stream.interleavings 2`` lets each run sleep twice, which takes minutes.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any
from unittest import mock

import numpy as np

from delta_tracker.errors import FencedError, StorageError, StreamError
from delta_tracker.stream import log
from delta_tracker.stream.format.manifest import Manifest, entry_name
from delta_tracker.stream.format.parse import parse_manifest
from delta_tracker.stream.log import Claim, StreamLog
from delta_tracker.stream.maintenance.retention import Retention, retain
from delta_tracker.stream.reading.path import next_entry, path_to
from delta_tracker.stream.reading.position import Position
from delta_tracker.stream.reading.source import Source
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.stream.storage.store import StoredObject, Transfer

_parse = functools.cache(parse_manifest)  # parsing takes most of the time


class Killed(BaseException):
    """Simulates a killed process, whose exception handlers do not run."""


class Choices:
    """The choices of one run: a given prefix, then zeros."""

    def __init__(self, given: list[int]) -> None:
        self._given = given
        self.taken: list[tuple[int, int]] = []  # the choice and the number of options

    def __call__(self, count: int) -> int:
        number = len(self.taken)
        choice = self._given[number] if number < len(self._given) else 0
        self.taken.append((choice, count))
        return choice

    def following(self) -> list[int] | None:
        """Return the choices of the next run in depth-first order, None after the last one."""
        taken = list(self.taken)
        while taken:
            choice, count = taken.pop()
            if choice + 1 < count:
                return [*(before for before, _ in taken), choice + 1]
        return None


class TrueStorage(Storage):
    """Objects in a dictionary; calls ``before_each`` before each operation and records which entries are committed.

    Args:
        lists_from: False for a store that can only be listed as a whole, like a directory.
    """

    def __init__(self, *, lists_from: bool) -> None:
        super().__init__("memory://")
        self.lists_from = lists_from
        self.data: dict[str, bytes] = {}
        self.truth: dict[int, bytes] = {}
        self.before_each: Callable[[], None] = lambda: None
        self.refuses: Callable[[], object] = lambda: False  # with "try again"
        self.loses_answer = False

    def _create_once(self, name: str, data: bytes) -> bool:
        self.before_each()
        if name in self.data or self.refuses():
            return False
        self.data[name] = data
        if name == entry_name(len(self.truth)):
            self.truth[len(self.truth)] = data
        if self.loses_answer:
            raise StorageError(self.url, "connection reset")
        return True

    def read(self, name: str, *, transfer: Transfer | None = None, **_: Any) -> Any:
        self.before_each()
        if self.loses_answer:
            raise StorageError(self.url, "connection reset")
        data = self.data.get(name)
        if transfer is not None and data is not None:
            transfer.modified = 0.0  # as in listings, so that every version is old enough for retention
        return None if data is None else np.frombuffer(data, np.uint8)

    def delete(self, name: str) -> None:
        self.before_each()
        self.data.pop(name, None)

    def stat(self, name: str) -> StoredObject | None:
        self.before_each()
        return StoredObject(name, len(self.data[name]), 0.0) if name in self.data else None

    def has_any(self, names: Sequence[str]) -> bool:
        return any(map(self.stat, names))

    def objects(self, prefix: str, *, after: str | None = None) -> list[StoredObject]:
        self.before_each()
        names = sorted(name for name in self.data if name.startswith(prefix + "/") and name > (after or ""))
        return [StoredObject(name, len(self.data[name]), 0.0) for name in names]

    def names(self, prefix: str, *, after: str | None = None) -> list[str]:
        return [each.name for each in self.objects(prefix, after=after)]


def _draft(kind: str) -> Manifest:
    return Manifest(stream="", generation=0, writer="", version=0, kind=kind, created=0.0)  # type: ignore[arg-type]


class World:
    """A stream, the publisher that owns it, and sleeping publishers."""

    # Events while a publisher sleeps: c a claim, s a snapshot, d a delta, r retention, b another publisher begins to
    # claim and may sleep or die as well.
    HISTORIES = ("csddr", "sddr", "dccsdr", "cdr", "dsdrcsdr", "bsddr", "cbsdr")

    def __init__(self, choose: Choices, *, max_sleeps: int, is_old: bool, is_directory: bool) -> None:
        self.choose = choose
        self.max_sleeps = max_sleeps
        self.histories = self.HISTORIES
        self.is_old = is_old  # the former retention, which removes claims too
        self.storage = TrueStorage(lists_from=not is_directory)
        self.log = StreamLog(self.storage)
        self.owner = self.log.claim()
        self.owner.commit(_draft("snapshot"))
        self.owner.commit(_draft("delta"))
        self.sleeps = 0
        self.is_disturbed = False

    def run(self, program: Callable[[], object]) -> bool:
        """Run a publisher's program with events around its operations; return False if it was killed."""
        outer = self.storage.before_each
        self.storage.before_each, self.storage.refuses = self._operation, self._refuses
        try:
            program()
        except Killed:
            return False
        finally:
            self.storage.before_each, self.storage.refuses = outer, lambda: False
            self.check_readers()
        return True

    def _refuses(self) -> bool:
        if self.is_disturbed or not self.choose(2):
            return False
        self.is_disturbed = True
        return True

    def _operation(self) -> None:
        choices = ["go on"]
        if not self.is_old:
            choices.append("die")
        if self.sleeps < self.max_sleeps:
            choices += self.histories
        choice = choices[self.choose(len(choices))]
        if choice == "die":
            raise Killed
        if choice != "go on":
            self.sleeps += 1
            self.is_disturbed = True
            inside, self.storage.before_each = self.storage.before_each, lambda: None
            for step in choice:
                self.step(step)
                self.check_readers()
            self.storage.before_each = inside

    def step(self, step: str) -> None:
        if step == "c":
            self.owner = self.log.claim()
        elif step == "b":
            self.claim()
        elif step in "sd":
            try:
                self.owner.commit(_draft("snapshot" if step == "s" else "delta"))
            except FencedError:  # by "b"
                self.owner = self.log.claim()
        elif self.is_old:
            for version in range(len(self.storage.truth) - 2):
                self.storage.delete(entry_name(version))
        else:
            retain(self.log, Retention(versions=1, grace_seconds=0.0))

    def claim(self) -> None:
        """Claim as a publisher; the head that it then holds must be part of the log."""
        if self.sleeps == 0 and self.choose(2):
            self.step("c")  # the head is a claim, which retention keeps
        claims: list[Claim] = []
        self.run(lambda: claims.append(self.log.claim()))
        self.assert_true([each.head for each in claims])

    def commit(self) -> None:
        """Commit a delta as a publisher that may be fenced and may not know its newest entry."""
        publisher = self.log.claim()
        publisher.commit(_draft("snapshot"))
        if self.choose(2):
            self.storage.loses_answer = True
            try:
                publisher.commit(_draft("delta"))
            except StorageError:
                self.storage.loses_answer = False
        committed: list[Manifest] = []

        def program() -> None:
            try:
                committed.append(publisher.commit(_draft("delta")))
            except FencedError:
                assert self.sleeps, "it is fenced, and there is no other publisher"

        self.histories = tuple(each for each in self.HISTORIES if each[0] == "c")  # it owns the stream
        is_alive = self.run(program)
        self.assert_true(committed)
        if is_alive:
            self.assert_nothing_is_late()

    def assert_true(self, entries: list[Manifest]) -> None:
        for entry in entries:
            assert self.storage.truth[entry.version] == entry.to_json(), "it holds what is not part of the log"

    def assert_nothing_is_late(self) -> None:
        for version in self.log.versions():
            assert self.storage.data[entry_name(version)] == self.storage.truth[version], f"{version} is late"

    def check_readers(self) -> None:
        """Check that no late entry is served to readers at the version before it or returning to its version."""
        if self.is_old:
            return
        before, self.storage.before_each = self.storage.before_each, lambda: None
        for version in self.log.versions():
            if self.storage.data[entry_name(version)] != self.storage.truth[version]:
                found: list[Manifest | None] = []
                if version:
                    position = Position.after(_parse(entry_name(version - 1), self.storage.truth[version - 1]))
                    with contextlib.suppress(StreamError):
                        source = Source(0, self.storage)
                        found.append(next_entry(source.log, position, source.next(position, looks_for_gap=False)))
                with contextlib.suppress(StreamError):
                    found += path_to(self.log, version)
                self.assert_true([each for each in found if each is not None and each.version == version])
        self.storage.before_each = before

    def finish(self) -> None:
        """Check that the next publisher can claim, and that retention keeps what readers and sleepers need."""
        self.storage.before_each = lambda: None
        for step in "csdrdr":
            self.step(step)
        self.check_readers()
        if not self.is_old:
            self.assert_nothing_is_late()
            entries = [_parse(entry_name(version), data) for version, data in sorted(self.storage.truth.items())]
            claims = [entry.version for entry in entries if entry.kind == "claim"]
            kept = set(self.log.versions())
            assert kept >= {version for claim in claims for version in (claim - 1, claim) if version >= 0}


def explore(program: str, *, max_sleeps: int = 1, is_old: bool = False, is_directory: bool = False) -> int:
    """Run a program of :class:`World` with all choices; return the number of runs."""
    given: list[int] | None = []
    count = 0
    with (
        mock.patch.object(log, "parse_manifest", _parse),
        mock.patch("time.sleep", return_value=None),  # before a refused create is repeated
    ):
        while given is not None:
            _parse.cache_clear()
            choices = Choices(given)
            world = World(choices, max_sleeps=max_sleeps, is_old=is_old, is_directory=is_directory)
            try:
                getattr(world, program)()
                world.finish()
            except Exception as error:
                error.add_note(f"{program} with the choices {[choice for choice, _ in choices.taken]}")
                raise
            count += 1
            given = choices.following()
    return count


if __name__ == "__main__":
    for program in ("commit", "claim"):
        for is_old, is_directory in product((False, True), repeat=2):
            count = explore(program, max_sleeps=int(sys.argv[1]), is_old=is_old, is_directory=is_directory)
            print(program, "old" if is_old else "new", "directory" if is_directory else "bucket", count)
