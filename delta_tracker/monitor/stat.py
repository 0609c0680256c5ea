"""Stats: named series of numbers with a help text, a unit and labels."""

import logging
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Never

from delta_tracker.arguments import check_count, check_function
from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor.clock import Progress, Timer
from delta_tracker.monitor.names import (
    Labels,
    check_label_names,
    check_stat_name,
    check_text,
    encodable,
    exposed,
    labelled_call,
    order_labels,
    shown,
)
from delta_tracker.monitor.policy import Policy
from delta_tracker.monitor.series import Cell, CellKey

OTHER = "other"
"""Value of each label of the cell that receives the records of all label sets beyond ``max_cells``."""


class Kind(StrEnum):
    """Kind of a stat. The kind determines the default aggregations and how sinks export the stat."""

    COUNTER = "counter"
    """Increments of a total that only increases."""
    GAUGE = "gauge"
    """Readings of a value that can go up and down."""
    STAT = "stat"
    """Samples, such as losses."""
    HISTOGRAM = "histogram"
    """Samples for which quantiles are computed, such as durations."""


DEFAULT_POLICIES: Mapping[Kind, Policy] = {
    Kind.COUNTER: Policy(aggregations=("sum",)),
    Kind.GAUGE: Policy(aggregations=("value",)),
    Kind.STAT: Policy(aggregations=("count", "mean", "min", "max")),
    Kind.HISTOGRAM: Policy(aggregations=("count", "mean", "max", "p50", "p95", "p99", "histogram")),
}

_logger = logging.getLogger(__name__)
_UNIT = re.compile(r"([a-z][a-z0-9_]*)?")
_TOTALS = re.compile(r"(_total)+$")
_OTHER_NAMES = {"inc", "dec", "observe", "record", "set", "update"}  # of records in other libraries
# https://github.com/prometheus/OpenMetrics/blob/main/specification/OpenMetrics.md#suffixes
_SAMPLE_SUFFIXES: Mapping[Kind, tuple[str, ...]] = {
    Kind.COUNTER: ("_total", "_created"),
    Kind.GAUGE: (),
    Kind.STAT: ("_count", "_sum", "_created"),
    Kind.HISTOGRAM: ("_bucket", "_count", "_sum", "_created"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """Definition of a stat: its name, kind, unit and labels.

    Args:
        name: unique name; dots separate namespaces.
        kind: kind of the stat.
        help: description of the stat in one sentence.
        unit: base unit spelled out, such as seconds; empty for a plain number.
        labels: names of the labels.
        max_cells: maximum number of label sets (combinations of label values). Records with additional label sets are
            added to the cell whose labels are all ``"other"``.
        is_logical: True to save the counter in checkpoints. Pass it for counters that describe the training run rather
            than the process.
        bounds: exponents of 2 of the lowest and highest bucket bound. Sinks with fixed buckets use them.

    Raises:
        InvalidArgumentError: if the name, a label, the unit, ``help`` or ``bounds`` is invalid, if ``max_cells`` is
            below 1, or if ``is_logical`` is True for a stat that is not a counter.
    """

    name: str
    kind: Kind
    help: str = ""
    unit: str = ""
    labels: tuple[str, ...] = ()
    max_cells: int = 256
    is_logical: bool = False
    bounds: tuple[int, int] = (-14, 10)

    def __post_init__(self) -> None:
        check_stat_name("name", self.name)
        if self.kind is Kind.COUNTER and _TOTALS.fullmatch(exposed(self.name)):
            raise InvalidArgumentError("name", self.name, "Name what is counted: Prometheus appends _total")
        object.__setattr__(self, "labels", check_label_names(self.labels))
        if type(self.unit) is not str or not _UNIT.fullmatch(self.unit):
            remedy = "Spell out the base unit in lower case: seconds, bytes, ratio"
            raise InvalidArgumentError("unit", self.unit, remedy)
        check_text("help", self.help)
        check_count("max_cells", self.max_cells)
        is_pair = type(self.bounds) in (tuple, list) and [type(each) for each in self.bounds] == [int, int]
        if not is_pair or self.bounds[0] >= self.bounds[1]:
            remedy = "Pass two whole numbers, the lower one first: (-14, 10) is from 2**-14 to 2**10"
            raise InvalidArgumentError("bounds", self.bounds, remedy)
        if self.is_logical and self.kind is not Kind.COUNTER:
            raise InvalidArgumentError("is_logical", self.is_logical, "Pass it for counters only")

    @property
    def family(self) -> str:
        """Name of the stat's metric family in Prometheus. It ends in the unit. For a counter, it omits ``_total``."""
        name = exposed(self.name)
        if self.kind is Kind.COUNTER:
            name = _TOTALS.sub("", name)
        suffix = f"_{self.unit}" if self.unit else ""
        return name if name.endswith(suffix) else name + suffix

    @property
    def exposed_names(self) -> frozenset[str]:
        """Names of the metric family and its samples in Prometheus. No other stat may use these names."""
        family = self.family
        return frozenset([family, *(family + suffix for suffix in _SAMPLE_SUFFIXES[self.kind])])


class Stat:
    """Metric that records numbers; base class of :class:`Counter`, :class:`Gauge` and :class:`Histogram`.

    Call :meth:`add` to record a number in a stat without labels. If the stat has labels, look up the cell of each label
    set once with :meth:`cell`, store the cell, and call its ``add()``.

    Args:
        overflowed: function that is called with the stat's name when a new cell would exceed ``max_cells``.
    """

    def __init__(
        self, definition: Definition, policy: Policy, progress: Progress, overflowed: Callable[[str], None]
    ) -> None:
        self.definition = definition
        self.name = definition.name
        self.policy = policy
        self._progress = progress
        self._overflowed = overflowed
        self._lock = threading.RLock()
        self._cells: dict[Labels, Cell] = {}
        self._has_rejected = False
        self.add: Callable[[float], None] = self._needs_labels
        self._bind()

    if not TYPE_CHECKING:  # a type checker would otherwise allow any name

        def __getattr__(self, name: str) -> Never:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in _OTHER_NAMES:
                text += f". Call add(value): {self.name!r} is a {self.definition.kind}"
            raise AttributeError(text, name=name, obj=self)

    @property
    def enabled(self) -> bool:
        """True if values are recorded. Check this before computing an expensive value."""
        return self.policy.enabled

    @property
    def cells(self) -> list[Cell]:
        """All cells, one per label set."""
        return list(self._cells.values())

    def cell(self, /, **labels: object) -> Cell:
        """Return the cell for the given label values. The cell is created if it does not exist.

        If the stat already has ``max_cells`` cells, return the cell whose labels are all ``"other"`` instead.

        Raises:
            InvalidArgumentError: if the names in ``labels`` differ from the stat's labels, or a value is not a string,
                a number, an enum member or a path.
        """
        if set(map(type, labels.values())) == {str}:  # fast path for labels in the order of the definition
            found = self._cells.get(tuple(labels.items()))  # type: ignore[arg-type]
            if found is not None:
                return found
        key = order_labels(self.name, self.definition.labels, labels)
        found = self._cells.get(key)
        return self._make(key) if found is None else found

    def remove(self, /, **labels: object) -> None:
        """Remove the cells whose labels match ``labels``. An omitted label matches any value.

        Raises InvalidArgumentError for an unknown label.
        """
        unknown = labels.keys() - set(self.definition.labels)
        if unknown:
            remedy = f"Pass some of the labels {list(self.definition.labels)} of {self.name!r}"
            raise InvalidArgumentError("labels", sorted(unknown), remedy)
        wanted = {(name, encodable(str(value))) for name, value in labels.items()}
        with self._lock:
            for key in [key for key in self._cells if wanted.issubset(key)]:
                del self._cells[key]
            self._bind()

    def time(self, /, **labels: object) -> Timer:
        """Return a context manager and decorator (a :class:`Timer`) that records seconds in the cell of ``labels``."""
        return self.timer(**labels)()

    def timer(self, /, **labels: object) -> Callable[[], Timer]:
        """Return a function that creates timers for the cell of ``labels``. It is faster than :meth:`time`."""
        return partial(Timer, self.cell(**labels).add, self._progress.clock)

    def warn_of_rejected(self, number: int) -> None:
        """Log a warning that ``number`` values were rejected. Only the first call for each stat logs a warning."""
        if not self._has_rejected:
            self._has_rejected = True
            bound = ", 0 or more" if self.definition.kind is Kind.COUNTER else ""
            text = "rejected values are missing in the stat. Record finite numbers%s: stat=%s values=%d"
            _logger.warning(text, bound, self.name, number)

    def configure(self, policy: Policy) -> None:
        """Replace the policy of all cells."""
        with self._lock:
            self.policy = policy
            for cell in self._cells.values():
                cell.configure(policy)

    def end_epoch(self) -> None:
        """Close the windows of cells whose ``is_remote`` is False, if the policy has ``Window(epoch=True)``."""
        for cell in self.cells:
            if not cell.is_remote:
                cell.end_epoch()

    def reset(self) -> None:
        """Discard all records and replace the locks. Called in a forked child, whose parent may have held the locks."""
        self._lock = threading.RLock()
        for cell in self._cells.values():
            cell.reset()

    def _make(self, key: Labels) -> Cell:
        with self._lock:
            is_full = key not in self._cells and len(self._cells) >= self.definition.max_cells
            if is_full:
                key = tuple((name, OTHER) for name, _ in key)
            if key not in self._cells:
                cell = CellKey(self.name, key, self.definition.kind is Kind.COUNTER)
                self._cells[key] = Cell(cell, self.policy, self._progress)
            found = self._cells[key]
        # Outside the lock: the callback takes the registry's lock, whose holder may wait for this stat's lock.
        if is_full:
            self._overflowed(self.name)
        return found

    def _bind(self) -> None:
        if not self.definition.labels:
            # Bind the cell's method to save a call per record.
            self.add = self.cell().add_unlabelled

    def _needs_labels(self, value: float = 1, **labels: object) -> None:
        if labels:
            order_labels(self.name, self.definition.labels, labels)
        call = labelled_call(self.name, shown(labels) or self.definition.labels, value)
        remedy = f"Call {call}: its labels are {list(self.definition.labels)}"
        raise InvalidArgumentError("labels", labels, remedy)


class Counter(Stat):
    """Stat that sums increments. ``add(n)`` adds ``n``, by default 1. Negative values are rejected."""

    add: Callable[..., None]


class Histogram(Stat):
    """Stat that estimates quantiles of samples. :mod:`delta_tracker.monitor.buckets` describes the method."""


class Gauge(Stat):
    """Stat for a value that can go up and down. Sinks that export totals use its newest reading."""

    def set(self, value: float, **labels: object) -> None:
        """Record the current value in the cell of ``labels``."""
        (self.cell(**labels).add if labels else self.add)(value)

    def set_function(self, function: Callable[[], float | None], /, **labels: object) -> None:
        """Set a function that returns the current value, instead of recording values with :meth:`set`.

        The function is called at each collection and at each scrape by Prometheus. :meth:`remove` also removes it.

        Args:
            function: function that returns the current value, or None for no data. It is called in threads of the
                library and must not block. If it raises an exception, the gauge has no data.
            labels: label values of the cell.

        Raises:
            InvalidArgumentError: if the names in ``labels`` differ from the stat's labels, or ``function`` is not
                callable.

        Example:
            >>> from delta_tracker.monitor import Monitor
            >>> gauge = Monitor().gauge("queue.length")
            >>> queue = ["a", "b"]
            >>> gauge.set_function(lambda: len(queue))
            >>> gauge.cells[0].function()
            2
        """
        check_function("function", function, "queue.qsize")
        self.cell(**labels).function = partial(_reading, function)


def _reading(function: Callable[[], float | None]) -> float | None:
    try:
        return function()
    except Exception:  # noqa: BLE001  it may be user code, and a scrape must not fail
        return None


KINDS: Mapping[Kind, type[Stat]] = {
    Kind.COUNTER: Counter,
    Kind.GAUGE: Gauge,
    Kind.STAT: Stat,
    Kind.HISTOGRAM: Histogram,
}
