"""Communication between the ranks of a publisher or a restore: votes of a fixed size and small JSON messages."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum, auto
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
import torch

from delta_tracker.errors import (
    Action,
    FencedError,
    InvalidArgumentError,
    LostEntryError,
    RankFailedError,
    RankLostError,
    is_unknown,
)
from delta_tracker.tracker.rank_group import Gathering, RankGroup, warn_if_alone

Join: TypeAlias = Callable[[str, str, timedelta], RankGroup]


class Phase(IntEnum):
    """Operation that a rank is performing when it votes.

    All ranks must vote in the same phase. The phases differ if ranks called different methods or if a rank failed.
    """

    BUILDING = auto()  # the ranks validate their arguments and reserve the consumer
    OPENING = auto()  # the ranks open the store
    CLAIMING = auto()  # rank 0 claims the stream
    CHECKING = auto()  # the ranks check that the claim is in their store
    RESUMING = auto()  # the ranks find the rows to republish after a resume from a checkpoint
    STEPPING = auto()  # ``step()`` was called, and no snapshot is being copied
    PUBLISHING = auto()  # no version is being published; ``publish()`` or ``snapshot()`` was called
    FLUSHING = auto()  # no version is being published; ``flush()`` was called
    COMPARING = auto()  # the ranks compare their batches and tables, because their votes differ in these
    COPYING = auto()  # the workers copy and write all rows of the tables with a fused optimizer, for a snapshot
    FAILED = auto()  # ``publish()``, ``snapshot()`` or ``flush()`` failed on this rank before its vote
    RESOLVING = auto()  # the ranks of a restore validate their arguments, and rank 0 chooses the version
    FITTING = auto()  # the ranks of a restore compare the version with the model, and write nothing
    RESTORING = auto()  # the ranks of a restore write the model
    LOADING = auto()  # the ranks of a restore load the other states
    FOLLOWING = auto()  # the ranks of a standby apply versions, and rank 0 decides on a takeover


class Vote(NamedTuple):
    """Vote of one rank on the next step of all ranks. A flag takes effect if any rank's vote sets it to True.

    Args:
        phase: :class:`Phase` of the rank.
        batch: number of batches that the rank has trained on.
        tables: hash of the rank's tables.
        is_due: True to start a version.
        wants_snapshot: True if the version must be a snapshot.
        is_complete: True if the next delta must contain all pending rows despite ``top_k``.
        is_working: True while a snapshot is being copied, or a version is being written or committed.
        num_bytes: length in bytes of the rank's next message; 0 if the rank sends none.
    """

    phase: int
    batch: int = 0
    tables: int = 0
    is_due: bool = False
    wants_snapshot: bool = False
    is_complete: bool = False
    is_working: bool = False
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Message:
    """Message from one rank. ``content`` is a JSON object. If the rank failed, it describes the error ``failure``."""

    content: Mapping[str, Any]
    failure: Exception | None = None

    @property
    def data(self) -> bytes:
        """The content encoded as JSON."""
        return json.dumps(self.content).encode()

    @classmethod
    def of(cls, action: Callable[[], Mapping[str, Any] | None]) -> Self:
        """Call ``action``. Return a message that contains its result, or the error that it raised.

        If ``action`` returns None, the content is empty.
        """
        try:
            return cls(action() or {})
        except Exception as error:  # noqa: BLE001  the other ranks must receive it; raised by Exchange.exchange()
            content: dict[str, Any] = {"error": f"{type(error).__name__}: {error}"}
            if isinstance(error, FencedError):
                content["fenced"] = [error.generation, error.owner, error.version]
            if isinstance(error, LostEntryError):
                content["lost"] = [error.url, error.name, error.claim]
            if isinstance(error, RankFailedError):
                content["rank"], content["error"] = error.rank, error.reason
            if is_unknown(error):
                content["unknown"] = True
            return cls(content, error)


class Exchange:
    """Communication between all ranks of the default process group.

    If there is no process group, this process is the only rank. The methods :meth:`start_votes`, :meth:`count` and
    :meth:`exchange` are collectives: all ranks must call them in the same order, from the training thread.

    Args:
        timeout: maximum time to wait for the other ranks before a call raises RankLostError.
        name: name of the process group, the same on every rank.
        call: text for error messages that names the call that every rank must make, such as ``"Publisher(...)"``.
        action: name of the operation for error messages, such as ``"publish"``.
        join: function that creates the process group. It is called with ``name``, ``call`` and ``timeout``.

    Raises:
        InvalidArgumentError: if ``timeout`` is not a positive ``timedelta``.
        RankLostError: if a rank dies, or does not create its exchange in time.
    """

    def __init__(self, timeout: timedelta, name: str, call: str, action: Action, join: Join = RankGroup) -> None:
        given: object = timeout
        if not isinstance(given, timedelta) or given <= timedelta():
            raise InvalidArgumentError("timeout", given, "Pass a timedelta above 0, such as timedelta(seconds=30)")
        warn_if_alone(call)
        self.group = join(name, call, timeout)
        self._action: Action = action
        self.rank = self.group.rank
        self._exchanged: Gathering | None = None  # votes of exchange(), not counted yet
        self._num_owed_bytes = 0  # length of the message that the other ranks wait for

    def start_votes(self, vote: Vote) -> Gathering:
        """Start sending this rank's vote to all ranks. Return the handle to pass to :meth:`count`. Does not wait.

        If other ranks still wait for a message of this rank after a failure, a blank message is sent first.
        """
        if self._exchanged is not None or self._num_owed_bytes:
            self.send_owed_message()
        return self.group.start_all_gather(torch.from_numpy(np.array(vote, dtype=np.int64)))

    def count(self, gathering: Gathering, meanwhile: Callable[[], None] | None = None) -> tuple[Vote, bool]:
        """Wait for the votes of all ranks, and combine the votes.

        Args:
            gathering: result of :meth:`start_votes`.
            meanwhile: function to call several times per second while waiting; None for no calls.

        Returns:
            A vote with the maximum of each field over all ranks, and True if all ranks have the same batch and tables.

        Raises:
            RankFailedError: if ranks are in different phases.
        """
        gathered = gathering.result(meanwhile)
        if len(gathered) == 1:  # five times as fast as the reductions, which are the cost of a small version
            self._num_owed_bytes = 0
            return Vote(*gathered[0].tolist()), True
        votes = torch.stack(gathered)
        least, most = (Vote(*bound.tolist()) for bound in votes.aminmax(dim=0))
        if least.phase != most.phase:
            phases = [{"phase": f"the phase {Phase(int(phase)).name.lower()}"} for phase in votes[:, 0]]
            check_alike(phases, "phase", action=self._action)
        self._num_owed_bytes = 0 if most.is_working else most.num_bytes
        return most, least[:3] == most[:3]

    def exchange(self, phase: Phase, own: Message) -> list[dict[str, Any]]:
        """Send the message ``own`` to all ranks. Return the contents of all ranks' messages, in rank order.

        Raises:
            Exception: ``own.failure``, if this rank failed.
            FencedError, LostEntryError: if another rank failed with one of these errors.
            RankFailedError: if another rank is in a different phase, failed with a different error, or was interrupted.
            RankLostError: if a rank died or did not answer in time.
        """
        self._exchanged = self.start_votes(Vote(phase, num_bytes=len(own.data)))
        try:
            most, _ = self.count(self._exchanged)
        except (RankFailedError, RankLostError):
            self._exchanged = None
            raise
        self._exchanged = None
        padded = own.data.ljust(most.num_bytes)  # JSON may end in spaces
        gathering = self.group.start_all_gather(torch.frombuffer(bytearray(padded), dtype=torch.uint8))
        self._num_owed_bytes = 0  # after the start: if the start is interrupted, the message is still owed
        tensors = gathering.result()
        if own.failure is not None:
            raise own.failure
        return [decode_message(rank, each.numpy().tobytes(), self._action) for rank, each in enumerate(tensors)]

    def close(self) -> None:
        """Leave the process group. Not a collective."""
        self.group.close()

    def send_owed_message(self) -> None:
        """Send a blank message if other ranks wait for a message from this rank. They then raise RankFailedError."""
        try:
            if self._exchanged is not None:
                self.count(self._exchanged)
        except (RankFailedError, RankLostError):  # in this case no rank sends a message
            self._num_owed_bytes = 0
        self._exchanged = None
        if self._num_owed_bytes:
            blank = torch.full((self._num_owed_bytes,), ord(" "), dtype=torch.uint8, device="cpu")
            self.group.start_all_gather(blank)
            self._num_owed_bytes = 0


class VoteExchange(Exchange):
    """Exchange of a publisher, which also counts the votes that this rank must send.

    A vote is due at every ``vote_every``-th call of ``step()``. If this call fails, the vote is sent later.

    Attributes:
        vote_every: interval between votes, in calls of ``step()``.
        number: number of votes that this rank has sent.
        num_owed: number of votes that are due but have not been sent.
        pending: handle of a vote that was sent but has not been counted; None if there is none.
        is_alone: True if there is only one rank. The rank can then count its votes at once.
    """

    def __init__(self, timeout: timedelta, join: Join = RankGroup) -> None:
        super().__init__(timeout, "publisher", "Publisher(...)", "publish", join)
        self.vote_every = 1
        self.number = 0
        self.num_owed = 0
        self.pending: Gathering | None = None
        self.is_alone = self.group.world_size == 1
        self._num_calls = 0

    def count_call(self) -> None:
        """Count a call of ``step()``. A vote may be due afterwards."""
        number = self._num_calls + 1
        self._num_calls, self.num_owed = number, self.num_owed + (number % self.vote_every == 0)

    def send(self, vote: Vote) -> Gathering:
        """Start sending this rank's vote to all ranks. Return the handle to pass to :meth:`count`. Does not wait."""
        number, owed = self.number + 1, max(self.num_owed - 1, 0)
        # One line, so that an interrupt cannot come between the assignments.
        self.pending, self.number, self.num_owed = self.start_votes(vote), number, owed
        return self.pending


def decode_message(rank: int, data: bytes, action: Action = "publish") -> dict[str, Any]:
    """Decode the message ``data`` from ``rank``, and return its content. If it describes an error, raise the error.

    Errors other than FencedError and LostEntryError are raised as RankFailedError.
    """
    if data.isspace():
        raise RankFailedError(rank, "an interrupt", action)
    message: dict[str, Any] = json.loads(data)
    if "fenced" in message:
        raise FencedError(*message["fenced"])
    if "lost" in message:
        raise LostEntryError(*message["lost"])
    if "error" in message:
        rank = message.get("rank", rank)
        raise RankFailedError(rank, message["error"], action, is_unknown="unknown" in message)
    return message


def check_alike(messages: Sequence[Mapping[str, Any]], *names: str, action: Action = "publish") -> None:
    """Raise RankFailedError if the value of a key in ``names`` differs between ``messages``, a list in rank order."""
    for rank, each in enumerate(messages):
        for name in names:
            if each[name] != messages[0][name]:
                raise RankFailedError(rank, f"{each[name]} where rank 0 has {messages[0][name]}", action)
