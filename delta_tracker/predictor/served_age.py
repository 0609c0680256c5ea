"""Age of the rows that a predictor serves, without a request to the store."""

from __future__ import annotations

from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.reading.runtime import REAL, Runtime
from delta_tracker.stream.store_clock import COARSE_SECONDS


class ServedAge:
    """Estimate of the age of a served version, by the store's clock.

    As in :class:`~delta_tracker.stream.store_clock.StoreClock`, this host's clock is used until the modification times
    of entries contradict it: the store's time is not before that of an entry that exists, and an entry that did not
    exist at a look was modified after it. The estimate is exact to the time between two looks, plus one second.

    Attributes:
        rested: version after which the last look found no entry, and the monotonic time at which it began; None if it
            found one.
        skew_seconds: this host's clock minus the store's; 0 unless the entries contradict this host's clock.
    """

    def __init__(self, runtime: Runtime = REAL) -> None:
        self._clock, self._monotonic = runtime.clock, runtime.monotonic
        self._low, self._high = -float("inf"), float("inf")  # bounds of the store's clock minus this host's
        self.rested: tuple[int, float] | None = None
        self.skew_seconds = 0.0

    def applied(self, manifest: Manifest) -> None:
        """Compare this host's clock with the time at which an applied version was committed."""
        modified, rested = manifest.modified, self.rested
        if modified is None or manifest.merges is not None:
            return
        now = self._clock()
        low = modified - now
        self._low = max(self._low, low)
        if rested is not None and rested[0] == manifest.version - 1:
            looked = now - (self._monotonic() - rested[1])
            self._high = min(self._high, modified + COARSE_SECONDS - looked)
        if self._low > self._high:  # a clock was set
            self._low, self._high = low, float("inf")
        self.skew_seconds = 0.0 - min(max(0.0, self._low), self._high)

    def seconds(self, manifest: Manifest) -> float:
        """Return the seconds since a version was committed, or copied by a mirror; for a merged one, since its cut."""
        since = manifest.committed if manifest.merges is None else min(manifest.cut, manifest.committed)
        return max(0.0, self._clock() - self.skew_seconds - since)

    def event_seconds(self, manifest: Manifest) -> float | None:
        """Return the time since the event time of a version, at least 0; None if it has none."""
        event_time = manifest.event_time
        return None if event_time is None else max(0.0, self._clock() - self.skew_seconds - event_time)
