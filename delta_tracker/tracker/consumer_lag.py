"""Lag of each consumer: the time since its last committed read, and the age of its oldest pending row."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lag:
    """Lag of one consumer.

    Args:
        batches: number of ``step()`` calls since the consumer's last committed read.
        seconds: seconds since the consumer's last committed read.
        oldest_pending: seconds since the consumer's oldest pending row was recorded, or a bound on this time (see
            :class:`LagClock`). None if no row is known to be pending.
    """

    batches: int
    seconds: float
    oldest_pending: float | None


class LagClock:
    """Clock that measures the lag of consumers, with one timestamp per range of log positions instead of one per row.

    The age of the oldest pending row in the log is exact. For rows that reads left out, the timestamp of the oldest one
    is kept until a read leaves no row out, so that the reported age is an upper bound. For rows that a read finds by
    comparing a shard with a copy, the age counts from this read, so that the reported age is a lower bound.

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
        """Record that rows changed at a position. Only the first call for a position sets its timestamp."""
        if position not in self._recorded:
            self._recorded[position] = time.monotonic()

    def placed(self, consumer: str, position: int, *, has_rows: bool = False) -> None:
        """Record that a consumer was added at a position or moved there.

        Args:
            consumer: name of the consumer.
            position: new position of the consumer's cursor.
            has_rows: True if rows that changed before the position are pending. Their age counts from this call.
        """
        now = time.monotonic()
        self._positions[consumer], self._committed[consumer] = position, now
        self._left_out.pop(consumer, None)
        if has_rows:
            self._left_out[consumer] = now

    def found(self, consumer: str, num_rows: int) -> None:
        """Record that a read found ``num_rows`` pending rows.

        If the clock has no timestamp for any pending row of the consumer, the age of these rows counts from this call.
        """
        newest = next(reversed(self._recorded), -1)  # positions are inserted in ascending order
        if num_rows and newest < self._positions[consumer]:
            self._left_out.setdefault(consumer, time.monotonic())

    def distrusted(self, consumer: str) -> None:
        """Record that rows were made pending for one consumer only. Such rows are not in the log.

        Their age counts from this call, unless the clock already has a timestamp for the consumer's rows outside the
        log.
        """
        self._left_out.setdefault(consumer, time.monotonic())

    def committed(self, consumer: str, position: int, *, leaves_out: bool) -> None:
        """Record that a consumer committed a read.

        Args:
            consumer: name of the consumer.
            position: position at the end of the read.
            leaves_out: True if the read left out some rows. These rows stay pending.
        """
        since = self._pending_since(consumer) if leaves_out else None
        self.placed(consumer, position)
        if since is not None:
            self._left_out[consumer] = since

    def given_up(self, consumer: str, position: int) -> None:
        """Record that a consumer was dropped and moved to a position. The age of its oldest pending row is kept."""
        since = self._pending_since(consumer)
        self._positions[consumer] = position
        if since is not None:
            self._left_out[consumer] = since

    def removed(self, consumer: str) -> None:
        """Remove the timestamps of a consumer."""
        for known in (self._positions, self._committed, self._left_out):
            known.pop(consumer, None)

    def compact(self, pinned: Collection[int], *, forgets: bool) -> None:
        """Merge timestamps that no cursor or uncommitted read separates.

        Args:
            pinned: ends of uncommitted reads, across which timestamps must not be merged. Cursors need not be included.
            forgets: True to also drop timestamps before the lowest cursor. Requires that no cursor can move back.
        """
        if forgets and not pinned and self._recorded:
            start = min(self._positions.values(), default=0)
            if max(self._recorded) < start:
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
        """Return the lag of a consumer.

        Args:
            consumer: name of the consumer.
            batches: number of ``step()`` calls since the consumer's last committed read.
        """
        now, since = time.monotonic(), self._pending_since(consumer)
        return Lag(batches, now - self._committed[consumer], None if since is None else now - since)

    def _pending_since(self, consumer: str) -> float | None:
        known = [when for position, when in self._recorded.items() if position >= self._positions[consumer]]
        if consumer in self._left_out:
            known.append(self._left_out[consumer])
        return min(known, default=None)
