"""Match the parameters of a torch optimizer with the parameters in its saved state, by name: :func:`matched`."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import optim

from delta_tracker.publisher.training import Stateful, group_names
from delta_tracker.recovery.training_states import TrainingStates

GROUPS = "param_groups"
OUTSIDE = "a parameter outside the model"


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of a job's model, and how they differ from the parameters in a version.

    Args:
        names: result of :func:`~delta_tracker.sharding.dense.parameter_names`.
        kept: names of the parameters whose optimizer states are not restored.
        is_changed: True if a parameter that is not restored differs between the job and the version.
        is_moved: True if the order of the parameters differs between the job and the version.
    """

    names: Mapping[int, Sequence[str]] = field(default_factory=dict)
    kept: Collection[str] = ()
    is_changed: bool = False
    is_moved: bool = False


@dataclass(frozen=True, slots=True)
class ParameterMatch:
    """Positions of parameters in two optimizer states: ``saved`` and ``own`` map names to (group, number) pairs."""

    saved: Mapping[str, tuple[int, int]]
    own: Mapping[str, tuple[int, int]]

    def renumbered(self, state: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the saved ``state``, numbered like ``own``. Parameters without a match keep their state in ``own``."""
        sources, saved = {number: self.saved[name][1] for name, (_, number) in self.own.items()}, state["state"]
        values = {key: value for key, value in own["state"].items() if key not in sources}
        values |= {key: value for key, value in saved.items() if not isinstance(key, int)}
        values |= {number: saved[source] for number, source in sources.items() if source in saved}
        groups = []
        for each, found in zip(state[GROUPS], own[GROUPS], strict=True):
            names = {key: found[key] for key in ("params", "param_names") if key in found}
            groups.append({**{key: value for key, value in each.items() if key != "param_names"}, **names})
        return {**state, "state": values, GROUPS: groups}


def matched(
    optimizer: Stateful, own: Mapping[str, Any], states: TrainingStates, path: tuple[Any, ...], parameters: Parameters
) -> ParameterMatch | None:
    """Match the parameters in ``own``, the job's state of ``optimizer``, with those in the saved state at ``path``.

    Return None if the names of the parameters are unknown for one of the states.
    """
    saved_names, own_names = states.parameters(*path), group_names(optimizer, own, parameters.names)
    if saved_names is None or own_names is None:
        return None
    kept = () if isinstance(optimizer, optim.LBFGS) else parameters.kept  # it has one state for all parameters
    saved = _numbers(saved_names, states.load(*path, GROUPS), kept)
    return ParameterMatch(saved, _numbers(own_names, own[GROUPS], kept))


def _numbers(
    names: Sequence[Sequence[Sequence[str]]], groups: Sequence[Mapping[str, Any]], kept: Collection[str]
) -> dict[str, tuple[int, int]]:
    """Return the group and number of each parameter that has no name or a name outside ``kept``, by its names.

    Equal names, such as those of the column ranges of a table, get a number as suffix.
    """
    counts, found = Counter[str](), dict[str, tuple[int, int]]()
    for group, (each, held) in enumerate(zip(names, groups, strict=True)):
        for own, number in zip(each, held["params"], strict=True):
            if not own or not set(own) <= set(kept):
                name = ", ".join(own) or OUTSIDE
                counts[name] += 1
                found[name if counts[name] == 1 else f"{name} ({counts[name]})"] = group, number
    return found
