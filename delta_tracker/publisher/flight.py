"""States of a version from its start to its commit."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar

from delta_tracker.publisher.coordinator import Share
from delta_tracker.publisher.exchange import Message, Phase, Vote
from delta_tracker.stream.format.manifest import Kind, Part
from delta_tracker.types import Delta


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """State of a version that is being published. All ranks enter a state at the same batch.

    Args:
        kind: ``"snapshot"`` or ``"delta"``.
        job: task of the worker in this state.
        read: uncommitted read of the tracker with the version's rows; None before the cut, or if the read failed.

    Attributes:
        phase: value that identifies the kind of state in votes.
    """

    phase: ClassVar[Phase]

    kind: Kind
    job: Future[Any]
    read: Delta | None = None

    def vote(self) -> Vote:
        """Return this rank's vote on whether to leave this state."""
        if not self.job.done():
            return Vote(self.phase, is_working=True)
        return Vote(self.phase, num_bytes=self._message_bytes())

    def _message_bytes(self) -> int:
        """Return the length in bytes of the message that this rank has at the end of this state; 0 if it has none.

        :attr:`job` must be done.
        """
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Copying(Flight):
    """State in which all rows of the tables with a fused optimizer are copied and written, for a snapshot.

    The rows that change meanwhile are read at the end of this state.
    """

    phase = Phase.COPYING
    job: Future[Part | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing(Flight):
    """State in which the rows that were read from the tracker are written.

    At the end of this state, the ranks exchange the descriptions of their parts.
    """

    phase = Phase.WRITING
    job: Future[Share]

    def _message_bytes(self) -> int:
        return len(self.job.result().message.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Committing(Flight):
    """State in which rank 0 creates the manifest. The other ranks receive the manifest at the end of this state."""

    phase = Phase.COMMITTING
    job: Future[Message]

    def _message_bytes(self) -> int:
        return len(self.job.result().data)
