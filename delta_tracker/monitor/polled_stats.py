"""Sources of metrics. The collector reads each source once per collection."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor.stat import Kind, Stat

Readings = float | Mapping[str | tuple[str, ...], float] | None
"""Current values of a stat: one number, a mapping of label values to numbers, or None for no data.

If the stat has several labels, the keys of the mapping are tuples of label values.
"""


class MetricSource(ABC):
    """Base class of objects that record metrics once per collection.

    :meth:`read` is called in a thread of the library. Calls do not overlap. If :meth:`read` raises an exception, the
    exception is counted, and :meth:`read` is not called again for at least 10 seconds.
    """

    name: str
    """Name of the source in log messages and metrics."""

    if_taken: ClassVar[Literal["replace", "number", "refuse"]] = "replace"
    """Action when the source is added and its name is in use. ``"replace"`` replaces the other source, ``"number"``
    appends a number to the name, and ``"refuse"`` raises InvalidArgumentError."""

    @property
    def is_over(self) -> bool:
        """True if the registry should remove the source."""
        return False

    @abstractmethod
    def read(self, *, is_last: bool) -> None:
        """Record the current readings.

        ``is_last`` is True in the last collection before the monitor stops. Only then may the method wait for a device.
        """

    def end(self) -> None:  # noqa: B027  most sources need no clean-up
        """Release resources. The registry calls this method before it removes the source."""

    def end_epoch(self) -> None:  # noqa: B027  most sources have no windows by epoch
        """End an epoch. Later values belong to the next epoch. Called in the training thread, so it must not block."""

    def after_fork(self) -> None:  # noqa: B027
        """Replace locks, and discard objects that belong to the parent process. Called in a forked child."""


class Passive(MetricSource):
    """Source that calls a callback once per collection and records the returned readings in a stat.

    Args:
        stat: stat in which the readings are recorded. For a counter, each reading is a running total, and the increase
            since the previous reading is recorded.
        callback: function that returns the readings.
    """

    if_taken = "refuse"

    def __init__(self, stat: Stat, callback: Callable[[], Readings]) -> None:
        self.name = stat.name
        self._stat = stat
        self._callback = callback
        self._totals: dict[tuple[str, ...], float] = {}

    def read(self, *, is_last: bool) -> None:  # noqa: ARG002
        """Call the callback and record its readings. No-op if the stat is disabled."""
        if not self._stat.enabled:
            return
        readings = self._callback()
        if readings is None:
            return
        if not isinstance(readings, Mapping):
            readings = {(): readings}
        names = self._stat.definition.labels
        for key, reading in readings.items():
            values = key if isinstance(key, tuple) else (key,)
            if len(values) != len(names):
                remedy = f"Return one value for each of the labels {list(names)} of {self.name!r} as key"
                raise InvalidArgumentError("readings", {key: reading}, remedy)
            labels = dict(zip(names, values, strict=True))
            self._stat.cell(**labels).add(self._growth(values, reading))

    def _growth(self, values: tuple[str, ...], reading: float) -> float:
        if self._stat.definition.kind is not Kind.COUNTER:
            return reading
        before = self._totals.get(values, 0)
        self._totals[values] = reading
        # If the total has decreased, it restarted from 0.
        return reading - before if reading >= before else reading
