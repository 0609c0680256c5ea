"""Inputs and results of a reader's decisions: immutable values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from delta_tracker.errors import (
    CorruptPartError,
    HeldVersionError,
    MalformedError,
    MissingVersionError,
    ModelMismatchError,
    PartialRowsError,
    StreamError,
    StreamReplacedError,
)
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.reading.position import Position
from delta_tracker.stream.reading.seen import Look, Order, SeenLog

CACHE_FAULTS = (CorruptPartError, MalformedError, MissingVersionError, StreamReplacedError)
"""Faults that a cache can cause: an old 404, a short or damaged object, or objects of a stream that was replaced."""

OF_ALL_URLS = (HeldVersionError, ModelMismatchError, PartialRowsError)
"""Faults of an entry that does not fit the reader, whichever url it is read from."""

FAULTS = (*CACHE_FAULTS, *OF_ALL_URLS)
"""Errors of a version after which a merged version or a newer snapshot may still be applied."""

NUM_TRIES = 3
"""Number of consecutive storage errors after which an unreadable object counts as lost: it may stay unreadable, for
example because of missing permissions or a bad sector."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What one process wants of its reader.

    Args:
        own: rollback of this process.
        released: pin or release that no longer applies to this process, nor any before it of its stream.
    """

    follows_pins: bool = False
    own: Order | None = None
    released: Order | None = None
    is_canary: bool = False

    def has_released(self, order: Order) -> bool:
        """Return True if an order no longer applies to this process."""
        released = self.released
        return released is not None and order.stream == released.stream and order.counter <= released.counter


@dataclass(frozen=True, slots=True)
class Fault:
    """Error of an entry that was read from the url ``number`` and could not be applied in this round."""

    number: int
    entry: Manifest
    error: StreamError

    def concerns(self, number: int, entry: Manifest) -> bool:
        """Return True if an entry at a url has this fault. What does not fit the reader has it at every url."""
        if number != self.number and not isinstance(self.error, OF_ALL_URLS):
            return False
        own = self.entry
        return (entry.stream, entry.link, entry.merges) == (own.stream, own.link, own.merges)


@dataclass(frozen=True, slots=True)
class View:
    """All that a decision depends on.

    Args:
        logs: logs at the urls of the reader, the one that is followed first.
        faults: entries that could not be applied in this round.
        num_failures: consecutive rounds that failed.
        looks_for_gap: True to check, if the next entry is missing, whether it was deleted or is not committed yet.
        catches_up: True to look for an entry that replaces many versions.
        surveys: True to look at the other urls although the first one shows nothing new.
        is_partial: True if some urls are not asked now, because they failed.
    """

    logs: tuple[SeenLog, ...]
    position: Position | None = None
    policy: Policy = Policy()
    faults: tuple[Fault, ...] = ()
    num_failures: int = 0
    looks_for_gap: bool = True
    catches_up: bool = False
    surveys: bool = False
    is_partial: bool = False

    @property
    def is_patient(self) -> bool:
        """False if one more consecutive storage error makes an unreadable object count as lost."""
        return self.num_failures < NUM_TRIES - 1

    def fault_of(self, log: SeenLog, entry: Manifest) -> StreamError | None:
        """Return the known fault of an entry; None without one."""
        return next((each.error for each in self.faults if each.concerns(log.number, entry)), None)


class Rule(Enum):
    """Rule of a decision. ``python -m tests.reader_rules`` writes the table of the rules in FLEET.md.

    Attributes:
        when: condition of the rule.
        does: what the reader does.
        shown: what ``status()``, the log and the metrics show.
    """

    def __init__(self, when: str, does: str, shown: str) -> None:
        self.when = when
        self.does = does
        self.shown = shown

    NEXT = ("the next version is committed", "apply it", "`version`")
    CATCH_UP = (
        "8 versions or more are not applied",
        "apply the longest merged delta, or a newer snapshot with fewer bytes",
        "log: `caught up from version 5 to 60`",
    )
    START = (
        "the tables have no rows of the stream yet, or mixed ones",
        "apply the newest snapshot. If it does not fit the model, no older one",
        "`version`",
    )
    RESYNC = (
        "the next version cannot be applied",
        "apply a merged delta or a newer snapshot, also of a stream that continues this one; none with a held version",
        "`resyncs`, `last_resync`; a warning",
    )
    PIN = (
        "a pin or a rollback applies",
        "go exactly to its version, forward by the versions between or back from a snapshot. Bypasses the gate",
        "`pinned`; warning: `rolled back to version 3`",
    )
    RELEASE = (
        "a pin was released",
        "apply the newest snapshot at or above the version of the release. No-op above it",
        "`version`; `pinned` is None",
    )
    SUCCESSION = (
        "the pinned stream ended, and the next one has a snapshot",
        "apply that snapshot",
        "`stream`; `pinned` is None",
    )
    NEWEST = ("no newer version is committed", "wait", "`why`: `version 7 is the newest`")
    CANARY = (
        "the canary does not allow the next version, or that of a pin or release, yet",
        "wait",
        "`why`: `version 8 is not allowed yet`",
    )
    PINNED = (
        "the tables have the version of a pin or a rollback",
        "wait for a release or another pin",
        "`pinned`; `why`: `pinned to version 3`",
    )
    ENDED = (
        "the pinned stream ended, and the next one has no snapshot yet",
        "keep the rows, also if the pinned version was not reached",
        "`pinned` is the version of the rows; `why`",
    )
    CACHE = (
        "a fault may be that of an HTTP cache",
        "read the object again from the cache, and then once past it. Believe the fault after 10 s",
        "`error`: `StaleCacheError`",
    )
    FAULT = ("nothing can be applied", "keep the rows and retry, also at the other urls", "`error`")


@dataclass(frozen=True, slots=True)
class Apply:
    """Decision to apply entries, in order.

    Args:
        number: number of the url to read them from.
        entries: the entries. More than one are checked completely before the first row is written.
        cause: fault that a resync overcomes; None otherwise.
        is_elsewhere: True if nothing shows that the entry is of the applied version's history. Rows are then mixed
            while it is written. Not set for an order.
        order: the pin or the rollback that is followed, for which the gate is bypassed; None otherwise.
    """

    number: int
    entries: tuple[Manifest, ...]
    rule: Rule
    cause: StreamError | None = None
    is_elsewhere: bool = False
    order: Order | None = None


@dataclass(frozen=True, slots=True)
class Stay:
    """Decision to apply nothing now, and at which version an order keeps the reader."""

    number: int
    rule: Rule
    why: str
    pinned: int | None = None


@dataclass(frozen=True, slots=True)
class Doubt:
    """Decision to read what may have caused the fault ``error`` at a url again, past the caches."""

    rule: ClassVar[Rule] = Rule.CACHE
    number: int
    error: StreamError


@dataclass(frozen=True, slots=True)
class Fail:
    """Decision to report an error, and to try again later."""

    rule: ClassVar[Rule] = Rule.FAULT
    error: StreamError


Decision = Look | Apply | Stay | Doubt | Fail
