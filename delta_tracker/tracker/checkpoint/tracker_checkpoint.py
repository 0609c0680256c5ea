"""Save and load the state of a tracker: pending rows and notes of consumers, and registered counters."""

import logging
from collections.abc import Mapping
from enum import Enum
from typing import get_args

import torch
from torch import Tensor

from delta_tracker.errors import (
    LOAD_BEFORE,
    InvalidArgumentError,
    RankFailedError,
    ReservedConsumerError,
    StateMismatchError,
)
from delta_tracker.monitor.monitor import Monitor
from delta_tracker.tracker.change_log import ChangeLog
from delta_tracker.tracker.checkpoint.collectives import Strategy, gather_parts, refuse_dcp_load, run_on_all_ranks
from delta_tracker.tracker.checkpoint.counters import CounterSet
from delta_tracker.tracker.checkpoint.part import RankHeader, check_parts_alike, check_tables, pack, parse_all, take
from delta_tracker.tracker.checkpoint.reshard import Resharding
from delta_tracker.tracker.cursors import LogState, PendingState
from delta_tracker.tracker.modes import CAPTURES
from delta_tracker.tracker.rank_group import TORCH_TIMEOUT, RankGroup, rank_and_world_size
from delta_tracker.tracker.tracked_model import TrackedModel
from delta_tracker.types import TrackingMode

_logger = logging.getLogger(__name__)


class LoadOutcome(Enum):
    """Outcome of loading or restoring the state of a tracker."""

    STATE = "state"
    """A state was loaded. Every consumer has the pending rows of this state."""
    STREAM = "stream"
    """:func:`~delta_tracker.restore` restored the model, its optimizer states and the pending rows from a stream."""
    NOTHING = "nothing"
    """The checkpoint had no tracker state. All rows are pending for every consumer."""


class TrackerCheckpoint:
    """Object that saves and loads a tracker's state: pending rows and notes of consumers, and registered counters.

    Created by the tracker, and available as ``tracker.checkpoint``. A note is a JSON value that a consumer's owner set.

    Args:
        log: the change log.
        model: the tracked model.
        mode: the tracking mode. Only states that were saved in the same mode can be loaded.
        monitor: monitor that receives an event if a checkpoint without tracker state is loaded.

    Attributes:
        counters: the registered counters.
        restored: outcome of the last :meth:`load_state_dict` or :meth:`restore_from_stream`; None before the first.
    """

    def __init__(self, log: ChangeLog, model: TrackedModel, mode: TrackingMode, monitor: Monitor) -> None:
        self._log = log
        self._model = model
        self._mode = mode
        self._monitor = monitor
        self.counters = CounterSet()
        self.restored: LoadOutcome | None = None
        self._group: RankGroup | None = None  # created at the first gather, in which all ranks participate

    def description(self) -> dict[str, object]:
        """Return the mode, consumers, tables and counters as a JSON object. It must be the same on all ranks."""
        return {
            "mode": self._mode.value,
            "consumers": sorted(self._log.consumers.names),
            "tables": {fqn: str(shard.spec.table) for fqn, shard in sorted(self._model.shards.items())},
            "counters": self.counters.kinds(),
        }

    def state_dict(self, *, strategy: Strategy = "local") -> dict[str, Tensor]:
        """Return the state to save. See :meth:`~delta_tracker.tracker.tracker.ModelDeltaTracker.state_dict`."""
        refuse_dcp_load("tracker", "SavedTracker(tracker, path)")
        if strategy not in get_args(Strategy):
            raise InvalidArgumentError("strategy", strategy, f"Pass one of {get_args(Strategy)}")
        rank, world_size = rank_and_world_size()
        shards = {fqn: shard.spec for fqn, shard in self._model.shards.items()}
        counters, kinds = self.counters.states(), self.counters.kinds()
        is_gathered = strategy != "local" and world_size > 1
        if is_gathered and self._group is None:
            self._group = RankGroup("parts", 'state_dict(strategy="gather")', TORCH_TIMEOUT)
        group = self._group if is_gathered else None
        if group is None:
            self._model.check_attached()
        else:
            try:
                run_on_all_ranks(self._model.check_attached, group)
            except RankFailedError as error:
                raise error.with_remedy("Call tracker.reattach() on every rank") from None
        self._check_synced(group)
        part = pack(rank, world_size, self._mode.value, shards, self._log.state(), counters, kinds)
        return part if group is None else gather_parts(part, group, strategy)

    def _check_free(self) -> None:
        """Raise ReservedConsumerError if a consumer is reserved, because a load replaces all pending rows."""
        for name in self._log.consumers.names:
            holder = self._log.consumers.find(name).holder
            if holder is not None:
                raise ReservedConsumerError(name, holder, LOAD_BEFORE)

    def _check_synced(self, group: RankGroup | None) -> None:
        """Raise InvalidArgumentError if a row changed on any rank of ``group`` since the last sync of the replicas."""
        averaged = {fqn: shard for fqn, shard in self._model.shards.items() if shard.is_averaged}
        if averaged:
            changed = self._log.writes.changed_since_sync(fqn for fqn, shard in averaged.items() if shard.spec.num_rows)
            tables = [fqn for fqn, ids in changed.items() if ids is None or len(ids)]
            counts = torch.tensor([len(tables)], device="cpu")
            if any(map(int, [counts] if group is None else group.all_gather(counts))):
                listed = ", ".join(map(repr, tables)) or "none on this rank"
                why = f"replicas of a DMPCollection may differ, because rows changed since its last sync(): {listed}"
                remedy = "Call sync() on every rank directly before the model and the tracker are saved"
                raise InvalidArgumentError("state_dict()", why, remedy)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a saved state. See :meth:`~delta_tracker.tracker.tracker.ModelDeltaTracker.load_state_dict`."""
        self._check_free()
        if state == {}:
            self._log.mark_everything()
            self.restored = LoadOutcome.NOTHING
            _logger.warning("loaded a checkpoint without tracker state: every row counts as changed for every consumer")
            self._monitor.log("delta_tracker.restored_nothing", "every row counts as changed for every consumer")
            return
        parts = parse_all(state)
        plan = self.plan_load(parts)
        tensors = take(state, plan.needs(), parts)
        counted = self.counters.merged(plan.counted, parts, tensors)
        log_state = plan.state(tensors)
        self.counters.load(counted)
        self._log.restore(log_state)
        self.restored = LoadOutcome.STATE

    def restore_from_stream(
        self, num_batches: int, pending: Mapping[str, Mapping[str, Tensor | None]], notes: Mapping[str, object]
    ) -> None:
        """Replace all pending rows after the model was restored from a stream. :func:`~delta_tracker.restore` calls it.

        Earlier writes to the weights are ignored. Uncommitted reads are aborted. Registered counters do not change. A
        call that raises one of the following errors changes nothing. If the call is interrupted or memory runs out, all
        rows may become pending.

        Args:
            num_batches: new value of the tracker's ``num_batches``.
            pending: new pending rows, by consumer name and table FQN: ``[N]`` integer local ids, or None for all rows
                of the table. Their old states are unknown. Unlisted consumers and tables have no pending rows.
            notes: new notes, by consumer name. The notes of all other consumers are removed.

        Raises:
            InvalidArgumentError: if a consumer or table is unknown, or an id is outside the shard.
            ReservedConsumerError: if a consumer is reserved. Create publishers after this call: they reserve consumers.
        """
        self._check_free()
        names = self._log.consumers.names
        for name in (*pending, *notes):
            if name not in names:
                raise InvalidArgumentError("consumer", name, f"Pass some of {list(names)}")
        for tables in pending.values():
            for fqn, ids in tables.items():
                spec = self._model.shard(fqn).spec
                if ids is not None:
                    spec.check_ids(ids)
        segments = self._log.segments
        with self._log.lock:
            segments.fence.enter()
            rows = {
                name: {
                    fqn: segments.stores[fqn].unknown(None if ids is None else ids.long())
                    for fqn, ids in pending.get(name, {}).items()
                }
                for name in names
            }
            consumers = {name: PendingState(num_batches, rows[name], note=notes.get(name)) for name in names}
            self._log.restore(LogState(num_batches, consumers))
            self.restored = LoadOutcome.STREAM

    def plan_load(self, parts: list[RankHeader]) -> Resharding:
        """Check that saved parts match the tracker, and return a plan for loading them. ``parts`` are their headers.

        Raises the same errors as :meth:`load_state_dict`.
        """
        self._check_free()
        check_parts_alike(parts)
        first = parts[0]
        for what, saved, found in (
            ("mode", first.mode, self._mode.value),
            ("consumers", sorted(each.name for each in first.consumers), sorted(self._log.consumers.names)),
        ):
            if saved != found:
                raise StateMismatchError(what, saved, found)
        check_tables("", first.shards, {fqn: shard.spec for fqn, shard in self._model.shards.items()})
        rank, world_size = rank_and_world_size()
        self.counters.check(parts, world_size)
        return Resharding(parts, self._model.shards, CAPTURES[self._mode], rank, world_size)
