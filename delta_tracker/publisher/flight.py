"""States of a version from its start to its end, and the pure function that decides what is next: :func:`decide`."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from delta_tracker.publisher.delivery import Outcome
from delta_tracker.publisher.exchange import Vote
from delta_tracker.stream.format.manifest import Kind, Part


@dataclass(slots=True)
class Copying:
    """Before the cut of a snapshot: all rows of the tables with a fused optimizer are copied and written.

    The rows that change meanwhile are read at the cut.

    Args:
        after: number of the votes that began it.
        job: future of the written copy; None until the copy has begun. An interrupt may come before.
    """

    after: int
    job: Future[Part | None] | None = None

    @property
    def is_working(self) -> bool:
        """True until the copy is written."""
        return self.job is None or not self.job.done()


@dataclass(slots=True, kw_only=True)
class Cut:
    """After the cut: the threads of the publisher complete the version.

    Args:
        after: number of the votes that decided it.
        number: number of the cut of this publisher, the same on all ranks.
        kind: ``"snapshot"`` or ``"delta"``.
        batch: batch of the cut.
        is_complete: for a delta, True to read all rows, without ``top_k``.
        copied: future of the written copy of a snapshot; None for a delta.
        outcome: future of the result.
        is_tried: True once this rank has begun to read its rows. An interrupt may come then.
        is_started: False until the threads have got this rank's contents.
    """

    after: int
    number: int
    kind: Kind
    batch: int
    is_complete: bool = False
    copied: Future[Part | None] | None = None
    outcome: Future[Outcome] = field(default_factory=Future)
    is_tried: bool = False
    is_started: bool = False


@dataclass(slots=True)
class Call:
    """Call of ``publish()``, ``snapshot()`` or ``flush()``. If it is interrupted, the same call continues it.

    Args:
        name: what was called.
        batch: batch at which it was called.
        last: number of the votes of the last step, which this call acts on; None if they were acted on before.
        voted: number of this rank's votes before the vote of this call; None before it.
    """

    name: str
    batch: int
    last: int | None = None
    voted: int | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """The version ended on this rank. On other ranks, it may not have ended yet."""

    after: int
    outcome: Outcome


Flight: TypeAlias = Copying | Cut | Ended
"""State of a version that is being published."""


class Step(Enum):
    """Next step of all ranks after their votes."""

    WAIT = "a rank is still working"
    CUT = "the copies of all ranks are written"
    SNAPSHOT = "a snapshot is due"
    DELTA = "a delta is due"
    REST = "nothing is due"


def decide(flight: Flight | None, votes: int, most: Vote) -> Step:
    """Return what a rank does next, after the votes of all ranks.

    Args:
        flight: state of this rank.
        votes: number of the votes.
        most: maximum of each field of the votes.
    """
    if flight is not None and flight.after == votes:  # an interrupt came after these votes had been acted on
        return Step.WAIT
    if most.is_working or isinstance(flight, Cut):
        return Step.WAIT
    if isinstance(flight, Copying):
        return Step.CUT
    if not most.is_due:
        return Step.REST
    return Step.SNAPSHOT if most.wants_snapshot else Step.DELTA
