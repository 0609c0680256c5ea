"""Save and load the counters and metrics of each rank without a tracker."""

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from torch import Tensor

from delta_tracker.errors import CheckpointError, InvalidArgumentError, StateMismatchError
from delta_tracker.tracker.checkpoint.collectives import gather_parts, refuse_dcp_load
from delta_tracker.tracker.checkpoint.counters import CounterSet, State, counted_by
from delta_tracker.tracker.checkpoint.part import RankHeader, check_parts_alike, counter_layouts, pack, parse_all, take
from delta_tracker.tracker.cursors import LogState
from delta_tracker.tracker.rank_group import TORCH_TIMEOUT, RankGroup, rank_and_world_size

CounterStrategy = Literal["local", "gather", "gather_or_local", "merge"]

MODE = "rank_counters"
"""Value of ``mode`` in the headers that :class:`RankCounters` writes. A tracker cannot load a state of this mode."""


class RankCounters:
    """Collection of this rank's counters and metrics that can be saved, and loaded with a different number of ranks.

    Requires no tracker and no embedding module. Exactly one rank loads each saved part, so that the total over all
    ranks is preserved. If the number of ranks is unchanged, each rank loads the states that it saved. States whose
    reduction is not sum, max, min or cat can be loaded only if the number of ranks is unchanged.

    Args:
        counters: counters by name, each a ``torchmetrics.Metric`` or a
            :class:`~delta_tracker.tracker.checkpoint.counters.Mergeable`. Names must not contain a slash. All ranks
            must pass the same names.

    Raises:
        InvalidArgumentError: if there is no counter, if a name is empty or contains a slash, or if the type of a
            counter is unsupported.

    Example:
        >>> class Clicks:
        ...     total = 0
        ...
        ...     def state_dict(self):
        ...         return {"total": self.total}
        ...
        ...     def merge(self, states):
        ...         return {"total": sum(each["total"] for each in states)}
        ...
        ...     def load_state_dict(self, state):
        ...         self.total = state["total"]
        >>> clicks = Clicks()
        >>> counters = RankCounters({"clicks": clicks})
        >>> clicks.total = 3
        >>> saved = counters.state_dict()  # tensors: pass them to safetensors, or `counters` to dcp.save
        >>> clicks.total = 99
        >>> counters.load_state_dict(saved)
        >>> clicks.total
        3
    """

    def __init__(self, counters: Mapping[str, object]) -> None:
        if not counters or not hasattr(counters, "items"):
            raise InvalidArgumentError("counters", counters, "Pass a dict from name to counter, with at least one")
        self._counters = CounterSet()
        for name, counter in counters.items():
            self._counters.register(name, counter)
        self._group: RankGroup | None = None  # created at the first gather, in which all ranks participate

    def __getstate__(self) -> dict[str, object]:
        """Return the attributes without the process group, for pickle and copy. A copy creates a new group."""
        return {**vars(self), "_group": None}

    def description(self) -> dict[str, object]:
        """Return the names and kinds of the counters as a JSON object. It must be the same on every rank."""
        return {"counters": self._counters.kinds()}

    def state_dict(self, *, strategy: CounterStrategy = "local") -> dict[str, Tensor]:
        """Return the states of the counters as CPU tensors to save, by key. The keys of different ranks differ.

        Args:
            strategy: ``local`` returns this rank's part. ``gather`` returns the parts of all ranks on rank 0, and
                nothing on other ranks. ``gather_or_local`` returns the parts of all ranks on rank 0, and this rank's
                part on other ranks. ``merge`` returns one part with the merged states of all ranks on rank 0, and
                nothing on other ranks. All strategies except ``local`` are collectives.

        Raises:
            InvalidArgumentError: if the strategy is unknown, or the state of a counter cannot be saved.
            StateMismatchError: if ``strategy`` is ``merge`` and a state cannot be merged.
            RankLostError: if a rank does not participate in the collective.
        """
        refuse_dcp_load("counters", "SavedCounters(counters, path)")
        if strategy not in get_args(CounterStrategy):
            raise InvalidArgumentError("strategy", strategy, f"Pass one of {get_args(CounterStrategy)}")
        rank, world_size = rank_and_world_size()
        if strategy == "merge":
            self._counters.check_world_size(world_size, 1)
        part = self._packed(rank, world_size, self._counters.states())
        if strategy == "local" or world_size == 1:
            return part
        if self._group is None:
            self._group = RankGroup("counters", 'RankCounters.state_dict(strategy="gather")', TORCH_TIMEOUT)
        gathered = gather_parts(part, self._group, strategy)
        if strategy == "merge" and rank == 0:
            parts = parse_all(gathered)
            return self._packed(0, 1, self._counters.merged(parts, parts, gathered))
        return gathered

    def plan_load(self, parts: Sequence[RankHeader]) -> list[RankHeader]:
        """Check that saved parts match the counters, and return the headers of the parts that this rank must load.

        ``parts`` are the headers of the parts. Raises StateMismatchError if the parts were not saved together or do not
        match the counters, and CheckpointError if parts are missing or invalid.
        """
        if not parts:
            remedy = "Load a checkpoint that has them, or load none: the counters then keep their values"
            raise CheckpointError(None, "it has no counters").with_remedy(remedy)
        check_parts_alike(parts)
        if parts[0].mode != MODE:
            raise StateMismatchError("mode", parts[0].mode, MODE)
        rank, world_size = rank_and_world_size()
        self._counters.check(parts, world_size)
        return counted_by(rank, world_size, parts)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace the states of all counters with saved states. If the call raises, no counter of this rank changes.

        Args:
            state: tensors of the parts that this rank loads, or of all parts. If the number of ranks is unchanged, a
                rank loads the part that it saved. Otherwise rank ``r`` of ``W`` loads the parts of ranks ``r``,
                ``r + W`` and so on. On a rank that loads no part, pass any part.
        """
        self._counters.load(self._merged(state))

    def check(self, state: Mapping[str, Tensor]) -> None:
        """Raise the errors that :meth:`load_state_dict` would raise, without changing any counter.

        Call this method on all ranks before any rank loads, so that either all ranks load or none.
        """
        self._merged(state)

    def _merged(self, state: Mapping[str, Tensor]) -> dict[str, State]:
        parts = parse_all(state) if state else []
        counted = self.plan_load(parts)
        return self._counters.merged(counted, parts, take(state, counter_layouts(counted), parts))

    def _packed(self, rank: int, world_size: int, states: Mapping[str, State]) -> dict[str, Tensor]:
        return pack(rank, world_size, MODE, {}, LogState(0, {}), states, self._counters.kinds())
