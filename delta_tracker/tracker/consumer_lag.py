"""How far each consumer lags: the time since its last committed read, and the age of its oldest pending row."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lag:
    """How far behind a consumer is.

    Args:
        batches: ``step()`` calls since its last committed read.
        seconds: time since then.
        oldest_pending: seconds since the oldest of its pending rows was recorded, see :class:`LagClock`, or None.
    """

    batches: int
    seconds: float
    oldest_pending: float | None


class LagClock:
    """Keeps one moment for each range of positions in which rows were recorded, not one for each row.

    So an age is exact for the rows of the log. Of the rows that a consumer's reads left out only the age of the oldest
    that ever was among them is known, until none is left: an upper bound. A row that a read finds by comparison has its
    age from that read on: a lower bound.

    Example:
        >>> clock = LagClock()
        >>> clock.placed("serving", 0)
        >>> clock.lag("serving", 0).oldest_pending is None
        True
        >>> clock.recorded(0)
        >>> clock.lag("serving", 1).oldest_pending >= 0
        True
    """

    def __init__(self) -> None:
        self._recorded: dict[int, float] = {}
        self._positions: dict[str, int] = {}
        self._committed: dict[str, float] = {}
        self._left_out: dict[str, float] = {}

    def recorded(self, position: int) -> None:
        """Rows are recorded as changed at a position."""
        if position not in self._recorded:
            self._recorded[position] = time.monotonic()

    def placed(self, consumer: str, position: int, *, has_rows: bool = False) -> None:
        """A consumer stands at a position from now on, with rows from before it if ``has_rows``."""
        now = time.monotonic()
        self._positions[consumer], self._committed[consumer] = position, now
        self._left_out.pop(consumer, None)
        if has_rows:
            self._left_out[consumer] = now

    def found(self, consumer: str, num_rows: int) -> None:
        """A read finds so many rows pending for a consumer, which nobody may have recorded."""
        if num_rows and not self._is_known(consumer):
            self._left_out[consumer] = time.monotonic()

    def distrusted(self, consumer: str) -> None:
        """Rows became pending for a consumer, whatever was pending before."""
        self._left_out.setdefault(consumer, time.monotonic())

    def committed(self, consumer: str, position: int, *, leaves_out: bool) -> None:
        """A consumer's read up to a position is committed, all of it or a part."""
        since = self._pending_since(consumer) if leaves_out else None
        self.placed(consumer, position)
        if since is not None:
            self._left_out[consumer] = since

    def given_up(self, consumer: str, position: int) -> None:
        """A consumer stands at a position without having read what was pending before it."""
        since = self._pending_since(consumer)
        self._positions[consumer] = position
        if since is not None:
            self._left_out[consumer] = since

    def removed(self, consumer: str) -> None:
        """A consumer is gone."""
        for known in (self._positions, self._committed, self._left_out):
            known.pop(consumer, None)

    def compact(self, pinned: Collection[int], *, forgets: bool) -> None:
        """Forget what tells apart positions that nobody tells apart, and with ``forgets`` what lies before all of them.

        Args:
            pinned: where open reads end.
            forgets: nobody will be placed before where all stand now.
        """
        if forgets and not pinned and self._recorded:
            start = min(self._positions.values(), default=0)
            if all(position < start for position in self._recorded):
                self._recorded.clear()
        if not self._recorded:
            return
        kept: dict[int, float] = {}
        pinned = {*pinned, *self._positions.values(), *(() if forgets else (0,))}
        for position in sorted(self._recorded):
            below = max((each for each in pinned if each <= position), default=None)
            if below is not None:
                kept.setdefault(below, self._recorded[position])
        self._recorded = kept

    def lag(self, consumer: str, batches: int) -> Lag:
        """How far behind a consumer is that has not committed a read for so many batches."""
        now, since = time.monotonic(), self._pending_since(consumer)
        return Lag(batches, now - self._committed[consumer], None if since is None else now - since)

    def _is_known(self, consumer: str) -> bool:
        """Whether anything is pending for a consumer."""
        if consumer in self._left_out:
            return True
        start = self._positions[consumer]
        return next(reversed(self._recorded), -1) >= start  # the latest comes last

    def _pending_since(self, consumer: str) -> float | None:
        known = [when for position, when in self._recorded.items() if position >= self._positions[consumer]]
        if consumer in self._left_out:
            known.append(self._left_out[consumer])
        return min(known, default=None)
