"""Progress of the training that a tracker observes: :class:`Progress`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.tracker.change_log import ChangeLog
from delta_tracker.tracker.data_position import DataPosition
from delta_tracker.tracker.hooks import TrackerHooks


class Progress:
    """Progress of training on this rank, which a publisher reads to know when and what to cut.

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
        """Number of updates of tables since the last :meth:`step`.

        For fused tables, each backward pass counts once for each lookup in a kernel. For plain modules, each step of an
        optimizer counts once. Lookups without a backward pass, as in an evaluation, do not count. Nor do updates of
        sharded tables without a fused optimizer.
        """
        return self._hooks.num_updates() - self._num_stepped

    @property
    def num_recorded(self) -> Mapping[str, int]:
        """Mapping from table FQN to the number of rows recorded as changed on this rank, repeats included.

        Does not wait for the device. For a table with a fused optimizer, the increase during a period is an upper bound
        for the number of rows that changed during that period. Rows found by comparison with a copy are not counted.
        """
        return MappingProxyType(self._log.segments.num_recorded.copy())

    def step(self) -> None:
        """Count one batch. See :meth:`~delta_tracker.tracker.tracker.ModelDeltaTracker.step`."""
        # Before the batch is counted: if this is interrupted in between, the call can be repeated.
        self._num_stepped = self._hooks.num_updates()
        self._log.consumers.step()
        if self.data_position is not None:
            self.data_position.advance()

    def attach_data(self, position: DataPosition[Any]) -> None:
        """Attach a position. See :meth:`~delta_tracker.tracker.tracker.ModelDeltaTracker.attach_data`."""
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
