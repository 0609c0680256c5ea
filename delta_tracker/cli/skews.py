"""Clocks of a stream's hosts that differ from the store's."""

from __future__ import annotations

from collections.abc import Iterable

from delta_tracker.cli.entries import Entry
from delta_tracker.cli.followers import Follower
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.store_clock import StoreClock, skew_problem


class Skews:
    """Differences between the clocks of a stream's publishers and the store's.

    The skew of a publisher is the smallest one of its entries, because a slow commit looks like a clock that is behind.

    Args:
        entries: entries of the log.
    """

    def __init__(self, entries: Iterable[Manifest | Entry] = ()) -> None:
        self._found: dict[int, float] = {}  # generation to skew in seconds
        for entry in entries:
            self.add(entry)

    def add(self, entry: Manifest | Entry) -> None:
        """Add an entry of the log."""
        skew = entry.skew
        self._found[entry.generation] = min(self._found.get(entry.generation, skew), skew, key=abs)

    def problems(self, followers: Iterable[Follower] = (), clock: StoreClock | None = None) -> list[str]:
        """Return a description of each clock that differs from the store's by more than a minute.

        Args:
            followers: predictors of the stream.
            clock: clock of this process; None if it was not compared with the store's.
        """
        skews = {f"the publisher of generation {number}": skew for number, skew in sorted(self._found.items())}
        skews |= {f"predictor {each.beat.name}": each.skew for each in followers}
        if clock is not None:
            skews["this host"] = -clock.offset
        described = (skew_problem(whose, seconds) for whose, seconds in skews.items())
        return [problem for problem in described if problem is not None]
