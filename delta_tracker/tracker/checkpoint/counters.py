"""Figures that each rank keeps a part of, saved with the tracker: torchmetrics metrics and objects that merge.

A saved rank's part goes to exactly one rank at a load, so that the total over all ranks stays what it was, whatever
the world size. Loading the synchronised total on every rank would multiply it, loading rank 0's part would lose the
others'.
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
    """Whatever can say its part, take one over, and make one part of several."""

    def state_dict(self) -> State:
        """This rank's part: field to tensor, or to what JSON can hold. It stays as it is when the object goes on."""

    def merge(self, states: Sequence[State]) -> State:
        """One part that stands for all ``states``, that of an empty object if there are none. Changes nothing."""

    def load_state_dict(self, state: State) -> None:
        """Take a part of :meth:`merge` over, in place of what is there."""


def as_mergeable(name: str, counter: object) -> Mergeable:
    """The object itself, or what makes a torchmetrics metric mergeable.

    Raises:
        InvalidArgumentError: if it is neither mergeable nor a metric whose states are sums, extremes or lists.
    """
    torchmetrics = sys.modules.get("torchmetrics")  # whoever has a metric has imported it
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
    """A torchmetrics metric. Its own ``state_dict`` leaves states out unless they are persistent.

    Args:
        name: what it is registered as.
        metric: the metric.

    Raises:
        InvalidArgumentError: for a state that is not a sum, a maximum, a minimum or a concatenation over ranks, and
            for a metric that is made of others.
    """

    def __init__(self, name: str, metric: Any) -> None:  # noqa: ANN401  torchmetrics is not imported here
        if any(hasattr(each, "_reductions") for each in metric.modules() if each is not metric):
            raise InvalidArgumentError(name, metric, "Register the metrics that it is made of: they hold its states")
        self._name = name
        self._metric = metric
        self._reductions = {}
        for field, reduction in metric._reductions.items():  # noqa: SLF001  there is no other way to them
            found = _REDUCTIONS.get(getattr(reduction, "__name__", ""))
            if found is None:
                remedy = (
                    f"Its state {field!r} must be reduced by sum, max, min or cat: of a mean nobody knows how many "
                    "values each rank saw, so keep a sum and a count instead"
                )
                raise InvalidArgumentError(name, metric, remedy)
            self._reductions[field] = found

    def state_dict(self) -> State:
        """Every state that is not an empty list, and how often the metric was updated."""
        held = {field: getattr(self._metric, field) for field in self._reductions}
        states = {
            field: self._reductions[field](value) if isinstance(value, list) else value.clone()
            for field, value in held.items()
            if not isinstance(value, list) or value
        }
        return {**states, _COUNT: self._metric._update_count}  # noqa: SLF001

    def merge(self, states: Sequence[State]) -> State:
        """As the metric itself would reduce them over ranks; its defaults for no states."""
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
                    raise MalformedStateError(self._name, f"its parts do not fit together: {error}") from error
        return merged

    def load_state_dict(self, state: State) -> None:
        """Take the states over, each on the metric's device."""
        metric = self._metric
        metric.reset()
        for field in self._reductions:
            default = metric._defaults[field]  # noqa: SLF001
            if field in state:
                value = state[field].to(metric.device)
                setattr(metric, field, [value] if isinstance(default, list) else value)
        metric._update_count = state[_COUNT]  # noqa: SLF001


def loaders(counters: Mapping[str, Mergeable], states: Mapping[str, Sequence[State]]) -> list[Callable[[], None]]:
    """Merge every counter's parts; nothing is changed before the results are called.

    Raises:
        MalformedStateError: if a counter cannot merge its parts.
    """
    return [partial(counter.load_state_dict, counter.merge(states[name])) for name, counter in counters.items()]
