"""The registered counters of a rank, and which saved parts of them each rank loads."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from torch import Tensor

from delta_tracker.errors import CheckpointError, InvalidArgumentError, StateMismatchError
from delta_tracker.tracker.checkpoint.counters import (
    Kind,
    Mergeable,
    State,
    as_mergeable,
    check_saved,
    check_world_size,
    kind_of,
    load_all,
    new_state,
)
from delta_tracker.tracker.checkpoint.rank_header import RankHeader


class CounterSet:
    """Counters of this rank, by name."""

    def __init__(self) -> None:
        self._counters: dict[str, Mergeable] = {}

    def register(self, name: str, counter: object) -> None:
        """Add a counter.

        Raises:
            InvalidArgumentError: if the name is empty, taken or contains a slash, or ``counter`` is neither a metric
                nor a :class:`~delta_tracker.tracker.checkpoint.counters.Mergeable`.
        """
        if not name or "/" in name or name in self._counters:
            raise InvalidArgumentError("name", name, f"Pass a name without slash, not in {sorted(self._counters)}")
        self._counters[name] = as_mergeable(name, counter)

    def kinds(self) -> dict[str, Kind]:
        """Return the kind of each counter, by name in alphabetical order. JSON serializable."""
        return {name: kind_of(counter) for name, counter in sorted(self._counters.items())}

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
                check_saved(name, counter, part.counter_kinds.get(name), fields)
        self.check_world_size(parts[0].world_size, world_size)

    def check_world_size(self, saved: int, found: int) -> None:
        """Check that states which ``saved`` ranks saved can be loaded on ``found`` ranks.

        Raises:
            StateMismatchError: if the numbers differ, and a counter has a state that cannot be merged.
        """
        check_world_size(self._counters, saved, found)

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
            layouts = {field: layout for part in parts for field, layout in part.counter_layouts(name).items()}
            merged[name] = counter.merge(states) if states else new_state(counter, layouts)
        return merged

    def load(self, states: Mapping[str, State]) -> None:
        """Replace the state of every counter. If one raises an error, all have their former states.

        Args:
            states: result of :meth:`merged`.
        """
        load_all(self._counters, states)


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
