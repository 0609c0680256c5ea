"""Votes of all ranks at the calls of ``Publisher.step()``: :class:`Ballots`."""

from __future__ import annotations

from collections.abc import Callable

from delta_tracker.publisher.exchange import Count, Exchange, Vote
from delta_tracker.tracker.rank_group import Gathering


class Ballots:
    """Votes of one rank, and the count of those of all ranks.

    Every ``vote_every``-th call of ``step()`` sends a vote. A call that failed or was interrupted before its vote owes
    it to the other ranks.

    Attributes:
        vote_every: number of calls of ``step()`` from one vote to the next.
        number: number of votes of this rank so far.
        is_pending: True if votes were sent and not counted. Not a property, because it is read often.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.vote_every = 1
        self.number = 0
        self.is_pending = False
        self._exchange = exchange
        self._votes: Gathering | None = None
        self._num_calls = 0
        self._num_owed = 0

    @property
    def is_owed(self) -> bool:
        """True if a call of ``step()`` should have sent a vote, and did not."""
        return self._num_owed > 0

    @property
    def is_alone(self) -> bool:
        """True if there is one rank, whose votes are complete at once."""
        return self._exchange.group.world_size == 1

    def call(self) -> None:
        """Count a call of ``step()``."""
        number = self._num_calls + 1
        self._num_calls, self._num_owed = number, self._num_owed + (number % self.vote_every == 0)

    def send(self, vote: Vote) -> None:
        """Send this rank's vote, which does not wait for those of other ranks."""
        number, owed = self.number + 1, max(self._num_owed - 1, 0)
        # One line, so that an interrupt cannot come between the assignments.
        self._votes, self.is_pending, self.number, self._num_owed = self._exchange.start_votes(vote), True, number, owed

    def count(self, meanwhile: Callable[[], None] | None = None) -> Count:
        """Wait for the votes that were sent, and combine them. Repeat it after an interrupt.

        Args:
            meanwhile: called several times per second during the wait; None for no calls.

        Raises:
            RankFailedError: if ranks called different methods.
            RankLostError: if a rank died or did not vote in time.
        """
        assert self._votes is not None, "send() came first"
        return self._exchange.count(self._votes, meanwhile)

    def clear(self) -> None:
        """Forget the votes that were counted."""
        self._votes, self.is_pending = None, False

    def cancel_owed(self) -> None:
        """Owe no vote any more, because this rank takes no part in versions any more."""
        self._num_owed = 0

    def settle(self) -> None:
        """Send the message that the other ranks wait for, if this rank was interrupted before it sent it."""
        self._exchange.send_owed_message()
