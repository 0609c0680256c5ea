"""Estimate of a store's current time, from which the ages of objects are computed without other hosts' clocks."""

import time
from collections.abc import Callable, Iterable

SKEW_SECONDS = 60.0  # differences of two clocks up to this value are not reported
COARSE_SECONDS = 1.0  # S3 truncates modification times to whole seconds


class StoreClock:
    """Estimate of a store's current time in Unix seconds, based on the modification times that a reader has polled.

    The reader's clock is used unless it violates one of these bounds:

    - The store's time is not before any modification time.
    - If an object was modified after a poll, its modification time is not before that poll.

    The error is at most the time between two polls plus one second. The estimate may be too low if a writer to a local
    directory was suspended before an object became visible with an earlier modification time. Not thread-safe.

    Attributes:
        offset: the store's time minus the reader's time, in seconds; 0 until a bound is violated.
        reader_time: function that returns the reader's time. Call it before a poll, and pass it to :meth:`observe`.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.offset = 0.0
        self.reader_time = clock
        self._low, self._high = -float("inf"), float("inf")
        self._last: dict[str, tuple[float, float]] = {}  # newest modification time of each kind, and the last look

    def now(self) -> float:
        """Return the estimate of the store's time."""
        return self.reader_time() + self.offset

    def observe(self, kind: str, modified: Iterable[float], *, began: float) -> None:
        """Update the estimate with the modification times in Unix seconds that a poll returned.

        ``began`` is the reader's time at the start of the poll. All polls of one ``kind`` must cover the same objects.
        """
        newest = max(modified, default=-float("inf"))
        seen, looked_at = self._last.get(kind, (-float("inf"), -float("inf")))
        self.compare(newest, looked_at=looked_at if newest > seen else None)
        self._last[kind] = max(newest, seen), began

    def compare(self, modified: float, *, looked_at: float | None) -> None:
        """Update the estimate with the modification time of one object in Unix seconds.

        ``looked_at`` is the reader's time of a poll before this modification; None if there was no such poll.
        """
        low = modified - self.reader_time()
        self._low = max(self._low, low)
        if looked_at is not None:
            self._high = min(self._high, modified + COARSE_SECONDS - looked_at)
        if self._low > self._high:  # a clock was set
            self._low, self._high = low, float("inf")
        self.offset = min(max(0.0, self._low), self._high)


def skew_problem(whose: str, seconds: float) -> str | None:
    """Return a warning that the clock of ``whose`` is ``seconds`` ahead of the store's; None if ``|seconds| <= 60``."""
    if abs(seconds) <= SKEW_SECONDS:
        return None
    if seconds > 0:
        return f"the clock of {whose} is {seconds:.0f} s ahead of the store's"
    return f"the clock of {whose} is {-seconds:.0f} s behind the store's, or its objects were copied to the store later"
