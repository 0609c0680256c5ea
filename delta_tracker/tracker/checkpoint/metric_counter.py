"""Torchmetrics metrics as counters of a checkpoint: :class:`MetricCounter`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from delta_tracker.errors import CheckpointError, InvalidArgumentError
from delta_tracker.tracker.checkpoint.rank_header import digest

State = Mapping[str, Any]
Kind = Mapping[str, Any]

_REDUCTIONS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "dim_zero_sum": lambda parts: torch.stack(parts).sum(dim=0, dtype=parts[0].dtype),
    "dim_zero_max": lambda parts: torch.stack(parts).amax(dim=0),
    "dim_zero_min": lambda parts: torch.stack(parts).amin(dim=0),
    "dim_zero_cat": lambda parts: torch.cat([part.reshape(1) if part.dim() == 0 else part for part in parts]),
}
_COUNT = "_update_count"


class MetricCounter:
    """Wrapper that makes a torchmetrics metric a :class:`~delta_tracker.tracker.checkpoint.counters.Mergeable`.

    The metric's own ``state_dict`` is not used, because it omits states that are not persistent. Buffers that are not
    states are not saved. Their contents at registration are part of the kind, because the meaning of the states may
    depend on them, as it does on thresholds.

    Args:
        name: name of the counter, for error messages.
        metric: the metric, which contains no other metric.

    Attributes:
        unmerged: name of each state that cannot be merged, to the name of its reduction.
        kind: class of the metric, and the reductions, default shapes and buffers that its states depend on. The buffers
            are those at registration.
    """

    def __init__(self, name: str, metric: Any) -> None:  # noqa: ANN401  torchmetrics is not imported here
        self._name = name
        self._metric = metric
        self._fields: dict[str, str] = {
            field: _reduction_name(reduction)
            for field, reduction in metric._reductions.items()  # noqa: SLF001  torchmetrics has no public access
        }
        self.unmerged = {field: each for field, each in self._fields.items() if each not in _REDUCTIONS}
        self.kind = self._current_kind()  # not taken later: an update may change a buffer

    def state_dict(self) -> State:
        """Return copies of the metric's states by name, together with the number of updates.

        A list that is reduced becomes one tensor, and is omitted if it is empty. Any other list becomes its length and
        a field for each tensor.

        Raises:
            InvalidArgumentError: if the metric has the states of all ranks, or a list contains anything but tensors.
        """
        self._check_unsynced()
        found: dict[str, Any] = {}
        for field, reduction in self._fields.items():
            value = getattr(self._metric, field)
            if not isinstance(value, list):
                found[field] = value.clone()
                continue
            if any(not isinstance(each, Tensor) for each in value):
                raise InvalidArgumentError(self._name, field, "Keep only tensors in the lists of a registered metric")
            if reduction not in _REDUCTIONS:
                found[f"{field}.length"] = len(value)
                found |= {f"{field}.{place}": each.clone() for place, each in enumerate(value)}
            elif value:
                found[field] = _REDUCTIONS[reduction](value)
        return {**found, _COUNT: self._metric._update_count}  # noqa: SLF001

    def merge(self, states: Sequence[State]) -> State:
        """Merge ``states`` with the reductions that the metric itself applies across ranks.

        Returns the metric's default state if ``states`` is empty.

        Raises:
            CheckpointError: if the states cannot be reduced.
        """
        if self.unmerged and len(states) > 1:
            raise CheckpointError(self._name, f"the states {sorted(self.unmerged)} of several ranks have no sum")
        merged: dict[str, Any] = {_COUNT: sum(state[_COUNT] for state in states)}
        for field, reduction in self._fields.items():
            if reduction not in _REDUCTIONS:
                merged |= self._only(field, states)
                continue
            parts = [state[field] for state in states if field in state]
            if not parts and self._default_shape(field) is not None:
                parts = [self._default(field)]
            if parts:
                try:
                    merged[field] = _REDUCTIONS[reduction](parts)
                except (RuntimeError, TypeError) as error:
                    raise CheckpointError(self._name, f"its states cannot be merged: {error}") from error
        return merged

    def new_state(self, layouts: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> State:
        """Return the state of a metric without updates, for a rank that loads no part.

        A list that is concatenated across ranks gets an empty tensor if another rank has tensors in it: torchmetrics
        gathers the lists of all ranks tensor by tensor, and would wait for ever for a rank with an empty list.

        Args:
            layouts: name of each saved tensor of the metric to its dtype and shape, in any of the parts.
        """
        lists = [field for field, each in self._fields.items() if each == "dim_zero_cat" and field in layouts]
        empty = {field: torch.empty((0, *layouts[field][1][1:]), dtype=layouts[field][0]) for field in lists}
        return {
            **self.merge([]),
            **{field: each for field, each in empty.items() if self._default_shape(field) is None},
        }

    def load_state_dict(self, state: State) -> None:
        """Replace the metric's states and number of updates with those in ``state``.

        Tensors are moved to the metric's device. Metric states that are missing in ``state`` are reset.

        Raises:
            InvalidArgumentError: if the metric has the states of all ranks.
        """
        self._check_unsynced()  # otherwise `unsync()` would bring back the states before the load
        metric = self._metric
        metric.reset()
        for field in self._fields:
            if f"{field}.length" in state:
                pieces = [state[f"{field}.{place}"] for place in range(state[f"{field}.length"])]
                setattr(metric, field, [each.to(metric.device) for each in pieces])
            elif field in state:
                value = state[field].to(metric.device)
                setattr(metric, field, value if self._default_shape(field) is not None else [value])
        metric._update_count = state[_COUNT]  # noqa: SLF001

    def check_fields(self, fields: Mapping[str, object]) -> None:
        """Check the fields of a saved state.

        Args:
            fields: name of each saved field to its value, or to its shape if it is a tensor.

        Raises:
            CheckpointError: if a field is missing, unknown or invalid.
        """
        lists = {field for field in self._fields if self._default_shape(field) is None}
        expected = {_COUNT, *self._fields} - lists
        for field in lists:
            length = fields.get(f"{field}.length", 0)
            if field in self.unmerged and type(length) is int and length >= 0:
                if length > len(fields):  # checked first: a damaged length can be too large for a set
                    problem = f"its list {field!r} has {length} tensors, but it has {len(fields)} fields"
                    raise CheckpointError(self._name, problem)
                expected |= {f"{field}.length", *(f"{field}.{place}" for place in range(length))}
            elif field in fields:
                expected.add(field)
        tensors = {field for field in expected if field != _COUNT and not field.endswith(".length")}
        if set(fields) != expected or not _is_count(fields[_COUNT]):
            raise CheckpointError(self._name, f"it has the fields {sorted(fields)}, not {sorted(expected)}")
        if strange := sorted(field for field in tensors if not isinstance(fields[field], tuple)):
            raise CheckpointError(self._name, f"the fields {strange} are not tensors")

    def _check_unsynced(self) -> None:
        if self._metric._is_synced:  # noqa: SLF001
            remedy = "Call its unsync() first: now it has the states of all ranks, which would be counted on every rank"
            raise InvalidArgumentError(self._name, "a synchronized metric", remedy)

    def _only(self, field: str, states: Sequence[State]) -> State:
        """Return the fields of a state that cannot be merged, from the only one of ``states``, or the default."""
        if states:
            return {name: each for name, each in states[0].items() if name == field or name.startswith(f"{field}.")}
        return {f"{field}.length": 0} if self._default_shape(field) is None else {field: self._default(field)}

    def _current_kind(self) -> Kind:
        buffers = {
            name: [str(buffer.dtype), list(buffer.shape), digest(buffer)]
            for name, buffer in self._metric.named_buffers(recurse=False)
            if name not in self._fields
        }
        states = {field: [reduction, self._default_shape(field)] for field, reduction in self._fields.items()}
        return {"class": type(self._metric).__name__, "states": states, "buffers": buffers}

    def _default(self, field: str) -> Tensor:
        found: Tensor = self._metric._defaults[field].detach().cpu().clone()  # noqa: SLF001
        return found

    def _default_shape(self, field: str) -> list[int] | None:
        """Return the default shape of a state; None for a list."""
        default = self._metric._defaults[field]  # noqa: SLF001
        return None if isinstance(default, list) else list(default.shape)


def _reduction_name(reduction: object) -> str:
    """Return the name of a state's reduction, which is the same in every process.

    A function has its own name, and a callable object has that of its class. The name of a partial includes its
    arguments; an argument that is not a JSON value is replaced by its name in the same way.
    """
    if reduction is None:
        return "None"
    if isinstance(reduction, partial):
        arguments = [list(reduction.args), dict(sorted(reduction.keywords.items()))]
        text = json.dumps(arguments, default=_reduction_name, skipkeys=True)
        return f"partial({_reduction_name(reduction.func)}, {text})"
    name = getattr(reduction, "__name__", None)
    return name if isinstance(name, str) else type(reduction).__qualname__


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0
