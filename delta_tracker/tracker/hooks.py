"""Hooks of a tracker in its model: :class:`TrackerHooks`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from delta_tracker.buffers import MEMORY
from delta_tracker.monitor.recorder import Recorder
from delta_tracker.sharding.collection_hooks import watch_collections
from delta_tracker.sharding.kernel_hooks import PostLookupHook
from delta_tracker.sharding.replicas import watch_syncs
from delta_tracker.sharding.step_hook import StepHook
from delta_tracker.sharding.watcher import HookListener, Reports, Watcher, forget_compiled_code
from delta_tracker.tracker.tracked_model import TrackedModel


class TrackerHooks:
    """Hooks of a tracker in its model, which are removed and registered again if the tables are resharded.

    They are also removed if this object is deleted.

    Args:
        listener: receives the reports of the hooks.
        model: the tracked model.
        recorder: records the errors of the hooks and the time that they take.
        lookups: True to report all rows that are looked up.
        keeps_states: True if the log keeps the former states of rows.

    Attributes:
        registered: the current hooks.
    """

    def __init__(
        self, listener: HookListener, model: TrackedModel, recorder: Recorder, *, lookups: bool, keeps_states: bool
    ) -> None:
        self._reports = Reports(listener, recorder)
        self._model = model
        self._lookups = lookups
        self._keeps_states = keeps_states
        self._num_past_errors = self._num_past_updates = 0
        self.registered: list[Watcher] = []

    def attach(self) -> None:
        """Register the hooks in the model's current modules. None is registered if this raises."""
        model, found, reports = self._model, self._model.found, self._reports
        model.num_attached += 1
        MEMORY.join(self)
        forget_compiled_code()
        # The model holds the hooks, and they hold the log: remove them if the tracker is deleted without detach().
        self.registered = hooks = list[Watcher]()
        self._deleted = weakref.finalize(self, _remove, hooks)
        self._deleted.atexit = False
        try:  # one by one, so that all are removed if one cannot be registered
            for kernel in found.kernels:
                hooks.append(PostLookupHook(kernel, reports, lookups=self._lookups))
            hooks.extend(watch_collections(model.module, found, reports))
            if not found.modules:
                hooks.append(StepHook(found.shards, reports))
            hooks.extend(watch_syncs(model.module, found, reports, keeps_states=self._keeps_states))
        except BaseException:
            self.remove()
            raise
        model.is_attached = True

    def remove(self) -> None:
        """Remove the hooks, until the next :meth:`attach`. What they counted is kept."""
        self._model.is_attached = False  # first: if this is interrupted, reads must not return too few rows
        _remove(self.registered)
        self._deleted.detach()
        past = self.num_errors, self.num_updates(), list[Watcher]()
        self._num_past_errors, self._num_past_updates, self.registered = past

    def detach(self) -> None:
        """Remove the hooks, and free the buffers that no other tracker uses."""
        self.remove()
        MEMORY.leave(self)

    @property
    def num_errors(self) -> int:
        """Number of errors caught in hooks so far."""
        return self._num_past_errors + sum(hook.num_errors for hook in self.registered)

    def num_updates(self) -> int:
        """Return the number of updates of tables so far: backward passes of lookups, and steps of optimizers."""
        return self._num_past_updates + sum(
            hook.num_updates for hook in self.registered if isinstance(hook, PostLookupHook | StepHook)
        )

    def lookups_in_flight(self) -> int:
        """Return the number of lookups whose backward pass may still run."""
        return sum(len(hook.in_flight) for hook in self.registered if isinstance(hook, PostLookupHook))


def _remove(hooks: Iterable[Watcher]) -> None:
    for hook in hooks:
        hook.remove()
