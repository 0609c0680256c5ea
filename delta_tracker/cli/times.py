"""Times of a stream's commits on one axis, and the clocks of its hosts that differ from the store's."""

from __future__ import annotations

from collections.abc import Iterable

from delta_tracker.cli.entries import Entry
from delta_tracker.cli.followers import FollowerView
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.store_clock import SKEW_SECONDS, StoreClock, skew_problem


class CommitTimes:
    """Times of a stream's commits by the store's clock, which never decrease from version to version.

    The differences between the commits of one publisher are those of the publisher's clock, because a store may
    truncate modification times to seconds. If this clock differs from the store's by more than a minute, its times are
    shifted so that the publisher's first commit has the store's time. This is repeated if the clock was set.

    Attributes:
        are_shifted: True if the times of a publisher were shifted.
        max_correction: longest time in seconds by which a commit seemed to be before the one before it.
    """

    def __init__(self) -> None:
        self.are_shifted = False
        self.max_correction = 0.0
        self._writer = ""
        self._created = self._offset = self._last = 0.0

    def next(self, manifest: Manifest) -> float:
        """Return the time of the commit of an entry, in Unix seconds. Call it in ascending order of versions."""
        was_set = (
            manifest.created < self._created or manifest.created - self._offset > manifest.committed + SKEW_SECONDS
        )
        if manifest.writer != self._writer or was_set:
            self._writer = manifest.writer
            self._offset = manifest.skew if abs(manifest.skew) > SKEW_SECONDS else 0.0
            self.are_shifted = self.are_shifted or self._offset != 0.0
        self._created = manifest.created
        now = manifest.created - self._offset
        self.max_correction = max(self.max_correction, self._last - now)
        self._last = max(self._last, now)
        return self._last


class Skews:
    """Differences between the clocks of a stream's publishers and the store's.

    The skew of a publisher is the smallest one of its entries, because a slow commit looks like a clock that is behind.
    """

    def __init__(self) -> None:
        self._found: dict[int, float] = {}  # generation to skew in seconds

    def add(self, entry: Manifest | Entry) -> None:
        """Add an entry of the log."""
        skew = entry.skew
        self._found[entry.generation] = min(self._found.get(entry.generation, skew), skew, key=abs)

    def problems(self, followers: Iterable[FollowerView] = (), clock: StoreClock | None = None) -> list[str]:
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
