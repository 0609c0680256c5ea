"""Strategies of the tracking modes: the data that each mode keeps of a changed row.

Notation: ``N`` is the number of rows, ``D`` the number of columns of the shard, ``S`` the number of its column ranges.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from delta_tracker.errors import UnsupportedTableError
from delta_tracker.rows import ChangedRows
from delta_tracker.sharding.discover import LocalShard
from delta_tracker.sharding.weights import (
    has_rowwise_state,
    num_optimizer_states,
    read_optimizer,
    read_rows,
)
from delta_tracker.types import EmbdUpdateMode, TrackingMode


class Capture(Protocol):
    """Strategy of a tracking mode. It is stateless: one object serves all tables."""

    keeps_old: bool
    """True if each changed row is kept with the result of :meth:`old_states` from before its first change."""
    states_are_columns: bool
    """True if an old state has one value per column of the shard, False if it has one value per column range."""
    has_scores: bool
    """True if the mode implements :meth:`scores`."""

    def check(self, shard: LocalShard) -> None:
        """Reject a shard that the mode does not support.

        Raises:
            UnsupportedTableError: with the reason.
        """

    def old_states(self, shard: LocalShard, ids: Tensor) -> Tensor:
        """Return the state to keep of each current row, ``[N, ...]``.

        Args:
            shard: the shard.
            ids: ``[N]`` int64 local ids.
        """

    def states(self, shard: LocalShard, rows: ChangedRows) -> Tensor | None:
        """Return the ``states`` of a delta.

        Args:
            shard: the shard.
            rows: the ``N`` changed rows, with old states if :attr:`keeps_old` is set.

        Returns:
            ``[N, ...]``, NaN where the old state is required but unknown; None in a mode without states.
        """

    def scores(self, values: Tensor, states: Tensor) -> Tensor:
        """Return the scores by which top-k selects rows, ``[N]`` float32. Larger changes have higher scores.

        Args:
            values: ``[N, D]`` current rows; overwritten.
            states: ``[N, ...]`` result of :meth:`states`.
        """


class IdCapture:
    """Capture of the ids only."""

    keeps_old = False
    states_are_columns = False
    has_scores = False

    def check(self, shard: LocalShard) -> None:
        """Accept every shard."""

    def old_states(self, shard: LocalShard, ids: Tensor) -> Tensor:
        """Return an empty tensor, ``[N, 0]``."""
        return torch.empty(len(ids), 0, device=shard.device)

    def states(self, shard: LocalShard, rows: ChangedRows) -> Tensor | None:
        """Return None."""
        del shard, rows
        return None

    def scores(self, values: Tensor, states: Tensor) -> Tensor:
        """Raise :class:`AssertionError`, because the mode has no scores."""
        del values, states
        raise AssertionError("the mode has no scores")


class EmbeddingCapture:
    """Capture of the values that each changed row had before the change."""

    keeps_old = True
    states_are_columns = True
    has_scores = True

    def check(self, shard: LocalShard) -> None:
        """Accept every shard."""

    def old_states(self, shard: LocalShard, ids: Tensor) -> Tensor:
        """Return the current values of the rows ``ids``, ``[N, D]``."""
        return read_rows(shard, ids)

    def states(self, shard: LocalShard, rows: ChangedRows) -> Tensor | None:
        """Return the values of the rows that the consumer last received, ``[N, D]``."""
        del shard
        return rows.states

    def scores(self, values: Tensor, states: Tensor) -> Tensor:
        """Return the L2 norm of (current - old) of each row, ``[N]`` float32."""
        norms: Tensor = torch.linalg.vector_norm(values.float().sub_(states), dim=1)
        return norms


class MomentumLastCapture:
    """Capture that reads the first optimizer state tensor, such as the momentum, of each row at the time of the read.

    No old state is kept. A row's optimizer state changes only when the row is updated, so the state at the read is the
    state after the last update.
    """

    keeps_old = False
    states_are_columns = False
    has_scores = True

    def check(self, shard: LocalShard) -> None:
        """Reject a shard whose optimizer is not fused or keeps no state per row.

        Raises:
            UnsupportedTableError: with the reason.
        """
        if not shard.is_fused or (shard.places and num_optimizer_states(shard) == 0):
            raise UnsupportedTableError(shard.spec.table.fqn, "its optimizer keeps no state per row inside the kernel")

    def old_states(self, shard: LocalShard, ids: Tensor) -> Tensor:
        """Return an empty tensor, ``[N, 0]``."""
        return torch.empty(len(ids), 0, device=shard.device)

    def states(self, shard: LocalShard, rows: ChangedRows) -> Tensor | None:
        """Return the L2 norm of each row's first optimizer state, ``[N]`` float32."""
        if not shard.places:
            return torch.empty(0, device=shard.device)
        norms: Tensor = torch.linalg.vector_norm(read_optimizer(shard, rows.ids)[0].float(), dim=1)
        return norms

    def scores(self, values: Tensor, states: Tensor) -> Tensor:
        """Return ``states``, which have one value per row."""
        del values
        return states


class MomentumDiffCapture(MomentumLastCapture):
    """Capture of the growth of each row's sum of squared gradients, which row-wise Adagrad keeps."""

    keeps_old = True

    def check(self, shard: LocalShard) -> None:
        """Reject a shard whose optimizer is not fused, or whose first optimizer state is not one number per row.

        Raises:
            UnsupportedTableError: with the reason.
        """
        super().check(shard)
        if shard.places and not has_rowwise_state(shard):
            reason = "its optimizer keeps no row-wise sum of squared gradients, as row-wise Adagrad does"
            raise UnsupportedTableError(shard.spec.table.fqn, reason)

    def old_states(self, shard: LocalShard, ids: Tensor) -> Tensor:
        """Return the current sums of squared gradients of the rows ``ids``, ``[N, S]``."""
        return read_optimizer(shard, ids)[0] if shard.places else torch.empty(len(ids), 0, device=shard.device)

    def states(self, shard: LocalShard, rows: ChangedRows) -> Tensor | None:
        """Return the growth of each row's sums since the consumer last received the row, ``[N]``.

        It is the total over the shard's column ranges.
        """
        assert rows.states is not None, "this mode keeps old states"
        return (self.old_states(shard, rows.ids) - rows.states).sum(dim=1)


CAPTURES: dict[TrackingMode, Capture] = {
    TrackingMode.ID_ONLY: IdCapture(),
    TrackingMode.EMBEDDING: EmbeddingCapture(),
    TrackingMode.MOMENTUM_LAST: MomentumLastCapture(),
    TrackingMode.MOMENTUM_DIFF: MomentumDiffCapture(),
    TrackingMode.ROWWISE_ADAGRAD: MomentumDiffCapture(),
}

UPDATE_MODE_MAP: Mapping[TrackingMode, EmbdUpdateMode] = MappingProxyType(
    {
        TrackingMode.ID_ONLY: EmbdUpdateMode.NONE,
        TrackingMode.EMBEDDING: EmbdUpdateMode.FIRST,
        TrackingMode.MOMENTUM_LAST: EmbdUpdateMode.LAST,
        TrackingMode.MOMENTUM_DIFF: EmbdUpdateMode.FIRST,
        TrackingMode.ROWWISE_ADAGRAD: EmbdUpdateMode.FIRST,
    }
)
"""Mapping from tracking mode to the update mode of a ``DeltaStore`` that keeps the same states.

A ``DeltaStore(UPDATE_MODE_MAP[mode])`` to which every lookup is appended keeps the states of that mode.
"""
