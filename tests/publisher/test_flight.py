"""What a publisher does after the votes of all ranks, for every state and every vote."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import Future

from delta_tracker.publisher.delivery import Outcome
from delta_tracker.publisher.exchange import Phase, Vote
from delta_tracker.publisher.versions import Copying, Cut, Ended, Flight, Step, next_publish_step

_BEGUN = 3  # number of the votes that led to each state
_STATES: list[Flight | None] = [
    None,
    Copying(_BEGUN, Future()),
    Cut(after=_BEGUN, kind="delta", batch=1),
    Ended(_BEGUN, Outcome()),
]


def _decisions(votes: int, *, is_working: bool) -> Iterator[tuple[Flight | None, Vote, Step]]:
    for state, is_due, wants_snapshot in itertools.product(_STATES, (False, True), (False, True)):
        vote = Vote(Phase.STEPPING, is_working=is_working, is_due=is_due, wants_snapshot=wants_snapshot)
        yield state, vote, next_publish_step(state, votes, vote)


def test_no_rank_cuts_or_begins_a_version_while_another_one_works() -> None:
    assert {step for _, _, step in _decisions(_BEGUN + 1, is_working=True)} == {Step.WAIT}


def test_a_version_begins_only_if_one_is_due_and_the_one_before_has_ended() -> None:
    for state, vote, step in _decisions(_BEGUN + 1, is_working=False):
        if step in (Step.DELTA, Step.SNAPSHOT):
            assert vote.is_due
            assert state is None or isinstance(state, Ended)
            assert (step is Step.SNAPSHOT) == vote.wants_snapshot
        elif vote.is_due:
            assert isinstance(state, Copying | Cut)


def test_a_copy_leads_to_its_cut_whatever_is_due() -> None:
    steps = [step for state, _, step in _decisions(_BEGUN + 1, is_working=False) if isinstance(state, Copying)]
    assert steps == [Step.CUT] * 4


def test_votes_that_are_counted_again_after_an_interrupt_change_nothing() -> None:
    assert {step for state, _, step in _decisions(_BEGUN, is_working=False) if state is not None} == {Step.WAIT}
