"""Recorders of the built-in metrics of trackers, publishers and predictors."""

from __future__ import annotations

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
    """Recorder of the built-in metrics of one object. It sets one label of each metric to the object's name.

    The attributes are the metrics of :class:`~delta_tracker.monitor.library.LibraryMetrics` that have this label.

    Args:
        role: name of the label: ``"tracker"``, ``"publisher"`` or ``"predictor"``.
        owner: the object. The recorder keeps only a weak reference to it. After the object is garbage-collected, the
            next collection removes the gauges.
        name: name of the object and value of the label; None to use ``role``. If the name is in use, ``-2``,
            ``-3``, ... is appended.
        monitor: the monitor; None for the program's default.

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

    def __getattr__(self, metric: str) -> BoundStat:
        """Return the built-in metric ``metric``, with the recorder's label set to the name of the object."""
        if metric.startswith("_"):
            raise AttributeError(metric)
        bound = BoundStat(getattr(self.monitor.metrics, metric), self.label)
        setattr(self, metric, bound)  # found without this method from now on
        return bound

    def watch(self, record: Callable[[Any], None]) -> None:
        """Call ``record(owner)`` once per collection, in a thread of the library, while the owner is alive."""
        self._record = record

    def close(self) -> None:
        """Stop recording, remove the gauges and release the name.

        The next collection still reports the gauges. They are removed after it, or earlier if another recorder or
        source is added.

        Counters and histograms are totals of the process and are kept. The next recorder with this name adds to them.
        """
        self._is_closed, self._record = True, None

    @property
    def is_over(self) -> bool:
        """True after :meth:`close`, or if the object was garbage-collected."""
        return self._is_closed or self._owner() is None

    def read(self, *, is_last: bool) -> None:
        """Call the function that was passed to :meth:`watch`. Remove the gauges of a deleted object."""
        del is_last
        owner, record = self._owner(), self._record
        if owner is None:
            self.end()
        elif record is not None:
            record(owner)

    def end(self) -> None:
        """Remove the gauges."""
        for stat in self.monitor.find(f"{PREFIX}*", kind=Kind.GAUGE):
            if self.label.keys() <= set(stat.definition.labels):
                stat.remove(**self.label)

    def after_fork(self) -> None:
        """Drop the owner in a forked child: another thread of the parent may have held the owner's locks."""
        self._owner = lambda: None


class BoundStat:
    """View of a metric with a fixed value for one label. It has the methods of the metric."""

    def __init__(self, stat: Stat, label: dict[str, str]) -> None:
        self.cell = cache(partial(stat.cell, **label))  # a version of few rows has little else to do
        self.timer = partial(stat.timer, **label)
        self.remove = partial(stat.remove, **label)
        if isinstance(stat, Gauge):
            self.set: Callable[..., None] = partial(stat.set, **label)  # type: ignore[arg-type]  # no label is ``value``
            self.set_function: Callable[..., None] = partial(stat.set_function, **label)
