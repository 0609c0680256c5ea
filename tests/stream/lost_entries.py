"""Model check of the real log while a person deletes its newest entries.

One publisher commits a version. At one of its operations, or before it, events happen: other publishers claim and
publish, retention runs, and a person deletes the newest entry, the two newest, or all. The publisher may also die
there. :func:`explore` runs this once for each combination. Then all publishers that are alive publish in turn, and

- at most one of them continues, and if none does, a new one can claim the stream;
- a publisher has published no version after one of its successors, of which anything is left in the log;
- no publisher creates one name twice with different bytes;
- every reader, at whatever version, and a new one arrive at the newest version, with its rows.

``python -m tests.stream.lost_entries`` explores more histories.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from itertools import product
from unittest import mock

from delta_tracker.errors import FencedError, LostEntryError, StorageError, StreamError
from delta_tracker.stream import log as log_module
from delta_tracker.stream.format.manifest import Kind, Manifest
from delta_tracker.stream.format.parse import parse_manifest
from delta_tracker.stream.log import Claim, StreamLog
from delta_tracker.stream.maintenance.retention import Retention, retain
from delta_tracker.stream.reading.position import Position
from tests.stream.interleavings import Choices, Killed, TrueStorage, _draft
from tests.stream.plain_reader import plain_reader

# x deletes the newest entry, X all; c is a claim of another publisher, s and d are its snapshot and delta; r retention.
BEFORE = ("", "x", "xx", "X", "r")
MEANWHILE = ("x", "xx", "X", "c", "cs", "xc", "xcs", "cx", "csx", "csdx", "csxx", "csxs", "csdrx", "Xcs", "rx", "csrx")
MORTAL = ("", "x", "xx", "cs")  # after which the publisher may die
_ROUNDS = 4
_parse = functools.cache(parse_manifest)  # parsing takes a third of the time


class World:
    """A stream, its publishers, and its readers."""

    def __init__(self, choose: Choices, *, is_directory: bool, befores: tuple[str, ...]) -> None:
        self.choose, self.is_directory = choose, is_directory
        self.storage = TrueStorage(lists_from=not is_directory)
        self.log = StreamLog(self.storage)
        self.used: dict[tuple[str, str], bytes] = {}  # name and publisher to the bytes that it created
        self.deleted: set[bytes] = set()  # by the person
        self.places: list[Position] = []  # of readers
        self.is_disturbed = False
        self.history = ""
        self.writers: dict[str, str] = {}  # writer of a claim to that of the publisher's first claim
        self.publishers: list[Claim] = []
        self.acknowledged: list[tuple[Claim, Manifest]] = []
        self._watch()
        self.claim()
        for kind in ("snapshot", "delta", "delta"):
            self.commit(self.publishers[0], kind)
        for event in befores[choose(len(befores))]:
            self.event(event)

    def _watch(self) -> None:
        create = self.storage._create_once

        def watched(name: str, data: bytes) -> bool:
            created = create(name, data)
            if created and name.startswith("log/"):
                key = name, self._publisher_of(_parse(name, data).writer)
                assert self.used.setdefault(key, data) == data, f"{name} was created again"
            return created

        self.storage._create_once = watched  # type: ignore[method-assign]

    def _publisher_of(self, writer: str) -> str:
        """Return the writer of the first claim of a publisher."""
        self.writers[log_module._next_writer(writer)] = self.writers.setdefault(writer, writer)
        return self.writers[writer]

    def claim(self) -> None:
        self.publishers.append(self.log.claim())

    def commit(self, publisher: Claim, kind: Kind) -> bool:
        """Commit a version; a snapshot if the newest entry was lost. Return False if the publisher is fenced."""
        try:
            try:
                entry = publisher.commit(_draft("snapshot" if publisher.needs_snapshot else kind))
            except LostEntryError:
                entry = publisher.commit(_draft("snapshot"))
        except FencedError:
            return False
        self._acknowledge(publisher, entry)
        return True

    def _acknowledge(self, publisher: Claim, entry: Manifest) -> None:
        self.acknowledged.append((publisher, entry))
        self.places.append(Position.after(entry))
        if entry.to_json() in self.deleted:
            return
        found = self._entries()
        above = [each for version, each in found.items() if version > entry.version]
        assert found.get(entry.version) == entry, "what was acknowledged is not there"
        assert not above or found[min(each.version for each in above)].parent == entry.link, (
            "the log continues elsewhere"
        )
        order = [self._publisher_of(writer) for writer in list(self.writers)]  # publishers in the order of their claims
        rank = order.index(self._publisher_of(entry.writer))
        newer = [each.version for each in found.values() if order.index(self._publisher_of(each.writer)) > rank]
        assert not [version for version in newer if version < entry.version], "it was superseded"

    def _entries(self) -> dict[int, Manifest]:
        names = sorted(name for name in self.storage.data if name.startswith("log/"))
        found = [_parse(name, self.storage.data[name]) for name in names]
        return {each.version: each for each in found}

    def event(self, event: str) -> None:
        names = sorted(name for name in self.storage.data if name.startswith("log/"))
        if event in "xX":
            for name in names[-1:] if event == "x" else names:
                self.deleted.add(self.storage.data.pop(name))
        elif event == "c":
            self.claim()
        elif event == "r":
            retain(self.log, Retention(versions=1, grace_seconds=0.0))
        else:
            self.commit(self.publishers[-1], "snapshot" if event == "s" else "delta")

    def run(self, kind: Kind) -> None:
        """Commit a version with the first publisher, with events around its operations."""
        self.storage.before_each = self._operation
        try:
            self.commit(self.publishers[0], kind)
        except Killed:
            self.publishers.pop(0)
        except StorageError:  # unknown: the next attempt finds what became of it
            assert self.is_disturbed
        finally:
            self.storage.before_each = lambda: None

    def _operation(self) -> None:
        choices = ["go on", *(["die"] if self.history in MORTAL else []), *([] if self.is_disturbed else MEANWHILE)]
        choice = choices[self.choose(len(choices))]
        if choice == "die":
            raise Killed
        if choice != "go on":
            self.is_disturbed, self.history = True, choice
            before, self.storage.before_each = self.storage.before_each, lambda: None
            for event in choice:
                self.event(event)
            self.storage.before_each = before

    def finish(self) -> None:
        """Let all publishers that are alive publish in turn, then check who is left, and all readers."""
        last: list[Claim] = []
        for _ in range(_ROUNDS):
            last = [each for each in self.publishers if self.commit(each, "delta")]
        assert len(last) <= 1, "two publishers continue"
        if not last:
            self.claim()
            last = [self.publishers[-1]]
        assert self.commit(last[0], "snapshot")
        assert self.commit(last[0], "delta")
        head = self._entries()[max(self._entries())]
        assert last[0].head == head
        there = Position.after(head)
        for place in [None, *self.places]:
            reader = plain_reader(self.log.storage, place)
            num_left = 2 * _ROUNDS + 10
            while num_left:
                with contextlib.suppress(StreamError):
                    reader.advance(looks_for_gap=True)
                num_left = min(num_left - 1, 2) if reader.position == there else num_left - 1  # it stays there
            assert reader.position == there, f"a reader at {place} does not arrive"


def explore(kind: Kind, *, is_directory: bool, befores: tuple[str, ...] = BEFORE) -> int:
    """Run all choices; return the number of runs."""
    given: list[int] | None = []
    count = 0
    with mock.patch.object(log_module, "parse_manifest", _parse):
        while given is not None:
            _parse.cache_clear()
            choices = Choices(given)
            world = World(choices, is_directory=is_directory, befores=befores)
            try:
                world.run(kind)
                world.finish()
            except Exception as error:
                error.add_note(f"{kind} with the choices {[choice for choice, _ in choices.taken]} {world.history}")
                raise
            count += 1
            given = choices.following()
    return count


if __name__ == "__main__":
    logging.disable()
    kinds: tuple[Kind, ...] = ("snapshot", "delta")
    for each, is_directory in product(kinds, (False, True)):
        found = explore(each, is_directory=is_directory)
        sys.stdout.write(f"{each} {'directory' if is_directory else 'bucket'} {found}\n")
