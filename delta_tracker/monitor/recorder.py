"""Recorders of the built-in metrics of trackers, publishers and predictors."""

import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor.library import PREFIX
from delta_tracker.monitor.monitor import MONITOR, Monitor
from delta_tracker.monitor.polled_stats import MetricSource
from delta_tracker.monitor.stat import Gauge, Kind, Stat

_MAX_LENGTH = 200


class Recorder(MetricSource):
    """View of the built-in metrics of one object, such as a tracker. One label is set to the object's name.

    Each metric of :class:`~delta_tracker.monitor.library.LibraryMetrics` that has the label ``role`` is an attribute of
    the recorder.

    Args:
        role: name of the label: ``"tracker"``, ``"publisher"`` or ``"predictor"``.
        owner: object that the metrics describe. The recorder keeps a weak reference. After ``owner`` is
            garbage-collected, the next collection removes the gauges.
        name: name of ``owner``, used as the label's value; None to use ``role``. If the name is in use, ``-2``, ``-3``,
            ... is appended.
        monitor: monitor that records the metrics; None for the program's default.

    Attributes:
        label: name and value of the label.

    Raises:
        InvalidArgumentError: for an invalid name or monitor.

    Example:
        >>> class Owner:
        ...     pass
        >>> one, two, monitor = Owner(), Owner(), Monitor()
        >>> recorder, other = (Recorder("publisher", owner, monitor=monitor) for owner in (one, two))
        >>> recorder.published_rows.cell(table="user").add(3)
        >>> other.label, [cell.labels for cell in monitor.metrics.published_rows.cells]
        ({'publisher': 'publisher-2'}, [(('publisher', 'publisher'), ('table', 'user'))])
    """

    if_taken = "number"

    def __init__(self, role: str, owner: object, *, name: str | None = None, monitor: Monitor | None = None) -> None:
        if name is not None and not (type(name) is str and name.isprintable() and 0 < len(name) <= _MAX_LENGTH):
            raise InvalidArgumentError("name", name, f"Pass 1 to {_MAX_LENGTH} printable characters")
        if monitor is not None and not isinstance(monitor, Monitor):
            raise InvalidArgumentError("monitor", monitor, "Pass a Monitor, or None for the program's default")
        self.monitor = MONITOR if monitor is None else monitor
        self.name = f"{role} {role if name is None else name}"
        self._owner: Callable[[], object] = weakref.ref(owner)
        self._record: Callable[[Any], None] | None = None
        self._is_closed = False
        self.monitor.add_source(self)
        self.label = {role: self.name.removeprefix(f"{role} ")}

    def __getattr__(self, metric: str) -> "BoundStat":
        """Return the built-in metric called ``metric``, bound to the recorder's label."""
        if metric.startswith("_"):
            raise AttributeError(metric)
        bound = BoundStat(getattr(self.monitor.metrics, metric), self.label)
        setattr(self, metric, bound)  # found without this method from now on
        return bound

    def watch(self, record: Callable[[Any], None]) -> None:
        """Set a function that is called once per collection, with the owner as argument, in a thread of the library."""
        self._record = record

    def close(self) -> None:
        """Stop recording, release the name and mark the gauges for removal.

        The next collection still reports the gauges. They are removed after it, or earlier if another source is added.
        Counters and histograms are not removed, because they are totals of the process. A later recorder with the same
        name adds to them.
        """
        self._is_closed, self._record = True, None

    @property
    def is_over(self) -> bool:
        """True after :meth:`close`, or after the owner was garbage-collected."""
        return self._is_closed or self._owner() is None

    def read(self, *, is_last: bool) -> None:  # noqa: ARG002
        """Call the function passed to :meth:`watch`. If the owner was garbage-collected, remove the gauges instead."""
        owner, record = self._owner(), self._record
        if owner is None:
            self.end()
        elif record is not None:
            record(owner)

    def end(self) -> None:
        """Remove all gauge cells whose labels include the recorder's label."""
        for stat in self.monitor.find(f"{PREFIX}*", kind=Kind.GAUGE):
            if self.label.keys() <= set(stat.definition.labels):
                stat.remove(**self.label)

    def after_fork(self) -> None:
        """Drop the reference to the owner, because its locks may be held after a fork. Called in a forked child."""
        self._owner = lambda: None


class BoundStat:
    """View of a built-in metric in which one label has a fixed value. It has the recording methods of the metric."""

    def __init__(self, stat: Stat, label: dict[str, str]) -> None:
        self.cell = cache(partial(stat.cell, **label))  # a version of few rows has little else to do
        self.timer = partial(stat.timer, **label)
        self.remove = partial(stat.remove, **label)
        if isinstance(stat, Gauge):
            self.set: Callable[..., None] = partial(stat.set, **label)  # type: ignore[arg-type]  # no label is ``value``
            self.set_function: Callable[..., None] = partial(stat.set_function, **label)
