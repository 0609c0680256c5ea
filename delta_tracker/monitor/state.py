"""Save logical counters in checkpoints, and restore them at any world size. Sums over all ranks are preserved.

A logical counter is defined with ``is_logical=True``. It describes the training run. All other counters describe the
process. They are not saved, and each process counts from 0.

Register :class:`LogicalCounters` with a tracker to save the counters with its state. Without a tracker, use
:class:`~delta_tracker.tracker.checkpoint.rank_counters.RankCounters`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, convert

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor.library import DEFINITIONS
from delta_tracker.monitor.monitor import MONITOR, Monitor
from delta_tracker.monitor.stat import Kind, Stat

_FORMAT = "totals by label values"

# int first, so that integers are not converted to floats.
_Total = Annotated[int, Meta(ge=0)] | Annotated[float, Meta(ge=0)]
Totals = dict[str, list[tuple[list[str], _Total]]]
"""Totals of counters: a list of (label values, total) pairs for each counter name."""


class LogicalCounters:
    """Adapter that saves a monitor's logical counters. Pass it to ``ModelDeltaTracker.register_counter()``.

    Each rank saves its counters. When a checkpoint is loaded, each saved state is restored on exactly one rank.
    """

    def __init__(self, monitor: Monitor = MONITOR) -> None:
        self._monitor = monitor

    def state_dict(self) -> dict[str, Totals]:
        """Return the nonzero totals of this rank's logical counters as JSON-compatible values."""
        found: Totals = {}
        for stat in self._counters():
            cells = [([value for _, value in cell.labels], cell.collect_total()) for cell in stat.cells]
            found[stat.name] = [(values, total) for values, total in cells if total]
        return {_FORMAT: found}

    def merge(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Totals]:
        """Merge states of several ranks into one state, which contains the sums of their totals.

        Raises InvalidArgumentError if a state is malformed, or a counter was saved with a different number of labels.
        """
        merged: Totals = {}
        for (name, values), total in self._summed(states).items():
            merged.setdefault(name, []).append((list(values), total))
        return {_FORMAT: merged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the logical counters to the totals in ``state``.

        Counters that ``state`` does not contain are set to 0. Define custom counters before the call: totals of
        undefined counters are ignored. Built-in counters are defined automatically.

        Raises:
            InvalidArgumentError: if the state is malformed, or a counter was saved with a different number of labels.
                Nothing is restored.
        """
        summed = self._summed([state])
        stats = {stat.name: stat for stat in self._counters()}
        for stat in stats.values():
            for cell in stat.cells:
                cell.restore(summed.pop((stat.name, tuple(value for _, value in cell.labels)), 0))
        for (name, values), total in summed.items():
            if name in stats:
                cell = stats[name].cell(**dict(zip(stats[name].definition.labels, values, strict=True)))
                cell.restore(cell.collect_total() + total)  # beyond max_cells, several label sets share a cell

    def _summed(self, states: Iterable[Mapping[str, Any]]) -> dict[tuple[str, tuple[str, ...]], float]:
        """Return the sum over ``states`` for each cell, by counter name and label values. Defines built-in counters."""
        summed: dict[tuple[str, tuple[str, ...]], float] = {}
        for part in map(_parsed, states):
            for name, cells in part.items():
                for values, total in cells:
                    summed[name, tuple(values)] = summed.get((name, tuple(values)), 0) + total
        # Built-in counters are otherwise registered at their first use, which is after a load.
        for definition in DEFINITIONS.values():
            if any(name == definition.name for name, _ in summed):
                self._monitor.registry.define(definition)
        labels = {stat.name: stat.definition.labels for stat in self._counters()}
        for name, label_values in summed:
            if name in labels and len(label_values) != len(labels[name]):
                remedy = f"Use the labels it was saved with: the counter has {list(labels[name])}"
                raise InvalidArgumentError("labels", (name, label_values), remedy)
        return summed

    def _counters(self) -> list[Stat]:
        return [stat for stat in self._monitor.find(kind=Kind.COUNTER) if stat.definition.is_logical]


def _parsed(saved: Any) -> Totals:  # noqa: ANN401  untrusted data from a checkpoint
    """Return the totals of a saved state. Raise InvalidArgumentError if the state is malformed."""
    try:
        return convert(saved[_FORMAT], Totals)
    except (ValueError, TypeError, KeyError) as error:
        remedy = "Load a checkpoint that this library saved: this state is not in the counters' format"
        raise InvalidArgumentError("state", str(saved)[:40], remedy) from error
