"""What the ranks of a publisher tell each other: votes of a fixed size and small JSON messages. No rows, no pickles."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum, auto
from typing import Any, NamedTuple

import torch

from delta_tracker.distributed import Gathering, RankGroup
from delta_tracker.errors import FencedError, PublishError

_CALL = "Publisher(...)"


class Phase(IntEnum):
    """Where a rank is. Ranks that vote in different phases have not called the same method."""

    BUILDING = auto()
    """The arguments are checked and the tracker is asked for the consumer."""
    OPENING = auto()
    """The store is opened."""
    CLAIMING = auto()
    """Rank 0 claims the stream."""
    CHECKING = auto()
    """Every rank looks for the claim in its store."""
    RESUMING = auto()
    """Every rank finds out what changed since its checkpoint."""
    STEPPING = auto()
    """No version is on its way; ``step()`` was called."""
    PUBLISHING = auto()
    """No version is on its way; ``publish()`` or ``snapshot()`` was called."""
    PLACING = auto()
    """The ranks say where they are, because their votes differ."""
    COPYING = auto()
    """The worker copies and writes all rows of a snapshot while training continues."""
    WRITING = auto()
    """The rows were read, and the worker writes them."""
    COMMITTING = auto()
    """The worker of rank 0 creates the manifest."""


class Vote(NamedTuple):
    """What one rank tells the others before each change of state.

    Args:
        phase: where it is.
        batch: its number of batches.
        tables: a hash of its tables.
        is_due: a version should begin. It does if any rank says so, as with the next two.
        wants_snapshot: it should be a snapshot.
        is_working: the worker has not finished this phase.
        num_bytes: length of the message that it sends next, if one comes next.
    """

    phase: int
    batch: int = 0
    tables: int = 0
    is_due: bool = False
    wants_snapshot: bool = False
    is_working: bool = False
    num_bytes: int = 0


class Count(NamedTuple):
    """What the votes of all ranks come to.

    Args:
        most: the largest of each of the votes' numbers; so what holds for any rank.
        is_alike: whether all ranks stand at the same batch, with the same tables.
    """

    most: Vote
    is_alike: bool


@dataclass(frozen=True, slots=True)
class Message:
    """What one rank tells the others once.

    Args:
        data: a JSON object.
        failure: why this rank cannot go on. It is told to the others in ``data``.
    """

    data: bytes
    failure: Exception | None = None

    @classmethod
    def of(cls, action: Callable[[], Mapping[str, Any]]) -> Message:
        """Return the message that ``action`` returns, of JSON's types; or its error, whatever it is."""
        failure: Exception | None = None
        try:
            content = action()
        except Exception as error:  # noqa: BLE001  the other ranks must hear of it; raised by Exchange.gather()
            failure, content = error, {"error": f"{type(error).__name__}: {error}"}
            if isinstance(error, FencedError):
                content["fenced"] = [error.generation, error.owner, error.version]
        return cls(json.dumps(content).encode(), failure)


class Exchange:
    """All ranks of the default process group, or this process alone where there is none.

    Methods are collectives unless they say otherwise: all ranks call them in the same order, from the training thread.

    Args:
        timeout: how long to wait for the slowest rank; after it a call raises on every other one.

    Raises:
        RankLostError: if a rank dies or does not come in time.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.group = RankGroup("publisher", _CALL, timeout)
        self.rank = self.group.rank

    def start_votes(self, vote: Vote) -> Gathering:
        """Tell the other ranks this rank's vote; returns at once, and raises nothing."""
        return self.group.start_all_gather(torch.tensor(vote, dtype=torch.int64))

    def count(self, gathering: Gathering) -> Count:
        """Wait for the votes of all ranks, and count them.

        Raises:
            PublishError: if a rank is in another phase.
            RankLostError: if a rank died or did not answer in time.
        """
        votes = torch.stack(gathering.result())
        least, most = Vote(*votes.amin(0).tolist()), Vote(*votes.amax(0).tolist())
        if least.phase != most.phase:
            check_alike([{"phase": f"the phase {Phase(int(phase)).name.lower()}"} for phase in votes[:, 0]], "phase")
        return Count(most, is_alike=least[:3] == most[:3])

    def gather(self, own: Message, num_bytes: int) -> list[dict[str, Any]]:
        """Return the messages of all ranks, by rank.

        Args:
            own: message of this rank.
            num_bytes: length of the longest message of a rank.

        Raises:
            Exception: the failure of this rank.
            FencedError: if another rank failed with it.
            PublishError: if another rank failed for another reason.
            RankLostError: if a rank died or did not answer in time.
        """
        data = bytearray(own.data.ljust(num_bytes))  # JSON may end in spaces
        tensors = self.group.all_gather(torch.frombuffer(data, dtype=torch.uint8))
        if own.failure is not None:
            raise own.failure
        messages = []
        for rank, tensor in enumerate(tensors):
            message = json.loads(tensor.numpy().tobytes())
            if "fenced" in message:
                raise FencedError(*message["fenced"])
            if "error" in message:
                raise PublishError(rank, message["error"])
            messages.append(message)
        return messages

    def exchange(self, phase: Phase, own: Message) -> list[dict[str, Any]]:
        """Return all ranks' messages, by rank, once all ranks are in the same phase.

        Args:
            phase: phase of this rank.
            own: message of this rank.

        Raises: as :meth:`count` and :meth:`gather`.
        """
        count = self.count(self.start_votes(Vote(phase, num_bytes=len(own.data))))
        return self.gather(own, count.most.num_bytes)

    def close(self) -> None:
        """Leave the group. No collective."""
        self.group.close()


def check_alike(messages: Sequence[Mapping[str, Any]], *names: str) -> None:
    """Check that the ranks' messages agree in ``names``.

    Raises:
        PublishError: if a rank's message differs from that of rank 0.
    """
    for rank, each in enumerate(messages):
        for name in names:
            if each[name] != messages[0][name]:
                raise PublishError(rank, f"{each[name]} where rank 0 has {messages[0][name]}")
