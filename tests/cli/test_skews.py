"""The skew of a publisher is that of its fastest commit."""

from __future__ import annotations

from delta_tracker.cli.predictors import Skews
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.store_clock import StoreClock


def test_a_slow_commit_is_no_skew() -> None:
    entries = [
        Manifest(
            stream="", generation=generation, writer="a", version=0, kind="delta", created=1e9, modified=1e9 + late
        )
        for generation, late in ((1, 0.1), (1, 500.0), (2, 500.0), (2, 400.0))
    ]
    (problem,) = Skews(entries).problems()
    assert problem.startswith("the clock of the publisher of generation 2 is 400 s behind the store's")


def test_the_clock_of_this_host_is_reported_from_its_own_side() -> None:
    clock = StoreClock(lambda: 1000.0)
    assert Skews().problems(clock=clock) == []
    clock.observe("log", [1500.0], began=1000.0)
    (problem,) = Skews().problems(clock=clock)
    assert problem.startswith("the clock of this host is 500 s behind the store's")
