"""Per-rank counters that are saved with the tracker: torchmetrics metrics and other mergeable objects.

The state that one rank saved is loaded by exactly one rank, so that the total over all ranks is the same at any world
size. Loading the synchronized total on every rank would multiply the total. Loading only rank 0's state would lose the
counts of the other ranks.
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
    """Interface of a counter whose state can be saved, merged with the states of other ranks, and loaded."""

    def state_dict(self) -> State:
        """Return a copy of this rank's state, a mapping from field name to tensor or JSON value."""

    def merge(self, states: Sequence[State]) -> State:
        """Return one state that combines ``states``, without changing this object.

        Returns the state of a new counter if ``states`` is empty.
        """

    def load_state_dict(self, state: State) -> None:
        """Replace the object's state with ``state``, which :meth:`merge` returned."""


def as_mergeable(name: str, counter: object) -> Mergeable:
    """Return ``counter`` as a :class:`Mergeable`. A torchmetrics metric is wrapped.

    Args:
        name: name of the counter, for error messages.
        counter: the object that the user registers.

    Raises:
        InvalidArgumentError: if ``counter`` is neither a metric nor a :class:`Mergeable`, or is a metric that contains
            other metrics or has a state that is not reduced by sum, max, min or cat.
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
    """Wrapper that makes a torchmetrics metric a :class:`Mergeable`.

    The metric's own ``state_dict`` is not used, because it omits states that are not persistent.

    Args:
        name: name of the counter, for error messages.
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
        """Return copies of the metric's states by name, together with the number of updates.

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
        """Merge ``states`` with the reductions that the metric itself applies across ranks.

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
        """Replace the metric's states and number of updates with those in ``state``.

        Tensors are moved to the metric's device. Metric states that are missing in ``state`` are reset.
        """
        metric = self._metric
        metric.reset()
        for field in self._reductions:
            default = metric._defaults[field]  # noqa: SLF001
            if field in state:
                value = state[field].to(metric.device)
                setattr(metric, field, [value] if isinstance(default, list) else value)
        metric._update_count = state[_COUNT]  # noqa: SLF001


def loaders(counters: Mapping[str, Mergeable], states: Mapping[str, Sequence[State]]) -> list[Callable[[], None]]:
    """Merge the saved states of each counter. Return one function per counter, which loads the merged state.

    No counter changes until its function is called.

    Args:
        counters: counter name to counter.
        states: counter name to the saved states to merge. Must contain every name in ``counters``.

    Raises:
        MalformedStateError: if the states of a counter cannot be merged.
    """
    return [partial(counter.load_state_dict, counter.merge(states[name])) for name, counter in counters.items()]
