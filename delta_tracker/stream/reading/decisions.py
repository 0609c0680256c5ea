"""Inputs and results of a reader's decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
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
from delta_tracker.stream.reading.orders import Order, Policy
from delta_tracker.stream.reading.position import Position
from delta_tracker.stream.reading.seen import SeenLog

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
    policy: Policy = field(default_factory=Policy)
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
    """Rule of a decision, and when it applies. The table in FLEET.md says what a reader then does."""

    NEXT = "the next version is committed"
    CATCH_UP = "8 versions or more are not applied"
    START = "the tables have no rows of the stream yet, or mixed ones"
    RESYNC = "the next version cannot be applied"
    PIN = "a pin or a rollback applies"
    RELEASE = "a pin was released"
    SUCCESSION = "the pinned stream ended, and the next one has a snapshot"
    NEWEST = "no newer version is committed"
    CANARY = "the canary does not allow the next version, or that of a pin or release, yet"
    PINNED = "the tables have the version of a pin or a rollback"
    ENDED = "the pinned stream ended, and the next one has no snapshot yet"
    CACHE = "a fault may be that of an HTTP cache"
    FAULT = "nothing can be applied"


@dataclass(frozen=True, slots=True)
class Apply:
    """Decision to apply entries, in order.

    Args:
        log: log to read them from.
        entries: the entries. More than one are checked completely before the first row is written.
        cause: fault that a resync overcomes; None otherwise.
        is_elsewhere: True if nothing shows that the entry is of the applied version's history. Rows are then mixed
            while it is written. Not set for an order.
        order: the pin or the rollback that is followed, for which the gate is bypassed; None otherwise.
    """

    log: SeenLog
    entries: tuple[Manifest, ...]
    rule: Rule
    cause: StreamError | None = None
    is_elsewhere: bool = False
    order: Order | None = None


@dataclass(frozen=True, slots=True)
class Stay:
    """Decision to apply nothing now, and at which version an order keeps the reader."""

    log: SeenLog
    rule: Rule
    why: str
    pinned: int | None = None


@dataclass(frozen=True, slots=True)
class Doubt:
    """Decision to read what may have caused the fault ``error`` of a log again, past the caches."""

    rule: ClassVar[Rule] = Rule.CACHE
    log: SeenLog
    error: StreamError


@dataclass(frozen=True, slots=True)
class Fail:
    """Decision to report an error, and to try again later."""

    rule: ClassVar[Rule] = Rule.FAULT
    error: StreamError


Decision = Apply | Stay | Doubt | Fail
