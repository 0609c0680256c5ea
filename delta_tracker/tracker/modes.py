"""Strategies of the tracking modes: the data that each mode keeps of a changed row.

Letters: ``N`` rows, ``D`` columns of the shard, ``S`` column ranges of the shard.
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
    """True if :meth:`old_states` of each row is kept from before its first change."""
    states_are_columns: bool
    """True if an old state has one number per column of the shard, False if it has one per column range."""
    has_scores: bool
    """True if the mode implements :meth:`scores`."""

    def check(self, shard: LocalShard) -> None:
        """Raise :class:`UnsupportedTableError` with the reason if the mode does not support this shard."""

    def old_states(self, shard: LocalShard, ids: Tensor) -> Tensor:
        """Return the current data to keep of the rows with ids ``[N]``; ``[N, ...]``."""

    def states(self, shard: LocalShard, rows: ChangedRows) -> Tensor | None:
        """Return the ``states`` of a delta, ``[N, ...]``; NaN where the old state is required but unknown."""

    def scores(self, values: Tensor, states: Tensor) -> Tensor:
        """Return how far each row moved, ``[N]`` float32.

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
        """Raise, because the mode has no scores."""
        del values, states
        raise AssertionError("the mode has no scores")


class EmbeddingCapture:
    """Capture of the old rows."""

    keeps_old = True
    states_are_columns = True
    has_scores = True

    def check(self, shard: LocalShard) -> None:
        """Accept every shard."""

    def old_states(self, shard: LocalShard, ids: Tensor) -> Tensor:
        """Return the rows, ``[N, D]``."""
        return read_rows(shard, ids)

    def states(self, shard: LocalShard, rows: ChangedRows) -> Tensor | None:
        """Return the rows as the consumer last received them, ``[N, D]``."""
        del shard
        return rows.states

    def scores(self, values: Tensor, states: Tensor) -> Tensor:
        """Return the L2 norm of (current - old) of each row."""
        norms: Tensor = torch.linalg.vector_norm(values.float().sub_(states), dim=1)
        return norms


class MomentumLastCapture:
    """Capture of the optimizer's first state at the read. Keeps nothing, because only updates of a row change it."""

    keeps_old = False
    states_are_columns = False
    has_scores = True

    def check(self, shard: LocalShard) -> None:
        """Reject an optimizer without a state per row."""
        if not shard.is_fused or (shard.places and num_optimizer_states(shard) == 0):
            raise UnsupportedTableError(shard.spec.table.fqn, "its optimizer keeps no state per row inside the kernel")

    def old_states(self, shard: LocalShard, ids: Tensor) -> Tensor:
        """Return an empty tensor, ``[N, 0]``."""
        return torch.empty(len(ids), 0, device=shard.device)

    def states(self, shard: LocalShard, rows: ChangedRows) -> Tensor | None:
        """Return the L2 norm of each row's current state, ``[N]`` float32."""
        if not shard.places:
            return torch.empty(0, device=shard.device)
        norms: Tensor = torch.linalg.vector_norm(read_optimizer(shard, rows.ids)[0].float(), dim=1)
        return norms

    def scores(self, values: Tensor, states: Tensor) -> Tensor:
        """Return ``states``, the norms."""
        del values
        return states


class MomentumDiffCapture(MomentumLastCapture):
    """Capture of the growth of a row-wise sum of squared gradients."""

    keeps_old = True

    def check(self, shard: LocalShard) -> None:
        """Reject an optimizer whose first state is not one number per row."""
        super().check(shard)
        if shard.places and not has_rowwise_state(shard):
            reason = "its optimizer keeps no row-wise sum of squared gradients, as row-wise Adagrad does"
            raise UnsupportedTableError(shard.spec.table.fqn, reason)

    def old_states(self, shard: LocalShard, ids: Tensor) -> Tensor:
        """Return the sums, ``[N, S]``."""
        return read_optimizer(shard, ids)[0] if shard.places else torch.empty(len(ids), 0, device=shard.device)

    def states(self, shard: LocalShard, rows: ChangedRows) -> Tensor | None:
        """Return the growth since the consumer's last read, ``[N]``, summed over the shard's column ranges."""
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
"""Mapping from tracking mode to the state it uses of a row since the last committed read: none, first or last.

A ``DeltaStore(UPDATE_MODE_MAP[mode])`` to which every lookup is appended keeps the states of that mode.
"""
