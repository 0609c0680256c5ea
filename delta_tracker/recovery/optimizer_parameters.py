"""Match the parameters of a torch optimizer with those of a saved state by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

GROUPS = "param_groups"
OUTSIDE = "a parameter outside the model"


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of a job's model.

    Args:
        names: result of :func:`~delta_tracker.sharding.dense.parameter_names`.
        kept: names of the parameters whose states in a torch optimizer are not restored.
        is_same: True if the version has the same parameters in the same order.
    """

    names: Mapping[int, Sequence[str]] = field(default_factory=dict)
    kept: Collection[str] = ()
    is_same: bool = True


def places(groups: Sequence[Sequence[Sequence[str]]], kept: Collection[str]) -> dict[str, tuple[int, int]]:
    """Return the group and the place in it of each parameter that has a name outside ``kept`` or none, by its names.

    Parameters with the same names, such as the column ranges of a table, are counted.
    """
    counts, found = Counter[str](), dict[str, tuple[int, int]]()
    for number, group in enumerate(groups):
        for place, names in enumerate(group):
            if not names or not set(names) <= set(kept):
                name = ", ".join(names) or OUTSIDE
                counts[name] += 1
                found[name if counts[name] == 1 else f"{name} ({counts[name]})"] = number, place
    return found


def renumbered(
    state: Mapping[str, Any],
    own: Mapping[str, Any],
    saved_places: Mapping[str, tuple[int, int]],
    own_places: Mapping[str, tuple[int, int]],
) -> dict[str, Any]:
    """Return the saved ``state`` of a torch optimizer with the numbers of ``own``, the current state in the job.

    Parameters without a place keep their state in ``own``.
    """
    saved_ids, own_ids = ([list(group["params"]) for group in each[GROUPS]] for each in (state, own))
    sources = {
        own_ids[group][place]: saved_ids[saved_places[name][0]][saved_places[name][1]]
        for name, (group, place) in own_places.items()
    }
    numbers = {number for group in saved_ids for number in group}
    values = {key: value for key, value in state["state"].items() if key not in numbers}
    for number in (number for group in own_ids for number in group):
        held, key = (state["state"], sources[number]) if number in sources else (own["state"], number)
        if key in held:
            values[number] = held[key]
    groups = []
    for saved, found in zip(state[GROUPS], own[GROUPS], strict=True):
        names = {key: found[key] for key in ("params", "param_names") if key in found}
        groups.append({**{key: value for key, value in saved.items() if key != "param_names"}, **names})
    return {**state, "state": values, GROUPS: groups}
