"""What a publisher does after the votes of all ranks, for every state and every vote."""

from __future__ import annotations

import itertools
from concurrent.futures import Future

import pytest

from delta_tracker.publisher.delivery import Outcome
from delta_tracker.publisher.exchange import Phase, Vote
from delta_tracker.publisher.flight import Copying, Cut, Ended, Flight, Step, decide

_STATES: list[Flight | None] = [
    None,
    Copying(3, Future()),
    Cut(after=3, number=1, kind="delta", batch=1),
    Ended(3, Outcome()),
]


def _expected(state: Flight | None, votes: int, vote: Vote) -> Step:
    if state is not None and votes == 3:  # these votes led to the state
        return Step.WAIT
    if vote.is_working or isinstance(state, Cut):
        return Step.WAIT
    if isinstance(state, Copying):
        return Step.CUT
    return (Step.SNAPSHOT if vote.wants_snapshot else Step.DELTA) if vote.is_due else Step.REST


@pytest.mark.parametrize("state", _STATES, ids=lambda state: type(state).__name__)
def test_every_vote_in_every_state(state: Flight | None) -> None:
    for votes, is_working, is_due, wants_snapshot in itertools.product((3, 4), *[(False, True)] * 3):
        vote = Vote(Phase.STEPPING, is_working=is_working, is_due=is_due, wants_snapshot=wants_snapshot)
        assert decide(state, votes, vote) is _expected(state, votes, vote)


def test_no_rank_begins_a_version_while_another_one_works() -> None:
    for state, is_due in itertools.product(_STATES, (False, True)):
        vote = Vote(Phase.STEPPING, is_working=True, is_due=is_due)
        assert decide(state, 4, vote) is Step.WAIT
