"""Per-rank counters that are saved with the tracker: torchmetrics metrics and other mergeable objects.

Each state that a rank saved is loaded by exactly one rank. The total over all ranks is therefore the same at any world
size. States whose reduction is not sum, max, min or cat cannot be merged. They require an unchanged world size.

The header of a part (the saved state of one rank) contains the *kind* of each counter: a JSON object that describes the
registered counter. Loading first compares the saved kind with the kind of the counter to load.
"""

import copy
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from delta_tracker.errors import CheckpointError, InvalidArgumentError, StateMismatchError
from delta_tracker.tracker.checkpoint.part import RankHeader, digest

State = Mapping[str, Any]
Kind = Mapping[str, Any]

_REDUCTIONS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "dim_zero_sum": lambda parts: torch.stack(parts).sum(dim=0, dtype=parts[0].dtype),
    "dim_zero_max": lambda parts: torch.stack(parts).amax(dim=0),
    "dim_zero_min": lambda parts: torch.stack(parts).amin(dim=0),
    "dim_zero_cat": lambda parts: torch.cat([part.reshape(1) if part.dim() == 0 else part for part in parts]),
}
_COUNT = "_update_count"


@runtime_checkable
class Mergeable(Protocol):
    """Interface of a counter whose state can be saved, merged with the states of other ranks, and loaded.

    Loading calls :meth:`merge` before it changes any counter. :meth:`merge` must raise an error if an incompatible
    counter saved one of the states.
    """

    def state_dict(self) -> State:
        """Return a copy of this rank's state, a mapping from field name to tensor or JSON value."""

    def merge(self, states: Sequence[State]) -> State:
        """Return one state that combines ``states``, or the state of a new counter if there are none.

        Must have no side effects.
        """

    def load_state_dict(self, state: State) -> None:
        """Replace the counter's state with ``state``, a result of :meth:`merge`."""


class MetricCounter:
    """Adapter that implements :class:`Mergeable` for a torchmetrics metric.

    Unlike the ``state_dict`` of the metric, this class also saves states that are not persistent. It does not save
    buffers that are not states, such as thresholds, but :attr:`kind` contains a digest of each of these buffers.

    Args:
        name: name of the counter, for error messages.
        metric: metric that contains no other metric.

    Attributes:
        unmerged: reduction of each state that cannot be merged, by state name.
        kind: class of the metric, reductions and default shapes of its states, and digests of its other buffers.
    """

    def __init__(self, name: str, metric: Any) -> None:  # noqa: ANN401  torchmetrics is not imported here
        self._name = name
        self._metric = metric
        self._fields: dict[str, str] = {
            field: _reduction_name(reduction)
            for field, reduction in metric._reductions.items()  # noqa: SLF001  torchmetrics has no public access
        }
        self.unmerged = {field: each for field, each in self._fields.items() if each not in _REDUCTIONS}
        buffers = {
            name: [str(buffer.dtype), list(buffer.shape), digest(buffer)]
            for name, buffer in metric.named_buffers(recurse=False)
            if name not in self._fields
        }
        states = {field: [reduction, self._default_shape(field)] for field, reduction in self._fields.items()}
        # Not taken later: an update may change a buffer.
        self.kind: Kind = {"class": type(metric).__name__, "states": states, "buffers": buffers}

    def state_dict(self) -> State:
        """Return copies of the metric's states by name, together with the number of updates.

        A list state that can be merged is returned as one tensor, and is omitted if it is empty. Any other list state
        is returned as its length and one field per tensor. Raises InvalidArgumentError if the metric is synchronized
        (contains the merged states of all ranks), or if a list contains a value that is not a tensor.
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
                found |= {f"{field}.{index}": each.clone() for index, each in enumerate(value)}
            elif value:
                found[field] = _REDUCTIONS[reduction](value)
        return {**found, _COUNT: self._metric._update_count}  # noqa: SLF001

    def merge(self, states: Sequence[State]) -> State:
        """Return one state that combines ``states`` with the metric's reductions.

        If ``states`` is empty, returns the default state. Raises CheckpointError if the states cannot be merged.
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

        ``layouts`` contains the dtype and shape of each saved tensor, by field name. A concatenated list that other
        ranks load is returned as an empty tensor: torchmetrics blocks forever if a list is empty on some ranks only.
        """
        lists = [field for field, each in self._fields.items() if each == "dim_zero_cat" and field in layouts]
        kinds = [(field, *layouts[field]) for field in lists]
        empty = {field: torch.empty((0, *shape[1:]), dtype=dtype, device="cpu") for field, dtype, shape in kinds}
        return {
            **self.merge([]),
            **{field: each for field, each in empty.items() if self._default_shape(field) is None},
        }

    def load_state_dict(self, state: State) -> None:
        """Replace the metric's states and number of updates with the values in ``state``.

        Tensors are moved to the metric's device. States that are missing in ``state`` are reset. Raises
        InvalidArgumentError if the metric is synchronized (contains the merged states of all ranks).
        """
        self._check_unsynced()  # otherwise `unsync()` would bring back the states before the load
        metric = self._metric
        metric.reset()
        for field in self._fields:
            if f"{field}.length" in state:
                pieces = [state[f"{field}.{index}"] for index in range(state[f"{field}.length"])]
                setattr(metric, field, [each.to(metric.device) for each in pieces])
            elif field in state:
                value = state[field].to(metric.device)
                setattr(metric, field, value if self._default_shape(field) is not None else [value])
        metric._update_count = state[_COUNT]  # noqa: SLF001

    def check_fields(self, fields: Mapping[str, object]) -> None:
        """Raise CheckpointError if a field of a saved state is missing, unknown or invalid.

        ``fields`` maps the name of each saved field to its value, or to its shape if the value is a tensor.
        """
        lists = {field for field in self._fields if self._default_shape(field) is None}
        expected = {_COUNT, *self._fields} - lists
        for field in lists:
            length = fields.get(f"{field}.length", 0)
            if field in self.unmerged and type(length) is int and length >= 0:
                if length > len(fields):  # checked first: a damaged length can be too large for a set
                    problem = f"its list {field!r} has {length} tensors, but it has {len(fields)} fields"
                    raise CheckpointError(self._name, problem)
                expected |= {f"{field}.length", *(f"{field}.{index}" for index in range(length))}
            elif field in fields:
                expected.add(field)
        tensors = {field for field in expected if field != _COUNT and not field.endswith(".length")}
        count = fields.get(_COUNT)
        if set(fields) != expected or type(count) is not int or count < 0:
            raise CheckpointError(self._name, f"it has the fields {sorted(fields)}, not {sorted(expected)}")
        if strange := sorted(field for field in tensors if not isinstance(fields[field], tuple)):
            raise CheckpointError(self._name, f"the fields {strange} are not tensors")

    def _check_unsynced(self) -> None:
        if self._metric._is_synced:  # noqa: SLF001
            remedy = "Call its unsync() first: now it has the states of all ranks, which would be counted on every rank"
            raise InvalidArgumentError(self._name, "a synchronized metric", remedy)

    def _only(self, field: str, states: Sequence[State]) -> State:
        """Return the unmergeable state ``field`` in the only element of ``states``, or its default if there is none."""
        if states:
            return {name: each for name, each in states[0].items() if name == field or name.startswith(f"{field}.")}
        return {f"{field}.length": 0} if self._default_shape(field) is None else {field: self._default(field)}

    def _default(self, field: str) -> Tensor:
        found: Tensor = self._metric._defaults[field].detach().cpu().clone()  # noqa: SLF001
        return found

    def _default_shape(self, field: str) -> list[int] | None:
        """Return the default shape of a state; None for a list."""
        default = self._metric._defaults[field]  # noqa: SLF001
        return None if isinstance(default, list) else list(default.shape)


def _reduction_name(reduction: object) -> str:
    """Return a name for a reduction that is the same in every process. It includes the arguments of a ``partial``."""
    if reduction is None:
        return "None"
    if isinstance(reduction, partial):
        arguments = [list(reduction.args), dict(sorted(reduction.keywords.items()))]
        text = json.dumps(arguments, default=_reduction_name, skipkeys=True)
        return f"partial({_reduction_name(reduction.func)}, {text})"
    name = getattr(reduction, "__name__", None)
    return name if isinstance(name, str) else type(reduction).__qualname__


def _check_name(name: object, taken: list[str]) -> None:
    if not isinstance(name, str) or not name or "/" in name or name in taken:
        raise InvalidArgumentError("name", name, f"Pass a name that is a string without slash, not in {taken}")


class CounterSet:
    """Registered counters of this rank, by name. Used by the tracker's checkpoint and by :class:`RankCounters`."""

    def __init__(self) -> None:
        self._counters: dict[str, Mergeable] = {}

    def register(self, name: str, counter: object) -> None:
        """Add a counter, which is either a ``torchmetrics.Metric`` or a :class:`Mergeable`.

        Raises InvalidArgumentError if the name is empty, is taken or contains a slash, or if the type is unsupported.
        """
        _check_name(name, sorted(self._counters))
        self._counters[name] = _as_mergeable(name, counter)

    def kinds(self) -> dict[str, Kind]:
        """Return the kind of each counter as a JSON object, by counter name in alphabetical order."""
        return {name: _kind_of(counter) for name, counter in sorted(self._counters.items())}

    def states(self) -> dict[str, State]:
        """Return a copy of each counter's state on this rank, by name."""
        return {name: counter.state_dict() for name, counter in self._counters.items()}

    def check(self, parts: Sequence[RankHeader], world_size: int) -> None:
        """Check that the counters of saved parts can be loaded on ``world_size`` ranks.

        Raises StateMismatchError if the names or kinds of the counters differ, or if the world size differs and a state
        cannot be merged. Raises CheckpointError if the fields of a counter are invalid.
        """
        names = sorted({name for part in parts for name in part.counters})
        if names != sorted(self._counters):
            raise StateMismatchError("counters", names, sorted(self._counters))
        for part, (name, counter) in itertools.product(parts, self._counters.items()):
            if name in part.counters:
                shapes = {field: shape for field, (_, shape) in part.counter_layouts(name).items()}
                _check_saved(name, counter, part.counter_kinds.get(name, {}), {**part.counters[name], **shapes})
        self.check_world_size(parts[0].world_size, world_size)

    def check_world_size(self, saved: int, found: int) -> None:
        """Raise StateMismatchError if the world sizes differ and a counter has a state that cannot be merged."""
        unmerged = [
            f"{name!r} (state {field!r}: {reduction})"
            for name, counter in sorted(self._counters.items())
            if isinstance(counter, MetricCounter)
            for field, reduction in counter.unmerged.items()
        ]
        if unmerged and saved != found:
            remedy = (
                f"Load it on {saved} ranks, or keep states that are reduced by sum, max, min or cat, such as a sum and "
                "a count instead of a mean"
            )
            what = f"states of counters that cannot be merged, {', '.join(unmerged)}, and world size"
            raise StateMismatchError(what, saved, found).with_remedy(remedy)

    def merged(
        self, counted: Sequence[RankHeader], parts: Sequence[RankHeader], tensors: Mapping[str, Tensor]
    ) -> dict[str, State]:
        """Return the merged state of each counter, by name. Does not change the counters.

        Args:
            counted: headers of the parts to merge. If it is empty, the states of new counters are returned.
            parts: headers of all parts that were saved together.
            tensors: tensors of the parts in ``counted``, by key with prefix.

        Raises:
            CheckpointError: if the states of a counter cannot be merged.
        """
        merged = {}
        for name, counter in self._counters.items():
            states = [fields for part in counted if (fields := part.counter(name, tensors)) is not None]
            if states or not isinstance(counter, MetricCounter):
                merged[name] = counter.merge(states)
            else:
                layouts = {field: layout for part in parts for field, layout in part.counter_layouts(name).items()}
                merged[name] = counter.new_state(layouts)
        return merged

    def load(self, states: Mapping[str, State]) -> None:
        """Load ``states``, a result of :meth:`merged`, into the counters. If a counter fails, no counter changes."""
        counters = self._counters
        before = {name: copy.deepcopy(counter.merge([counter.state_dict()])) for name, counter in counters.items()}
        begun: list[str] = []
        try:
            for name, counter in counters.items():
                begun.append(name)
                counter.load_state_dict(states[name])
        except BaseException:
            for name in begun:
                counters[name].load_state_dict(before[name])
            raise


def counted_by(rank: int, world_size: int, parts: Sequence[RankHeader]) -> list[RankHeader]:
    """Return the headers of the parts whose counters ``rank`` must load, in rank order.

    Exactly one rank loads each part. Raises CheckpointError if a part that ``rank`` must load is missing.
    """
    mine = range(rank, parts[0].world_size, world_size)
    found = {part.rank: part for part in parts}
    if (missing := [each for each in mine if each not in found]) and parts[0].counters:
        raise CheckpointError(None, "counters are missing", missing)
    return [found[each] for each in mine if each in found]


def _as_mergeable(name: str, counter: object) -> Mergeable:
    """Return ``counter`` if it is a Mergeable, or an adapter if it is a metric. Else raise InvalidArgumentError."""
    torchmetrics = sys.modules.get("torchmetrics")  # already imported if the caller has a metric
    if torchmetrics is not None and isinstance(counter, torch.nn.Module):
        inner = [each for each in counter.modules() if each is not counter and isinstance(each, torchmetrics.Metric)]
        if inner:
            remedy = (
                "Register each metric that it contains under a name of its own. Build a MetricCollection with "
                "compute_groups=False, because otherwise it updates only one metric of each group"
            )
            raise InvalidArgumentError(name, type(counter).__name__, remedy)
    if torchmetrics is not None and isinstance(counter, torchmetrics.Metric):
        return MetricCounter(name, counter)
    if isinstance(counter, Mergeable):
        return counter
    remedy = "Register a torchmetrics.Metric, or an object with state_dict, merge and load_state_dict"
    raise InvalidArgumentError(name, counter, remedy)


def _kind_of(counter: Mergeable) -> Kind:
    return counter.kind if isinstance(counter, MetricCounter) else {"class": type(counter).__name__}


def _check_saved(name: str, counter: Mergeable, kind: Kind, fields: Mapping[str, object]) -> None:
    """Raise an error if a saved state with this ``kind`` and these ``fields`` cannot be loaded into ``counter``."""
    mine = _kind_of(counter)
    if "states" in mine or "states" in kind:
        for key in ("class", "states", "buffers"):
            if kind.get(key) != mine.get(key):
                raise StateMismatchError(f"counter {name!r}: {key}", repr(kind.get(key)), repr(mine.get(key)))
    if isinstance(counter, MetricCounter):
        counter.check_fields(fields)
