"""Per-rank counters that are saved with the tracker: torchmetrics metrics and other mergeable objects.

The state that one rank saved is loaded by exactly one rank, so that the total over all ranks is the same at any world
size. Loading the synchronized total on every rank would multiply the total. Loading only rank 0's state would lose the
counts of the other ranks. At the world size of the save, each rank loads its own state. States that cannot be merged,
because their reduction is not sum, max, min or cat, can be loaded only at that world size.

A part's header has a *kind* for each counter, a JSON object that describes the counter. A load compares the saved kind
with that of the registered counter before it changes any state. The kind is taken when the counter is registered, and
is the same in every process that builds the counter in the same way.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from delta_tracker.errors import CheckpointError, InvalidArgumentError, StateMismatchError
from delta_tracker.tracker.checkpoint.metric_counter import Kind, MetricCounter, State
from delta_tracker.tracker.checkpoint.rank_header import RankHeader


@runtime_checkable
class Mergeable(Protocol):
    """Interface of a counter whose state can be saved, merged with the states of other ranks, and loaded.

    :meth:`merge` must raise an error for a state of another counter. A load calls it before it changes any state.
    """

    def state_dict(self) -> State:
        """Return a copy of this rank's state, a mapping from field name to tensor or JSON value."""

    def merge(self, states: Sequence[State]) -> State:
        """Return one state that combines ``states``, without changing this object.

        Returns the state of a new counter if ``states`` is empty.
        """

    def load_state_dict(self, state: State) -> None:
        """Replace the object's state with ``state``, which :meth:`merge` returned."""


class CounterSet:
    """Counters of this rank, by name."""

    def __init__(self) -> None:
        self._counters: dict[str, Mergeable] = {}

    def register(self, name: str, counter: object) -> None:
        """Add a counter.

        Raises:
            InvalidArgumentError: if the name is empty, taken or contains a slash, or ``counter`` is neither a metric
                nor a :class:`Mergeable`.
        """
        if not name or "/" in name or name in self._counters:
            raise InvalidArgumentError("name", name, f"Pass a name without slash, not in {sorted(self._counters)}")
        self._counters[name] = _as_mergeable(name, counter)

    def kinds(self) -> dict[str, Kind]:
        """Return the kind of each counter, by name in alphabetical order. JSON serializable."""
        return {name: _kind_of(counter) for name, counter in sorted(self._counters.items())}

    def states(self) -> dict[str, State]:
        """Return a copy of each counter's state on this rank, by name."""
        return {name: counter.state_dict() for name, counter in self._counters.items()}

    def check(self, parts: Sequence[RankHeader], world_size: int) -> None:
        """Check that the counters of saved parts can be loaded on ``world_size`` ranks.

        Raises:
            StateMismatchError: if names or kinds differ, or the world size differs and a state cannot be merged.
            CheckpointError: if the fields of a counter are invalid.
        """
        names = sorted({name for part in parts for name in part.counters})
        if names != sorted(self._counters):
            raise StateMismatchError("counters", names, sorted(self._counters))
        for part, (name, counter) in itertools.product(parts, self._counters.items()):
            fields = part.counter_fields(name)
            if fields is not None:
                _check_saved(name, counter, part.counter_kinds.get(name), fields)
        self.check_world_size(parts[0].world_size, world_size)

    def check_world_size(self, saved: int, found: int) -> None:
        """Check that states which ``saved`` ranks saved can be loaded on ``found`` ranks.

        Raises:
            StateMismatchError: if the numbers differ, and a counter has a state that cannot be merged.
        """
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
            raise StateMismatchError(what, saved, found).advising(remedy)

    def merged(
        self, counted: Sequence[RankHeader], parts: Sequence[RankHeader], tensors: Mapping[str, Tensor]
    ) -> dict[str, State]:
        """Return the merged state of each counter, by name, without changing any counter.

        Args:
            counted: the parts to merge. If there are none, the states are those of new counters.
            parts: all parts that were saved together.
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
        """Replace the state of every counter. If one raises an error, all have their former states.

        Args:
            states: result of :meth:`merged`.
        """
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
    """Return the parts whose counters a rank loads, in the order of their ranks. Exactly one rank loads each part.

    Args:
        rank: the rank that loads.
        world_size: number of ranks that load.
        parts: the saved parts; those of other ranks may be missing.

    Raises:
        CheckpointError: if a part that the rank loads is missing.
    """
    mine = range(rank, parts[0].world_size, world_size)
    found = {part.rank: part for part in parts}
    if (missing := [each for each in mine if each not in found]) and parts[0].counters:
        raise CheckpointError(None, "counters are missing", missing)
    return [found[each] for each in mine if each in found]


def _as_mergeable(name: str, counter: object) -> Mergeable:
    """Return ``counter`` as a :class:`Mergeable`. A torchmetrics metric is wrapped.

    Args:
        name: name of the counter, for error messages.
        counter: the object that the user registers.

    Raises:
        InvalidArgumentError: if ``counter`` is neither a metric nor a :class:`Mergeable`, or contains metrics.
    """
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
    """Return the kind of a counter, which a load compares with the saved one. It is JSON serializable."""
    return counter.kind if isinstance(counter, MetricCounter) else {"class": type(counter).__name__}


def _check_saved(name: str, counter: Mergeable, kind: Kind | None, fields: Mapping[str, object]) -> None:
    """Check that a part's state of a counter can be loaded into ``counter``.

    Args:
        name: name of the counter.
        counter: the registered counter.
        kind: saved kind; None if the part was saved by a release that did not save kinds.
        fields: name of each saved field to its value, or to its shape if it is a tensor.

    Raises:
        StateMismatchError: if the state was saved by another class, or by a metric with other states or buffers.
        CheckpointError: if the fields are not those of the metric.
    """
    mine = _kind_of(counter)
    if kind is not None and ("states" in mine or "states" in kind):
        for key in ("class", "states", "buffers"):
            if kind.get(key) != mine.get(key):
                raise StateMismatchError(f"counter {name!r}: {key}", repr(kind.get(key)), repr(mine.get(key)))
    if isinstance(counter, MetricCounter):
        counter.check_fields(fields)
        if kind is None:
            for field, (_, shape) in mine["states"].items():
                # A state without dimensions may have grown some.
                if shape and field in fields and fields[field] != tuple(shape):
                    raise StateMismatchError(f"counter {name!r}: {field} of shape", fields[field], tuple(shape))
