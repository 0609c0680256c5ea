"""Stats: what is measured, under a name, with a help text, a unit and labels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor.clock import Progress
from delta_tracker.monitor.names import Labels, check_label_names, check_name, check_unit, order_labels
from delta_tracker.monitor.policy import Policy
from delta_tracker.monitor.series import Cell
from delta_tracker.monitor.timer import Timer

OTHER = "other"
"""The value of every label of the cell that takes what a stat has no more cells for."""


class Kind(StrEnum):
    """What a stat's numbers mean."""

    COUNTER = "counter"
    """Increments of something that only grows."""
    GAUGE = "gauge"
    """Readings of something that goes up and down."""
    STAT = "stat"
    """Samples, such as losses."""
    HISTOGRAM = "histogram"
    """Samples of which quantiles are wanted, such as durations."""


DEFAULT_AGGREGATIONS: Mapping[Kind, tuple[str, ...]] = {
    Kind.COUNTER: ("sum",),
    Kind.GAUGE: ("value",),
    Kind.STAT: ("count", "mean", "min", "max"),
    Kind.HISTOGRAM: ("count", "mean", "max", "p50", "p95", "p99", "histogram"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """What is known of a stat before anything is recorded.

    Args:
        name: unique in a registry; dots make namespaces.
        kind: what its numbers mean.
        help: one sentence for whoever sees the number.
        unit: base unit written out, such as seconds; empty for a plain number.
        labels: names of its labels.
        max_cells: how many different sets of label values it may have; what comes later is recorded as "other".
        is_logical: it counts something of the training run, not of the process, so it belongs in a checkpoint.
        bounds: lowest and highest exponent of 2 for sinks that need fixed bucket bounds.

    Raises:
        InvalidArgumentError: for a malformed name, label or unit, or a bound on cells below 1.
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
        check_name("name", self.name)
        object.__setattr__(self, "labels", check_label_names(self.labels))
        check_unit(self.unit)
        if type(self.max_cells) is not int or self.max_cells < 1:
            raise InvalidArgumentError("max_cells", self.max_cells, "Pass a whole number of 1 or more")
        if self.is_logical and self.kind is not Kind.COUNTER:
            raise InvalidArgumentError("is_logical", self.is_logical, "Only a counter can be restored")


@dataclass(slots=True)
class Hooks:
    """What a stat tells its registry.

    Args:
        overflowed: called with a stat's name for each set of labels that got no cell of its own.
    """

    overflowed: Callable[[str], None] = field(default=lambda _: None)


class Stat:
    """Numbers under one name. :class:`Counter`, :class:`Gauge` and :class:`Histogram` are kinds of it.

    Without labels call :meth:`add`. With labels, get the cell once with :meth:`cell` and keep it: that is the fast way.

    Args:
        definition: what it is.
        policy: what is made of its records.
        progress: clock and step.
        hooks: who is told of overflows.
    """

    def __init__(self, definition: Definition, policy: Policy, progress: Progress, hooks: Hooks | None = None) -> None:
        self.definition = definition
        self._policy = policy
        self._progress = progress
        self._hooks = hooks or Hooks()
        self._lock = threading.RLock()
        self._cells: dict[Labels, Cell] = {}
        self.add: Callable[[float], None] = self._needs_labels
        self._bind()

    @property
    def name(self) -> str:
        """Its name."""
        return self.definition.name

    @property
    def policy(self) -> Policy:
        """What is made of its records."""
        return self._policy

    @property
    def enabled(self) -> bool:
        """Whether records are taken. Ask before computing something only to record it."""
        return self._policy.enabled

    @property
    def cells(self) -> list[Cell]:
        """Its cells; each has its labels."""
        return list(self._cells.values())

    def cell(self, **labels: object) -> Cell:
        """The cell of a set of label values, made at the first call.

        Beyond ``max_cells`` sets, the one whose labels are all ``"other"``.

        Raises:
            InvalidArgumentError: if other labels are given than the stat has.
        """
        if set(map(type, labels.values())) == {str}:  # it is found then, where the order is that of the definition
            found = self._cells.get(tuple(labels.items()))  # type: ignore[arg-type]
            if found is not None:
                return found
        key = order_labels(self.name, self.definition.labels, labels)
        found = self._cells.get(key)
        return self._make(key) if found is None else found

    def remove(self, **labels: object) -> None:
        """Forget the cells with these label values, such as a consumer's that is gone; none is no error.

        Args:
            labels: label values; a label that is left out may have any value.

        Raises:
            InvalidArgumentError: for a label that the stat does not have.
        """
        unknown = labels.keys() - set(self.definition.labels)
        if unknown:
            remedy = f"{self.name!r} has the labels {list(self.definition.labels)}"
            raise InvalidArgumentError("labels", sorted(unknown), remedy)
        wanted = {(name, str(value)) for name, value in labels.items()}
        with self._lock:
            for key in [key for key in self._cells if wanted.issubset(key)]:
                del self._cells[key]
            self._bind()

    def time(self, **labels: object) -> Timer:
        """A context manager and decorator that records the seconds between its begin and end."""
        return self.timer(**labels)()

    def timer(self, **labels: object) -> Callable[[], Timer]:
        """Return a function that makes what :meth:`time` returns, without looking the cell up again."""
        return partial(Timer, self.cell(**labels).add, self._progress.clock)

    def configure(self, policy: Policy) -> None:
        """Follow another policy from now on."""
        with self._lock:
            self._policy = policy
            for cell in self._cells.values():
                cell.configure(policy)

    def end_epoch(self) -> None:
        """Close the windows that end with the epoch."""
        for cell in self.cells:
            if not cell.is_remote:
                cell.end_epoch()

    def reset(self) -> None:
        """Forget everything, locks too; for a process that was forked."""
        self._lock = threading.RLock()
        for cell in self._cells.values():
            cell.reset()

    def _make(self, key: Labels) -> Cell:
        with self._lock:
            is_full = key not in self._cells and len(self._cells) >= self.definition.max_cells
            if is_full:
                key = tuple((name, OTHER) for name, _ in key)
            if key not in self._cells:
                is_counter = self.definition.kind is Kind.COUNTER
                self._cells[key] = Cell(key, self._policy, self._progress, is_counter=is_counter)
            found = self._cells[key]
        # Without the lock: the registry is asked, and it locks stats while others wait for it.
        if is_full:
            self._hooks.overflowed(self.name)
        return found

    def _bind(self) -> None:
        if not self.definition.labels:
            # The cell's own method: one call less for each record.
            self.add = self.cell().add

    def _needs_labels(self, value: float = 1) -> None:
        del value
        raise InvalidArgumentError("labels", {}, f"Keep {self.name}.cell({', '.join(self.definition.labels)}) and add")


class Counter(Stat):
    """Something that only grows. ``add(n)`` adds ``n``, which is 1 if not given; negative ones are rejected."""

    add: Callable[..., None]


class Histogram(Stat):
    """Samples of which quantiles are wanted, with a stated error: see :mod:`delta_tracker.monitor.buckets`."""


class Gauge(Stat):
    """Something that goes up and down; the newest reading counts, also after windows without one."""

    def set(self, value: float, **labels: object) -> None:
        """Record a reading."""
        (self.cell(**labels).add if labels else self.add)(value)


KINDS: Mapping[Kind, type[Stat]] = {
    Kind.COUNTER: Counter,
    Kind.GAUGE: Gauge,
    Kind.STAT: Stat,
    Kind.HISTOGRAM: Histogram,
}
