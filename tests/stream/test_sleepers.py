"""Publishers that sleep in the middle of an operation, while others claim, publish and remove old versions."""

from __future__ import annotations

import contextlib
import copy

import pytest

from delta_tracker.errors import FencedError
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.retention import Retention, retain
from tests.predictor.serving import Follower
from tests.stores.rules import Killed, calls, nth, on
from tests.stores.wrapped import Operation, WrappedStorage
from tests.stream.histories import Clock, History, clocked, dies
from tests.stream.interleavings import explore

_IN_LONG_SWEEPS = pytest.mark.sweep("long", only=True)  # up to a minute


def go_on(history: History, clock: Clock) -> None:
    """Claim and publish with another publisher, and remove superseded versions."""
    history.claim()
    history.snapshot()
    history.delta()
    clock.seconds += 1000
    retain(history.storage, Retention(versions=1), clock)


def assert_reads_the_history(follower: Follower, history: History) -> None:
    """Sync version by version, and check each against the rows that the stream's owner wrote."""
    for _ in range(10):
        assert follower.sync(1) is None
    assert follower.predictor.version == history.version


@pytest.mark.parametrize("is_answer_lost", [False, True])
def test_what_a_fenced_publisher_leaves_when_it_is_killed_is_never_served(is_answer_lost: bool) -> None:
    clock = Clock()
    with clock.of_the_log():
        storage = clocked(clock)
        history = History(storage, 4)
        slow = Follower(history)
        if is_answer_lost:  # its newest version is in the log, but it got no answer
            before = copy.copy(history.held)
            history.delta(2)
            assert slow.sync() is None
            sleeper = history.fork()
            sleeper.held = before
        else:
            assert slow.sync() is None
            sleeper = history.fork()
        late = Follower(history)
        assert late.sync(1) is None
        go_on(history, clock)
        # It is fenced if it could not create its entry.
        with storage.under(dies), contextlib.suppress(Killed, FencedError):
            sleeper.delta(3)
        for follower in (slow, late):
            assert_reads_the_history(follower, history)


def test_the_claim_of_a_publisher_that_is_killed_is_never_served() -> None:
    clock = Clock()
    with clock.of_the_log():
        storage = clocked(clock)
        history = History(storage, 4)
        slow = Follower(history)
        assert slow.sync() is None

        def sleep(_: Operation) -> None:
            history.delta(3)  # at the name of the next claim
            history.snapshot()
            history.delta(3)
            clock.seconds += 1000
            retain(storage, Retention(versions=1), clock)

        sleeper = WrappedStorage(storage, dies, calls(nth(1, on("create")), before=sleep))
        with pytest.raises(Killed):
            StreamLog(sleeper).claim()
        assert_reads_the_history(slow, history)


@pytest.mark.parametrize("is_old", [False, True], ids=["new", "old"])
@pytest.mark.parametrize("program", ["commit", "claim"])
def test_no_late_entry_counts_wherever_a_publisher_sleeps_or_dies(program: str, is_old: bool) -> None:
    """With the former retention, which frees the names of claims too, publishers only sleep and take entries back."""
    assert explore(program, is_old=is_old) > 20


@pytest.mark.parametrize(
    ("program", "is_old"),
    [
        ("commit", True),
        ("claim", True),
        pytest.param("commit", False, marks=_IN_LONG_SWEEPS),
        pytest.param("claim", False, marks=_IN_LONG_SWEEPS),
    ],
)
@pytest.mark.timeout(900)
def test_no_late_entry_counts_in_a_directory_either(program: str, is_old: bool) -> None:
    """A directory is not listed where single requests show which entry is the newest."""
    assert explore(program, is_old=is_old, is_directory=True) > 20
