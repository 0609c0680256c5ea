"""Hooks that a tracker registers in its model, and the progress of training on this rank."""

import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from torch.optim.swa_utils import AveragedModel

from delta_tracker.buffers import MEMORY
from delta_tracker.errors import InvalidArgumentError, UntrackedTrainingWarning
from delta_tracker.monitor.recorder import Recorder
from delta_tracker.sharding.collection_hooks import watch_collections
from delta_tracker.sharding.kernel_hooks import PostLookupHook
from delta_tracker.sharding.replicas import watch_syncs
from delta_tracker.sharding.step_hook import StepHook
from delta_tracker.sharding.watcher import HookContext, HookListener, Watcher, discard_compiled_code
from delta_tracker.tracker.change_log import ChangeLog
from delta_tracker.tracker.data_position import DataPosition
from delta_tracker.tracker.tracked_model import TrackedModel

_MANY_UPDATES = 10  # of other tensors, before a batch ends without an update of a table
_MANY_BATCHES = 100


class TrackerHooks:
    """Hooks that a tracker registers in its model. They report changed rows to the tracker's change log.

    After a reshard, the tracker removes the hooks and registers them again. Deleting this object also removes them.

    Args:
        listener: object that the hooks call when rows change.
        model: the tracked model.
        recorder: recorder of the errors and the durations of the hooks.
        lookups: True to report all looked-up rows, False to report only updated rows.
        keeps_states: True if the log keeps old states.

    Attributes:
        registered: hooks that are currently registered.
    """

    def __init__(
        self, listener: HookListener, model: TrackedModel, recorder: Recorder, *, lookups: bool, keeps_states: bool
    ) -> None:
        self._context = HookContext(listener, recorder)
        self._model = model
        self._lookups = lookups
        self._keeps_states = keeps_states
        self._num_past_errors = self._num_past_updates = 0
        self._has_warned = self._has_updated = False
        self._num_idle, self._idle = 0, list[object]()
        self.registered: list[Watcher] = []

    def attach(self) -> None:
        """Register the hooks in the model's current modules. If the call raises, no hook is registered."""
        model, found, context = self._model, self._model.found, self._context
        model.num_attached += 1
        MEMORY.join(self)
        discard_compiled_code()
        # The model holds the hooks, and they hold the log: remove them if the tracker is deleted without detach().
        self.registered = hooks = list[Watcher]()
        self._deleted = weakref.finalize(self, _remove, hooks)
        self._deleted.atexit = False
        try:  # one by one, so that all are removed if one cannot be registered
            for kernel in found.kernels:
                hooks.append(PostLookupHook(kernel, context, lookups=self._lookups))
            hooks.extend(watch_collections(model.module, found, context))
            if not found.modules:
                hooks.append(StepHook(found.shards, context))
            hooks.extend(watch_syncs(model.module, found, context, keeps_states=self._keeps_states))
        except BaseException:
            self.remove()
            raise
        # The average of a trained model is not trained itself.
        self._has_warned |= any(isinstance(each, AveragedModel) for each in model.module.modules())
        model.is_attached = True

    def remove(self) -> None:
        """Remove the hooks without resetting :attr:`num_errors` and :meth:`num_updates`, for example in a reshard."""
        self._model.is_attached = False  # first: if this is interrupted, reads must not return too few rows
        _remove(self.registered)
        self._deleted.detach()
        past = self.num_errors, self.num_updates(), list[Watcher]()
        self._num_past_errors, self._num_past_updates, self.registered = past

    def detach(self) -> None:
        """Remove the hooks, and free the reusable buffers of this process if no other tracker uses them."""
        self.remove()
        MEMORY.leave(self)

    @property
    def num_errors(self) -> int:
        """Total number of errors that were caught in hooks."""
        return self._num_past_errors + sum(hook.num_errors for hook in self.registered)

    def num_updates(self) -> int:
        """Return the total number of table updates: backward passes of lookups, and optimizer steps."""
        return self._num_past_updates + sum(hook.num_updates for hook in self._of_updates())

    def check_read(self) -> None:
        """Warn if no table was ever updated but possible copies of tables are trained. Called before a read."""
        if self._has_warned or self._has_updated:
            return
        self._has_updated = self.num_updates() > 0
        if not self._has_updated:
            self._warn(self._others(), 1, stacklevel=4)

    def check_batch(self, num_recorded: Mapping[str, int]) -> None:
        """Warn if the tables do not seem to be trained. Called at the end of a batch.

        Warns in two cases: a possible copy of a table was updated 10 times while no table changed, or 100 batches in a
        row had no update, write or recorded row. ``num_recorded`` is the number of recorded rows by table FQN.
        """
        if self._has_warned:
            return
        self._warn(self._others(), _MANY_UPDATES, stacklevel=5)
        hooks = self._of_updates()
        if hooks and not self.num_updates() and not any(hook.has_unseen for hook in hooks):
            state = [*(hook.others.versions() for hook in hooks), *num_recorded.values()]
            self._num_idle = self._num_idle + 1 if state == self._idle else 0
            self._idle = state
            shards = [shard for shard in self._model.shards.values() if shard.holders]
            if self._num_idle >= _MANY_BATCHES and all(each.is_fused or each.is_stepped for each in shards):
                self._warn(Counter(dict.fromkeys(self._model.found.tables, 0)), 0, stacklevel=5)

    def _of_updates(self) -> list[PostLookupHook | StepHook]:
        return [hook for hook in self.registered if isinstance(hook, PostLookupHook | StepHook)]

    def _others(self) -> Counter[str]:
        """Return the number of updates of tensors that may be copies of a table, by the FQN of this table."""
        return sum((hook.others.counts() for hook in self._of_updates()), Counter[str]())

    def _warn(self, others: Counter[str], least: int, stacklevel: int) -> None:
        num_updates = max(others.values(), default=-1)
        if num_updates >= least:
            self._has_warned = True
            warnings.warn(UntrackedTrainingWarning(sorted(others), num_updates), stacklevel=stacklevel)

    def lookups_in_flight(self) -> int:
        """Return the number of lookups that have an autograd graph and whose backward pass has not started."""
        return sum(len(hook.in_flight) for hook in self.registered if isinstance(hook, PostLookupHook))


class BatchProgress:
    """Progress of training on this rank. A publisher uses it to decide when to publish.

    Args:
        log: the tracker's log.
        hooks: the tracker's hooks.

    Attributes:
        data_position: position in the training data; None before :meth:`attach_data`.
    """

    def __init__(self, log: ChangeLog, hooks: TrackerHooks) -> None:
        self._log = log
        self._hooks = hooks
        self._num_stepped = 0
        self.data_position: DataPosition[Any] | None = None

    @property
    def num_batches(self) -> int:
        """Number of :meth:`step` calls."""
        return self._log.cursors.num_batches

    @property
    def num_unstepped(self) -> int:
        """Number of table updates since the last :meth:`step`.

        For fused tables, each backward pass counts once for each lookup in a kernel. For plain modules, each optimizer
        step counts once. Lookups without a backward pass, as in an evaluation, do not count. Updates of sharded tables
        without a fused optimizer do not count either.
        """
        return self._hooks.num_updates() - self._num_stepped

    @property
    def num_recorded(self) -> Mapping[str, int]:
        """Number of rows recorded as changed on this rank, by table FQN. A row counts each time it is recorded.

        Does not wait for the device. For a table with a fused optimizer, the increase over a period is an upper bound
        for the number of rows that changed in this period. Rows found by comparison with a copy do not count.
        """
        return MappingProxyType(self._log.segments.num_recorded.copy())

    def step(self) -> None:
        """Count one batch. See :meth:`~delta_tracker.tracker.tracker.ModelDeltaTracker.step`."""
        # Before the batch is counted: if this is interrupted in between, the call can be repeated.
        self._num_stepped = self._hooks.num_updates()
        self._log.consumers.step()
        self._hooks.check_batch(self._log.segments.num_recorded)
        if self.data_position is not None:
            self.data_position.advance()

    def attach_data(self, position: DataPosition[Any]) -> None:
        """Set :attr:`data_position`. See :meth:`~delta_tracker.tracker.tracker.ModelDeltaTracker.attach_data`."""
        if not isinstance(position, DataPosition):
            raise InvalidArgumentError("position", type(position), "Pass a DataPosition of the loader")
        if self.data_position is position:
            return
        if self.data_position is not None:
            raise InvalidArgumentError("position", position, "Keep the tracker's DataPosition: it already has one")
        if position.num_ahead:
            remedy = "Attach the position before the first batch is fetched, or after it is restored"
            raise InvalidArgumentError("batches ahead", position.num_ahead, remedy)
        self.data_position = position
        position.attached()


def _remove(hooks: Iterable[Watcher]) -> None:
    for hook in hooks:
        hook.remove()
