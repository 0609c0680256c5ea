"""States of a version between its cut and its commit."""

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
    """Version that is being published. All ranks change its state at the same batch.

    Args:
        kind: snapshot or delta.
        job: task of the worker in this state.
        read: uncommitted read of the tracker with the version's rows; None before the cut.
    """

    phase: ClassVar[Phase]

    kind: Kind
    job: Future[Any]
    read: Delta | None = None

    def vote(self) -> Vote:
        """Return this rank's vote."""
        if not self.job.done():
            return Vote(self.phase, is_working=True)
        return Vote(self.phase, num_bytes=self._message_bytes())

    def _message_bytes(self) -> int:
        """Return the length of the message at the end of this state; 0 without one. The job must be done."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Copying(Flight):
    """Copy and write all rows of a snapshot while training continues. Then read the rows that changed since."""

    phase = Phase.COPYING
    job: Future[Part | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing(Flight):
    """Write the rows of the read while training continues. Then exchange the names of the parts."""

    phase = Phase.WRITING
    job: Future[Share]

    def _message_bytes(self) -> int:
        return len(self.job.result().message.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Committing(Flight):
    """Create the manifest on rank 0 while training continues. Then send it to the other ranks."""

    phase = Phase.COMMITTING
    job: Future[Message]

    def _message_bytes(self) -> int:
        return len(self.job.result().data)
