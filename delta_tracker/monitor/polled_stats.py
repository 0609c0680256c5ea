"""Stats that the collector reads, once per collection, in its own threads. Training does not record them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from delta_tracker.monitor.stat import Kind, Stat

Readings = float | Mapping[str | tuple[str, ...], float] | None
"""A number; one for each label value (or tuple of them); or None for no data."""


class Source(ABC):
    """What is read once per collection.

    The collector calls :meth:`read` from a thread of its own, one call at a time; what it raises is counted.
    """

    name: str
    """Names it where it fails."""

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to read any more, so that it can be forgotten."""
        return False

    @abstractmethod
    def read(self, *, is_last: bool) -> None:
        """Record what there is to record. Wait for a device only if ``is_last``."""

    def end(self) -> None:  # noqa: B027  most have no end
        """It is over, and forgotten."""

    def end_epoch(self) -> None:  # noqa: B027  most have nothing to end
        """What was recorded so far belongs to the epoch that ends. Called by the training thread: wait for nothing."""

    def after_fork(self) -> None:  # noqa: B027
        """Let go of locks and of what belongs to the parent; called in a forked child."""


class Passive(Source):
    """A stat whose readings come from a callback.

    Args:
        stat: where they are recorded; of a counter the callback says the total, and its growth is recorded.
        callback: gives the readings.
    """

    def __init__(self, stat: Stat, callback: Callable[[], Readings]) -> None:
        self.name = stat.name
        self._stat = stat
        self._callback = callback
        self._totals: dict[tuple[str, ...], float] = {}

    def read(self, *, is_last: bool) -> None:
        """Call the callback; None, and a mapping without an entry, is no data."""
        del is_last
        if not self._stat.enabled:
            return
        readings = self._callback()
        if readings is None:
            return
        if not isinstance(readings, Mapping):
            readings = {(): readings}
        for key, reading in readings.items():
            values = (key,) if isinstance(key, str) else key
            labels = dict(zip(self._stat.definition.labels, values, strict=True))
            self._stat.cell(**labels).add(self._growth(values, reading))

    def _growth(self, values: tuple[str, ...], reading: float) -> float:
        if self._stat.definition.kind is not Kind.COUNTER:
            return reading
        before = self._totals.get(values, 0)
        self._totals[values] = reading
        # A total that fell was started anew, from 0.
        return reading - before if reading >= before else reading
