"""Objects of the user that receive the states of a version: :class:`Objects`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from delta_tracker.errors import InvalidArgumentError, StateRejectedError
from delta_tracker.publisher.training import Stateful
from delta_tracker.recovery.fit import DATA
from delta_tracker.recovery.state_fit import check_objects
from delta_tracker.recovery.training_states import TrainingStates
from delta_tracker.tracker.data_position import DataPosition


@dataclass(frozen=True, slots=True, eq=False)
class Objects:
    """Objects that receive the states of a version, see :func:`~delta_tracker.recovery.restore.restore`."""

    training: Mapping[str, Stateful]
    rank: Mapping[str, Stateful]
    data: DataPosition[Any] | None

    def check(self) -> None:
        """Raise InvalidArgumentError if an object is invalid, or if a name is invalid or occurs twice."""
        arguments: list[tuple[str, Any]] = [("training_state", self.training), ("rank_state", self.rank)]
        for argument, objects in arguments:
            if not isinstance(objects, Mapping):
                raise InvalidArgumentError(argument, type(objects), "Pass a mapping of name to object")
            for name, each in objects.items():
                if not isinstance(name, str) or name == DATA:
                    raise InvalidArgumentError(argument, name, f"Use other strings than {DATA!r} as names")
                if not callable(getattr(each, "load_state_dict", None)):
                    raise InvalidArgumentError(f"{argument}[{name!r}]", type(each), "Give it a method load_state_dict")
        if twice := sorted(self.training.keys() & self.rank.keys()):
            raise InvalidArgumentError("rank_state", twice, "Use other names than in training_state")
        if self.data is not None and not isinstance(self.data, DataPosition):
            raise InvalidArgumentError("data", type(self.data), "Pass a DataPosition")

    @property
    def of_rank(self) -> dict[str, Any]:
        """Objects whose states differ by rank, by name."""
        # The data is first: its loader could draw numbers from random generators, which are usually in rank_state.
        return {**({} if self.data is None else {DATA: self.data}), **self.rank}

    @property
    def takes_rank_states(self) -> dict[str, bool]:
        """Names of :attr:`of_rank`. The value is True if the states of another number of ranks can be loaded."""
        found = {name: callable(getattr(each, "load_rank_states", None)) for name, each in self.rank.items()}
        return found if self.data is None else {**found, DATA: self.data.has_rank_states}

    def check_states(self, states: TrainingStates, rank: int, world_size: int, ignore: Collection[str]) -> None:
        """Check that optimizers and schedulers can take their states, see :meth:`load`."""
        check_objects("training_state", self.training, states, 0, ignore)
        if world_size == states.world_size:
            check_objects("rank_state", self.rank, states, rank, ignore)

    def load(self, states: TrainingStates, rank: int, world_size: int, ignore: Collection[str]) -> None:
        """Load the states of all objects that are not in ``ignore``, on one rank of ``world_size``."""
        for name, each in self.training.items():
            if name not in ignore:
                _load(f"training_state[{name!r}]", each.load_state_dict, states.load(0, "training", name))
        for name, each in self.of_rank.items():
            if name in ignore:
                continue
            what = DATA if each is self.data else f"rank_state[{name!r}]"
            if world_size == states.world_size:
                _load(what, each.load_state_dict, states.of_rank(rank, name))
            else:
                _load(what, each.load_rank_states, states.of_all_ranks(name))


def _load(what: str, load: Callable[[Any], object], state: object) -> None:
    try:
        load(state)
    except Exception as error:
        raise StateRejectedError(what, f"{type(error).__name__}: {error}") from error
