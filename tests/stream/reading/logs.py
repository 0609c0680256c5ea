"""Logs in memory, named by words, that answer the questions of a reader.

Each letter of a word is an entry: ``s`` a snapshot, ``d`` a delta, ``c`` a claim of another publisher, or of the first,
``r`` such a claim an hour later, ``f`` a claim that starts a fork, ``x`` a claim that starts an unrelated stream. The
hash of an entry is the word up to it. So two logs have the entries of their common prefix in common, and a word shows
its whole history.

There are three rows. The snapshot or delta of version ``v`` writes row ``v % 3``.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any
from unittest import mock

from delta_tracker.errors import (
    CorruptPartError,
    MalformedError,
    MissingVersionError,
    StorageError,
    StreamError,
    StreamReplacedError,
)
from delta_tracker.stream.format.manifest import Fork, Link, Manifest, Merged, entry_name
from delta_tracker.stream.reading import catch_up
from delta_tracker.stream.reading.orders import Order
from delta_tracker.stream.reading.position import Position

NUM_ROWS = 3
Rows = tuple[str, ...]


@cache
def stream_of(word: str) -> str:
    """Return the stream of the last entry of a word: the word up to the claim that starts it."""
    return word[: max(word.rfind("f"), 0) + 1]


@cache
def lineage(word: str) -> tuple[str, ...]:
    """Return the stream of the last entry of a word and those that it continues, the newest first."""
    found = [stream_of(word)]
    while len(found[-1]) > 1:
        found.append(stream_of(found[-1][:-1]))
    return tuple(found)


@cache
def generation_of(word: str) -> int:
    """Return the generation of the last entry of a word."""
    return sum(letter in "xcfr" for letter in word)


@cache
def created(word: str) -> float:
    """Return when the last entry of a word was committed, in seconds."""
    return len(word) + 3600.0 * word.count("r")


@cache
def rows_after(word: str) -> Rows:
    """Return the rows of the trainer at the last entry of a word: the word of the version that wrote each."""
    if not word:
        return ("",) * NUM_ROWS
    rows = list(rows_after(word[:-1]))
    if word[-1] in "sd":
        rows[(len(word) - 1) % NUM_ROWS] = word
    return tuple(rows)


@cache
def entry_of(word: str) -> Manifest:
    """Return the last entry of a word."""
    version, before = len(word) - 1, word[:-1]
    kind: Any = {"s": "snapshot", "d": "delta"}.get(word[-1], "claim")
    stream = stream_of(word)
    newest = word.rfind("s")
    return Manifest(
        stream=stream,
        generation=generation_of(word),
        writer=f"w{generation_of(word)}",
        version=version,
        kind=kind,
        parent=Link(version - 1, before) if before else None,
        snapshot=newest if newest >= len(stream) else None,
        created=created(word),
        forked_from=Fork(stream_of(before), version - 1, before) if word[-1] == "f" else None,
        xxh3=word,
    )


@cache
def merged_of(word: str, first: int) -> Manifest:
    """Return the merged entry of the versions from ``first`` to the end of a word; a snapshot if ``first`` is 0."""
    last = entry_of(word)
    return Manifest(
        stream=last.stream,
        generation=last.generation,
        writer=last.writer,
        version=last.version,
        kind="delta" if first else "snapshot",
        parent=Link(first - 1, word[:first]) if first else None,
        snapshot=last.snapshot if first else last.version,
        created=last.created,
        merges=last.link,
        xxh3=f"{word}/{first}",
    )


def word_of(entry: Manifest) -> str:
    """Return the word up to an entry."""
    return entry.link.xxh3


@cache
def _written(word: str, kind: str, first: int | None) -> Mapping[int, str]:
    rows = rows_after(word)
    if kind == "snapshot":
        return dict(enumerate(rows))
    begin = len(word) - 1 if first is None else first
    return {each % NUM_ROWS: rows[each % NUM_ROWS] for each in range(begin, len(word)) if word[each] in "sd"}


def written_by(entry: Manifest) -> Mapping[int, str]:
    """Return the rows in an entry."""
    first = None if entry.merges is None else Merged.of(entry).first
    return _written(word_of(entry), entry.kind, first)


@dataclass(frozen=True, eq=False)
class Log:
    """Log at one url, as a reader sees it now.

    Args:
        word: names its entries.
        merged_entries: merged entries.
        first: lowest version that retention has kept. Claims and the entries before them are kept too.
        faults: fault of each faulty entry: ``missing``, ``malformed``, ``unreadable``, ``corrupt`` or ``lost`` (its
            parts cannot be read).
        orders: pins and releases.
        is_up: False if the store cannot be read.
        late: claim at a name that retention has made free, which is not part of the log.
        url: the url.
        is_lost: True if the faults never end.
    """

    word: str
    merged_entries: tuple[Manifest, ...] = ()
    first: int = 0
    faults: Mapping[str, str] = field(default_factory=dict)
    orders: tuple[Order, ...] = ()
    is_up: bool = True
    late: Manifest | None = None
    url: str = "memory"
    is_lost: bool = False

    @cached_property
    def entries(self) -> Mapping[int, Manifest]:
        """Entries that exist."""
        word = self.word
        kept = [
            v for v in range(len(word)) if v >= self.first or word[v] in "cfxy" or word[v + 1 : v + 2] in ("c", "f")
        ]
        found = {v: entry_of(word[: v + 1]) for v in kept if self.faults.get(word[: v + 1]) != "missing"}
        return found if self.late is None else {**found, self.late.version: self.late}

    @property
    def key(self) -> Hashable:
        """What tells logs without faults apart."""
        late = None if self.late is None else self.late.xxh3
        lost = (self.is_up, tuple(self.faults.items())) if self.is_lost else None
        return (
            self.word,
            tuple(each.xxh3 for each in self.merged_entries),
            self.first,
            self.orders,
            late,
            self.url,
            lost,
        )

    @cached_property
    def newest(self) -> int:
        """Newest version, -1 without one."""
        return max(self.entries, default=-1)

    def fault(self, entry: Manifest) -> str:
        """Return the fault of an entry, empty without one. Retention deletes the parts of entries that it keeps."""
        if entry.version < self.first and entry.kind != "claim" and entry.merges is None:
            return "corrupt"
        return self.faults.get(entry.xxh3, "")

    def __str__(self) -> str:
        merged, late = [each.xxh3 for each in self.merged_entries], "" if self.late is None else self.late.xxh3
        text = f"{self.url}: {self.word} {merged=} first={self.first} faults={dict(self.faults)} {late=}"
        return f"{text} {'' if self.is_up else 'down'} {[(o.kind, o.version, o.stream) for o in self.orders]}"

    def healed(self) -> Log:
        """Return the log after its faults have ended."""
        if self.is_lost:
            return self
        return Log(self.word, self.merged_entries, self.first, {}, self.orders, True, self.late, self.url)

    # What a reader looks up. Each raises a StreamError if the store cannot be read, or an entry has a fault.

    def check_up(self) -> None:
        if not self.is_up:
            raise self._unreadable("all")

    def generation(self, position: Position) -> int | None:
        entry = self.entries.get(position.version) if self.is_up else None
        if entry is None or self.fault(entry) in ("malformed", "unreadable"):
            return None
        return entry.generation if position.names(entry) else None

    def read(self, version: int) -> Manifest | None:
        self.check_up()
        entry = self.entries.get(version)
        return None if entry is None else self._checked(entry, entry_name(version))

    def read_merged(self, merged: Merged) -> Manifest | None:
        self.check_up()
        entry = next((each for each in self.merged_entries if Merged.of(each) == merged), None)
        return None if entry is None else self._checked(entry, merged.name)

    def merged(self, *, after: int = -1) -> list[Merged]:
        self.check_up()
        found = sorted((Merged.of(each) for each in self.merged_entries), key=lambda each: each.name)
        return [each for each in found if each.last > after]

    def versions(self, *, after: int = -1) -> list[int]:
        self.check_up()
        return sorted(version for version in self.entries if version > after)

    def head(self) -> Manifest | None:
        self.check_up()
        return self.read(self.newest) if self.entries else None

    def _checked(self, entry: Manifest, name: str) -> Manifest:
        fault = self.fault(entry)
        if fault == "malformed":
            raise MalformedError(name, "altered")
        if fault == "unreadable":
            raise self._unreadable(name)
        return entry

    def _unreadable(self, name: str) -> StorageError:
        return StorageError(self.url, f"cannot read {name}")

    def is_committed(self, entry: Manifest) -> bool:
        if not self.versions(after=entry.version):
            return True
        following = self.read(entry.version + 1)
        return following is not None and following.parent == entry.link

    def next(self, position: Position, *, looks_for_gap: bool) -> Manifest | None:
        entry = self.read(position.version + 1)
        if entry is None and looks_for_gap:
            self._check_gap(position)
        return entry

    def _check_gap(self, position: Position) -> None:
        held = position.version
        entry = self.read(held) if self.newest == held else None
        if self.newest < held or (entry is not None and entry.link != position.link):
            raise StreamReplacedError(self.url, held)
        if self.newest > held and self.read(held + 1) is None:
            raise MissingVersionError(held + 1, self.newest)

    def ahead(self, position: Position, behind: int) -> Manifest | None:
        """Return what :class:`CatchUp` finds, for a reader that is far behind after one version."""
        log: Any = _Listed(self)
        with mock.patch.object(catch_up, "_MIN_MERGED", 1):
            return catch_up.CatchUp(log, lambda entry: entry.version + behind <= self.newest).find(position)


@dataclass(frozen=True, eq=False)
class _Listed:
    """Log as :class:`CatchUp` reads it."""

    log: Log
    is_listed = True

    def newest_version(self, after: int) -> int:
        return max(self.log.newest, after)

    def merged(self, *, after: int) -> list[Merged]:
        return self.log.merged(after=after)

    def read(self, version: int) -> Manifest | None:
        return self.log.read(version)

    def read_merged(self, merged: Merged) -> Manifest | None:
        return self.log.read_merged(merged)


def merged_entries(word: str) -> list[Manifest]:
    """Return all merged entries of a word: of two deltas or more, and a snapshot at each delta."""
    found = []
    for end in range(2, len(word) + 1):
        begin = end
        while word[begin - 1] == "d":
            begin -= 1
        found += [merged_of(word[:end], first) for first in range(begin, end - 1)]
        if word[end - 1] == "d" and "s" in word[len(stream_of(word[:end])) : end]:
            found.append(merged_of(word[:end], 0))
    return found


def fault_of_parts(log: Log, entry: Manifest) -> StreamError | None:
    """Return the error of reading the parts of an entry, None if they can be read."""
    match log.fault(entry):
        case "corrupt":
            return CorruptPartError(f"part of {entry.version}", "altered")
        case "lost":
            return StorageError(log.url, f"cannot read the part of {entry.version}")
    return None
