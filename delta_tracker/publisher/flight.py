"""The states of a version while it is published. Without one there is no flight."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar

from delta_tracker.distributed import Gathering
from delta_tracker.publisher.coordinator import Share
from delta_tracker.publisher.exchange import Message, Phase, Vote
from delta_tracker.stream.format.manifest import Kind, Part
from delta_tracker.types import Delta


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """A version that is being published. All ranks change its state at the same batch.

    Args:
        kind: what it is to be.
        read: the tracker's read that it consists of, once there is one.
        job: what the worker does in this state; None where the ranks wait for each other's messages only.
    """

    phase: ClassVar[Phase]

    kind: Kind
    read: Delta | None = None
    job: Future[Any] | None = None

    def vote(self) -> Vote:
        """Return what this rank votes in this state."""
        if self.job is not None and not self.job.done():
            return Vote(self.phase, is_working=True)
        return Vote(self.phase, num_bytes=self._message_bytes())

    def _message_bytes(self) -> int:
        """Return the length of what this rank tells the others at the end of this state, which the worker has ended."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Copying(Flight):
    """All rows of a snapshot are copied and written while training continues. Then the changed ones are read."""

    phase = Phase.COPYING
    job: Future[Part | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing(Flight):
    """The rows were read, and are written while training continues. Then every rank tells what it wrote."""

    phase = Phase.WRITING
    job: Future[Share]

    def _message_bytes(self) -> int:
        return len(self.job.result().message.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Voting(Flight):
    """The ranks tell each other what they wrote. Then rank 0 commits.

    Args:
        share: what this rank wrote.
        gathering: the messages of all ranks.
    """

    phase = Phase.VOTING
    share: Share
    gathering: Gathering


@dataclass(frozen=True, slots=True, kw_only=True)
class Committing(Flight):
    """Rank 0 creates the manifest while training continues. Then it tells the others."""

    phase = Phase.COMMITTING
    job: Future[Message]

    def _message_bytes(self) -> int:
        return len(self.job.result().data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answering(Flight):
    """Rank 0 tells the others what it committed. Then the version is published.

    Args:
        answer: the message of this rank.
        gathering: the messages of all ranks.
    """

    phase = Phase.ANSWERING
    answer: Message
    gathering: Gathering
