"""Per-rank counters that are saved with the tracker: torchmetrics metrics and other mergeable objects.

Each saved rank's state is loaded by exactly one rank, so that the total over all ranks is preserved at any world size.
Loading the synchronised total on every rank would multiply the total. Loading only rank 0's state would lose the counts
of the other ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from delta_tracker.errors import InvalidArgumentError, MalformedStateError

State = Mapping[str, Any]


@runtime_checkable
class Mergeable(Protocol):
    """Counter whose states can be saved, merged and loaded."""

    def state_dict(self) -> State:
        """Return a copy of this rank's state, a mapping from field name to tensor or JSON value."""

    def merge(self, states: Sequence[State]) -> State:
        """Return the merged state of ``states``, or an initial state if it is empty. Does not change the object."""

    def load_state_dict(self, state: State) -> None:
        """Replace the object's state with ``state``, which :meth:`merge` returned."""


def as_mergeable(name: str, counter: object) -> Mergeable:
    """Return ``counter``, wrapped if it is a torchmetrics metric.

    Args:
        name: name of the counter, for errors.
        counter: the object that the user registers.

    Raises:
        InvalidArgumentError: if it is neither mergeable nor a metric whose states are reduced by sum, max, min or cat.
    """
    torchmetrics = sys.modules.get("torchmetrics")  # already imported if the caller has a metric
    if torchmetrics is not None and isinstance(counter, torchmetrics.Metric):
        return _Metric(name, counter)
    if isinstance(counter, Mergeable):
        return counter
    remedy = "Register a torchmetrics.Metric, or an object with state_dict, merge and load_state_dict"
    raise InvalidArgumentError(name, counter, remedy)


_REDUCTIONS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "dim_zero_sum": lambda parts: torch.stack(parts).sum(dim=0, dtype=parts[0].dtype),
    "dim_zero_max": lambda parts: torch.stack(parts).amax(dim=0),
    "dim_zero_min": lambda parts: torch.stack(parts).amin(dim=0),
    "dim_zero_cat": lambda parts: torch.cat([part.reshape(1) if part.dim() == 0 else part for part in parts]),
}
_COUNT = "_update_count"


class _Metric:
    """Mergeable wrapper of a torchmetrics metric.

    Needed because the metric's own ``state_dict`` omits states that are not persistent.

    Args:
        name: name of the counter, for errors.
        metric: the metric.

    Raises:
        InvalidArgumentError: if a state is not reduced by sum, max, min or cat, or the metric contains other metrics.
    """

    def __init__(self, name: str, metric: Any) -> None:  # noqa: ANN401  torchmetrics is not imported here
        if any(hasattr(each, "_reductions") for each in metric.modules() if each is not metric):
            raise InvalidArgumentError(name, metric, "Register the metrics that it contains: they hold its states")
        self._name = name
        self._metric = metric
        self._reductions = {}
        for field, reduction in metric._reductions.items():  # noqa: SLF001  torchmetrics has no public access
            found = _REDUCTIONS.get(getattr(reduction, "__name__", ""))
            if found is None:
                remedy = (
                    f"Its state {field!r} must be reduced by sum, max, min or cat. Instead of a mean, keep a sum and a "
                    "count, because the number of values per rank is unknown"
                )
                raise InvalidArgumentError(name, metric, remedy)
            self._reductions[field] = found

    def state_dict(self) -> State:
        """Return a copy of the metric's states, and its number of updates.

        A state that is a list is reduced to one tensor. An empty list is omitted.
        """
        held = {field: getattr(self._metric, field) for field in self._reductions}
        states = {
            field: self._reductions[field](value) if isinstance(value, list) else value.clone()
            for field, value in held.items()
            if not isinstance(value, list) or value
        }
        return {**states, _COUNT: self._metric._update_count}  # noqa: SLF001

    def merge(self, states: Sequence[State]) -> State:
        """Merge ``states`` with the metric's own reductions over ranks.

        Returns the metric's default state if ``states`` is empty.

        Raises:
            MalformedStateError: if the states cannot be reduced.
        """
        merged: dict[str, Any] = {_COUNT: sum(state[_COUNT] for state in states)}
        for field, reduce in self._reductions.items():
            parts = [state[field] for state in states if field in state]
            default = self._metric._defaults[field]  # noqa: SLF001
            if not parts and not isinstance(default, list):
                parts = [default.detach().cpu().clone()]
            if parts:
                try:
                    merged[field] = reduce(parts)
                except (RuntimeError, TypeError) as error:
                    raise MalformedStateError(self._name, f"its states cannot be merged: {error}") from error
        return merged

    def load_state_dict(self, state: State) -> None:
        """Reset the metric, and set its states from ``state`` after moving them to the metric's device."""
        metric = self._metric
        metric.reset()
        for field in self._reductions:
            default = metric._defaults[field]  # noqa: SLF001
            if field in state:
                value = state[field].to(metric.device)
                setattr(metric, field, [value] if isinstance(default, list) else value)
        metric._update_count = state[_COUNT]  # noqa: SLF001


def loaders(counters: Mapping[str, Mergeable], states: Mapping[str, Sequence[State]]) -> list[Callable[[], None]]:
    """Merge the states of every counter and return functions that load the results.

    No counter changes until these functions are called.

    Args:
        counters: name to counter.
        states: name of each counter to the saved states to merge.

    Raises:
        MalformedStateError: if the states of a counter cannot be merged.
    """
    return [partial(counter.load_state_dict, counter.merge(states[name])) for name, counter in counters.items()]
