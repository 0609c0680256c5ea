"""What each tracking mode keeps of a changed row: one strategy object per mode.

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
    """A tracking mode. It has no state of its own: the same object serves every table."""

    keeps_old: bool
    """Whether :meth:`old_states` is kept of each row, from before its first change."""
    states_are_columns: bool
    """Whether an old state has one number for each column of the shard; otherwise one for each column range."""
    has_scores: bool
    """Whether the mode can tell how far a row moved."""

    def check(self, shard: LocalShard) -> None:
        """Raise :class:`UnsupportedTableError` with the reason if the mode cannot serve this shard."""

    def old_states(self, shard: LocalShard, ids: Tensor) -> Tensor:
        """What to keep of the rows ``[N]``, as they are now; ``[N, ...]``."""

    def states(self, shard: LocalShard, rows: ChangedRows) -> Tensor | None:
        """What a delta says of changed rows; ``[N, ...]``, NaN where the old state is needed and unknown."""

    def scores(self, values: Tensor, states: Tensor) -> Tensor:
        """How far rows moved, ``[N]`` float32, from their ``states`` and their current values ``[N, D]``, used up."""


class IdCapture:
    """Ids only."""

    keeps_old = False
    states_are_columns = False
    has_scores = False

    def check(self, shard: LocalShard) -> None:
        """Every shard will do."""

    def old_states(self, shard: LocalShard, ids: Tensor) -> Tensor:
        """Nothing: ``[N, 0]``."""
        return torch.empty(len(ids), 0, device=shard.device)

    def states(self, shard: LocalShard, rows: ChangedRows) -> Tensor | None:
        """None."""
        del shard, rows
        return None

    def scores(self, values: Tensor, states: Tensor) -> Tensor:
        """Never asked for."""
        del values, states
        raise AssertionError("ids alone have no scores")


class EmbeddingCapture:
    """The rows as they were."""

    keeps_old = True
    states_are_columns = True
    has_scores = True

    def check(self, shard: LocalShard) -> None:
        """Every shard will do."""

    def old_states(self, shard: LocalShard, ids: Tensor) -> Tensor:
        """The rows, ``[N, D]``."""
        return read_rows(shard, ids)

    def states(self, shard: LocalShard, rows: ChangedRows) -> Tensor | None:
        """The rows as the consumer last received them, ``[N, D]``."""
        del shard
        return rows.states

    def scores(self, values: Tensor, states: Tensor) -> Tensor:
        """L2 norm of (current - old)."""
        norms: Tensor = torch.linalg.vector_norm(values.float().sub_(states), dim=1)
        return norms


class MomentumLastCapture:
    """The optimizer's first state as it is: only an update of a row moves it, so nothing has to be kept."""

    keeps_old = False
    states_are_columns = False
    has_scores = True

    def check(self, shard: LocalShard) -> None:
        """Refuse an optimizer without a state per row."""
        if not shard.is_fused or (shard.places and num_optimizer_states(shard) == 0):
            raise UnsupportedTableError(shard.spec.table.fqn, "its optimizer keeps no state per row inside the kernel")

    def old_states(self, shard: LocalShard, ids: Tensor) -> Tensor:
        """Nothing: ``[N, 0]``."""
        return torch.empty(len(ids), 0, device=shard.device)

    def states(self, shard: LocalShard, rows: ChangedRows) -> Tensor | None:
        """L2 norm of the state of each row, ``[N]`` float32."""
        if not shard.places:
            return torch.empty(0, device=shard.device)
        norms: Tensor = torch.linalg.vector_norm(read_optimizer(shard, rows.ids)[0].float(), dim=1)
        return norms

    def scores(self, values: Tensor, states: Tensor) -> Tensor:
        """The norm."""
        del values
        return states


class MomentumDiffCapture(MomentumLastCapture):
    """How far a row-wise sum of squared gradients has grown."""

    keeps_old = True

    def check(self, shard: LocalShard) -> None:
        """Refuse an optimizer whose first state is not one number per row."""
        super().check(shard)
        if shard.places and not has_rowwise_state(shard):
            reason = "its optimizer keeps no row-wise sum of squared gradients, as row-wise Adagrad does"
            raise UnsupportedTableError(shard.spec.table.fqn, reason)

    def old_states(self, shard: LocalShard, ids: Tensor) -> Tensor:
        """The sums, ``[N, S]``."""
        return read_optimizer(shard, ids)[0] if shard.places else torch.empty(len(ids), 0, device=shard.device)

    def states(self, shard: LocalShard, rows: ChangedRows) -> Tensor | None:
        """Growth since the consumer's last read, ``[N]``, over all column ranges of the shard."""
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
"""Which of a row's states since the last committed read each mode goes by: none, the first, or the last.

A ``DeltaStore(UPDATE_MODE_MAP[mode])`` to which every lookup is appended keeps the states of that mode.
"""
