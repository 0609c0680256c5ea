"""A reader with rows in memory: it asks :func:`next_reader_action`, which looks at its logs, and does what it says."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from delta_tracker.errors import (
    HeldVersionError,
    NoSnapshotError,
    StaleCacheError,
    StorageError,
    StreamError,
    StreamReplacedError,
)
from delta_tracker.stream.format.manifest import Link, Manifest, Merged
from delta_tracker.stream.reading import decide as rules
from delta_tracker.stream.reading import position as positions
from delta_tracker.stream.reading.decide import (
    CACHE_FAULTS,
    Apply,
    Decision,
    Fail,
    Fault,
    Reread,
    Stay,
    View,
)
from delta_tracker.stream.reading.orders import Order, OrderPolicy
from delta_tracker.stream.reading.path import former_streams
from delta_tracker.stream.reading.seen import SeenLog
from tests.stream.reading.logs import (
    NUM_ROWS,
    Log,
    Rows,
    created,
    fault_of_parts,
    generation_of,
    rows_after,
    stream_of,
    word_of,
    written_by,
)

MIXED = ("?",) * NUM_ROWS
_MAX_LOOKS = 120
_MAX_TRIES = 12


class ViolationError(AssertionError):
    """A rule was violated."""


@dataclass(frozen=True)
class World:
    """What a reader sees.

    Args:
        logs: log at each url.
        bad: words of the versions that the gate rejects.
        sees_merged: True if the gate also rejects merged entries with rows of these versions.
        is_cached: True if the first url is behind a cache.
    """

    logs: tuple[Log, ...]
    bad: frozenset[str] = frozenset()
    sees_merged: bool = True
    is_cached: bool = False

    @cached_property
    def key(self) -> Hashable:
        """What tells worlds without faults apart."""
        return tuple(each.key for each in self.logs), self.bad, self.sees_merged

    def healed(self) -> World:
        """Return the world after its faults have ended."""
        return replace(self, logs=tuple(each.healed() for each in self.logs), is_cached=False)


@dataclass(frozen=True)
class Reader:
    """State of a reader.

    Args:
        word: word of the last applied entry; None before the first.
        rows: the rows.
        ahead: newest word of which rows may have been written, empty if it is ``word``.
        is_loaded: True after a restart, until a snapshot is applied.
        is_mixed: True if the rows are unrelated.
        policy: what the process wants.
        behind: number of versions to stay behind the newest one.
        known: newest pin or release that was seen.
        confirmed: the last one whose entry was read.
        ended: counter of the newest order when the last round ended.
        followed: the last pin or release that was carried out.
        held: words that the gate has rejected.
        failures: number of consecutive rounds that failed.
        current: number of the url that is followed.
    """

    word: str | None = None
    rows: Rows = ("",) * NUM_ROWS
    ahead: str = ""
    is_loaded: bool = False
    is_mixed: bool = False
    policy: OrderPolicy = field(default_factory=OrderPolicy)
    behind: int = 0
    known: Order | None = None
    confirmed: Order | None = None
    ended: int = 0
    followed: Order | None = None
    held: frozenset[str] = frozenset()
    failures: int = 0
    current: int = 0

    @property
    def position(self) -> positions.Position | None:
        if self.word is None:
            return None
        rows = positions.Rows.AHEAD if self.ahead or self.is_loaded else positions.Rows.WHOLE
        rows = positions.Rows.MIXED if self.is_mixed else rows
        link = Link(len(self.word) - 1, self.word)
        return positions.Position(stream_of(self.word), link, generation_of(self.word), int(created(self.word)), rows)


def at(word: str, **fields: object) -> Reader:
    """Return a reader that has applied a version completely."""
    return replace(Reader(word, rows_after(word)), **fields)  # type: ignore[arg-type]


def ahead_of(word: str, ahead: str, **fields: object) -> Reader:
    """Return a reader that was interrupted while it wrote the versions up to ``ahead``, after those of ``word``."""
    rows, later = rows_after(word), rows_after(ahead)
    some = tuple(later[row] if row % 2 == 0 else rows[row] for row in range(NUM_ROWS))
    return replace(Reader(word, some, ahead=ahead), **fields)  # type: ignore[arg-type]


def mixed_at(word: str, **fields: object) -> Reader:
    """Return a reader that was interrupted while it went elsewhere."""
    return replace(Reader(word, MIXED, is_mixed=True), **fields)  # type: ignore[arg-type]


def advance(  # noqa: C901  one case for each decision
    world: World, reader: Reader, *, surveys: bool = False, catches_up: bool = False, cut: int | None = None
) -> tuple[Reader, Decision]:
    """Run one round. Return the reader after it and what it decided last.

    Args:
        world: what the reader sees.
        reader: the reader.
        surveys: see :class:`View`.
        catches_up: see :class:`View`.
        cut: number of the entry of a path whose write is interrupted after some rows, at most the last one; None to
            interrupt nothing.
    """
    numbers = [reader.current, *(each for each in range(len(world.logs)) if each != reader.current)]
    orders: Any = _Orders(world, reader)
    sources: list[Any] = [_Source(number, world.logs[number], reader) for number in numbers]
    view = View(
        tuple(SeenLog(each, orders, world.is_cached and each.number == 0) for each in sources),
        reader.position,
        replace(reader.policy, is_canary=reader.behind > 0),
        num_failures=reader.failures,
        catches_up=catches_up and reader.word is not None and not reader.is_mixed,
        surveys=surveys and len(numbers) > 1,
        followed=reader.followed,
    )
    num_tries = 0
    while True:
        decision = rules.next_reader_action(view)
        reader = replace(reader, known=orders.known, confirmed=orders.confirmed)
        if (num_looks := sum(len(each.answers) for each in view.logs)) > _MAX_LOOKS:
            raise ViolationError(f"too many looks: {num_looks}")
        match decision:
            case Reread():
                if decision.log.number != 0 or not world.is_cached:
                    raise ViolationError("a url that is not behind a cache is doubted")
                view = replace(view, logs=tuple(replace(each, may_be_stale=False) for each in view.logs))
            case Apply():
                num_tries += 1
                if num_tries > _MAX_TRIES:
                    raise ViolationError(f"tries do not end: {decision}")
                is_start = reader.word is None or reader.is_mixed  # an older snapshot is a start, too
                if (
                    not is_start
                    and view.logs[0].may_be_stale
                    and isinstance(decision.cause, CACHE_FAULTS)
                    and decision.log.number == 0
                ):
                    raise ViolationError(f"a fault of a cache is believed at once: {decision.cause}")
                try:
                    _check(world, reader, decision)
                except StreamError as error:
                    held = {word_of(each) for each in decision.entries if isinstance(error, HeldVersionError)}
                    reader = replace(reader, held=reader.held | held)
                    faults = (*view.faults, *(Fault(decision.log.number, each, error) for each in decision.entries))
                    view = replace(view, faults=faults)
                    continue
                return _written(reader, decision, cut), decision
            case Fail(error):
                if view.logs[0].may_be_stale and isinstance(error, CACHE_FAULTS):
                    raise ViolationError(f"a fault of a cache is reported at once: {error}")
                is_unsure = isinstance(error, NoSnapshotError | StorageError) and not isinstance(error, StaleCacheError)
                return replace(reader, failures=reader.failures + 1 if is_unsure else 0), decision
            case _:
                return _ended(reader, decision), decision


class _Source:
    """What a reader looks up at one url, except for orders."""

    def __init__(self, number: int, log: Log, reader: Reader) -> None:
        self.number, self.log, self.storage = number, log, SimpleNamespace(url=log.url)
        self.catch_up = self
        self._behind = reader.behind

    def next(self, position: positions.Position, *, looks_for_gap: bool) -> Manifest | None:
        self.log.check_up()
        return self.log.next(position, looks_for_gap=looks_for_gap)

    def find(self, position: positions.Position) -> Manifest | None:
        self.log.check_up()
        return self.log.ahead(position, self._behind)

    def allows(self, entry: Manifest) -> bool:
        self.log.check_up()
        return entry.version + self._behind <= self.log.newest

    def former_streams(self, head: Manifest) -> tuple[str, ...]:
        return former_streams(self.log, head)  # type: ignore[arg-type]

    def generation(self, position: positions.Position) -> int | None:
        return self.log.generation(position)


class _Orders:
    """Orders of one round.

    Attributes:
        known: newest pin or release that was seen.
        confirmed: the last one whose entry was read.
    """

    def __init__(self, world: World, reader: Reader) -> None:
        self.known, self.confirmed = reader.known, reader.confirmed
        self._world, self._ended = world, reader.ended

    def newest(self, number: int) -> Order | None:
        log = self._world.logs[number]
        if not log.is_up and self.known is None:
            raise StorageError(log.url, "cannot look for a pin")
        newest = max(log.orders if log.is_up else (), key=lambda each: each.counter, default=None)
        if newest is not None and (self.known is None or newest.counter > self.known.counter):
            self.known = newest
        return None if self.known is None else replace(self.known, is_new=self.known.counter != self._ended)

    def named(self, order: Order, source: _Source) -> Manifest | None:
        entry = source.log.read(order.version)
        if entry is None or (entry.stream, entry.link) != (order.stream, order.link):
            return None
        self.confirmed = self.known
        return entry


def leaves_rows(reader: Reader, entry: Manifest) -> bool:
    """Return True if rows of a version that another publisher has replaced would remain once an entry is applied."""
    if not reader.ahead or reader.is_loaded or entry.kind == "snapshot" or reader.ahead.startswith(word_of(entry)):
        return False
    is_fenced = len(reader.ahead) > entry.version and generation_of(reader.ahead) < entry.generation
    return is_fenced or len(reader.ahead) - 1 == entry.version


def covers(entry: Manifest, word: str) -> bool:
    """Return True if a merged entry has the rows of a version."""
    return word_of(entry).startswith(word) and Merged.of(entry).first < len(word)


def _check(world: World, reader: Reader, decision: Apply) -> None:
    """Read the parts of all entries, and ask the gate about them.

    Raises:
        StreamError: if an entry cannot be applied.
    """
    log = world.logs[decision.log.number]
    for entry in decision.entries:
        if not log.is_up:
            raise StorageError(log.url, "cannot read")
        if decision.order is None and leaves_rows(reader, entry):
            raise StreamReplacedError(log.url, entry.version)
        error = fault_of_parts(log, entry)
        if error is not None:
            raise error
        is_rejected = word_of(entry) in world.bad and entry.merges is None
        if entry.merges is not None:  # the gate recalls what it has rejected
            is_rejected = any(covers(entry, each) for each in reader.held)
            is_rejected |= world.sees_merged and bool(world.bad & set(written_by(entry).values()))
        if is_rejected and decision.order is None:
            raise HeldVersionError(entry.version, "values")


def _written(reader: Reader, decision: Apply, cut: int | None) -> Reader:
    last = len(decision.entries) - 1
    for number, entry in enumerate(decision.entries):
        word, content, rows = word_of(entry), written_by(entry), list(reader.rows)
        is_elsewhere = entry.kind == "snapshot" if decision.order is not None else decision.is_elsewhere
        if cut is not None and number == min(cut, last):
            for row in sorted(content)[: (len(content) + 1) // 2]:
                rows[row] = content[row]
            is_mixed = reader.is_mixed or (is_elsewhere and reader.word is not None)
            longest = max(reader.ahead, word, key=len)
            ahead = "" if reader.word is None else longest
            return replace(reader, rows=tuple(rows), is_mixed=is_mixed, ahead=ahead, failures=0)
        for row, value in content.items():
            rows[row] = value
        is_whole = entry.kind == "snapshot" or not reader.ahead or len(reader.ahead) <= len(word)
        reader = replace(
            reader,
            word=word,
            rows=tuple(rows),
            ahead="" if is_whole else reader.ahead,
            is_loaded=reader.is_loaded and entry.kind != "snapshot",
            is_mixed=False,
            held=frozenset(),
        )
    return _ended(reader, decision)


def _ended(reader: Reader, decision: Apply | Stay) -> Reader:
    """Return a reader after a round without an error."""
    known = reader.known
    followed = known if known is not None and known.is_followed_by(reader.position) else reader.followed
    counter = 0 if known is None else known.counter
    return replace(reader, failures=0, current=decision.log.number, ended=counter, followed=followed)
