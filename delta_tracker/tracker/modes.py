"""Strategies of the tracking modes. A strategy defines the data that a mode keeps for each changed row.

Notation: ``N`` is the number of rows. A shard has ``D`` columns in ``S`` column ranges.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from delta_tracker.errors import UnsupportedModelError
from delta_tracker.rows import ChangedRows
from delta_tracker.sharding.local_shard import LocalShard
from delta_tracker.sharding.weights import read_optimizer, read_rows
from delta_tracker.types import EmbdUpdateMode, TableSpec, TrackingMode


class Capture:
    """Base class of the strategies, and strategy of ``ID_ONLY``, which keeps only the ids of changed rows.

    It is stateless, so all tables share one object.

    Attributes:
        keeps_old: True if the log keeps the state that :meth:`old_states` returned for each changed row before its
            first change.
        update_mode: update mode with which a ``DeltaStore`` of all lookups keeps the same states.
        states_are_columns: True if an old state has one value per column of the shard, False if it has one value per
            column range.
        has_scores: True if the mode implements :meth:`scores`.
    """

    keeps_old = False
    update_mode = EmbdUpdateMode.NONE
    states_are_columns = False
    has_scores = False

    def check(self, shard: LocalShard) -> None:
        """Raise UnsupportedModelError, with the reason, if the mode does not support a shard."""

    def old_states(self, shard: LocalShard, ids: Tensor) -> Tensor:
        """Return the current state of each row, ``[N, ...]``. The log keeps it as the old state of the row.

        ``ids`` is ``[N]`` int64, local.
        """
        return torch.empty(len(ids), 0, device=shard.device)

    def old_state_bytes(self, table: TableSpec) -> int:
        """Return the size of the old state of one row of a table whose shards have all columns, in bytes."""
        if self.states_are_columns:
            return table.dim * table.dtype.itemsize
        return torch.float32.itemsize if self.keeps_old else 0

    def states(self, shard: LocalShard, rows: ChangedRows) -> Tensor | None:
        """Return the states of changed rows, as a delta contains them.

        ``rows`` has old states if :attr:`keeps_old` is set.

        Returns:
            ``[N, ...]``, NaN where the old state is required but unknown; None in a mode without states.
        """
        del shard, rows
        return None

    def scores(self, values: Tensor, states: Tensor) -> Tensor:
        """Return the scores by which top-k selects rows, ``[N]`` float32. Larger changes have higher scores.

        ``values`` is ``[N, D]``, the current rows, and is overwritten. ``states`` is a result of :meth:`states`.
        """
        del values, states
        raise AssertionError("the mode has no scores")


class EmbeddingCapture(Capture):
    """Strategy that keeps the values that each changed row had before the change."""

    keeps_old = True
    update_mode = EmbdUpdateMode.FIRST
    states_are_columns = True
    has_scores = True

    def old_states(self, shard: LocalShard, ids: Tensor) -> Tensor:
        """Return the current values of the rows ``ids``, ``[N, D]``."""
        return read_rows(shard, ids)

    def states(self, shard: LocalShard, rows: ChangedRows) -> Tensor | None:
        """Return the values of each row as the consumer last received them, ``[N, D]``; NaN where unknown."""
        del shard
        return rows.states

    def scores(self, values: Tensor, states: Tensor) -> Tensor:
        """Return the L2 distance between the current and the old values of each row, ``[N]`` float32."""
        norms: Tensor = torch.linalg.vector_norm(values.float().sub_(states), dim=1)
        return norms


class MomentumLastCapture(Capture):
    """Strategy that reads the first optimizer state tensor (for example the momentum) of each row when a delta is read.

    No old state is kept. A row's optimizer state changes only when the row is updated, so the state at the read is the
    state after the last update.
    """

    update_mode = EmbdUpdateMode.LAST
    has_scores = True

    def check(self, shard: LocalShard) -> None:
        """Reject a shard whose optimizer is not fused or keeps no state per row."""
        if not shard.is_fused or not all(kernel.optimizer_states(slot) for kernel, slot in shard.holders):
            reason = "its optimizer keeps no state per row inside the kernel"
            raise UnsupportedModelError({shard.spec.table.fqn: reason}, _remedy("Adam or row-wise Adagrad"))

    def states(self, shard: LocalShard, rows: ChangedRows) -> Tensor | None:
        """Return the L2 norm of each row's first optimizer state, ``[N]`` float32."""
        if not shard.holders:
            return torch.empty(0, device=shard.device)
        norms: Tensor = torch.linalg.vector_norm(read_optimizer(shard, rows.ids)[0].float(), dim=1)
        return norms

    def scores(self, values: Tensor, states: Tensor) -> Tensor:
        """Return ``states``, which already contain one score per row."""
        del values
        return states


class MomentumDiffCapture(MomentumLastCapture):
    """Strategy that measures how much each row's sum of squared gradients, a state of row-wise Adagrad, has grown."""

    keeps_old = True
    update_mode = EmbdUpdateMode.FIRST

    def check(self, shard: LocalShard) -> None:
        """Reject a shard whose optimizer is not fused, or whose first optimizer state is not one number per row."""
        super().check(shard)
        if any(kernel.optimizer_states(slot)[0].dim() > 1 for kernel, slot in shard.holders):
            reason = "its optimizer keeps no sum of squared gradients per row"
            raise UnsupportedModelError({shard.spec.table.fqn: reason}, _remedy("row-wise Adagrad"))

    def old_states(self, shard: LocalShard, ids: Tensor) -> Tensor:
        """Return the current sums of squared gradients of the rows ``ids``, ``[N, S]``."""
        return read_optimizer(shard, ids)[0] if shard.holders else torch.empty(len(ids), 0, device=shard.device)

    def states(self, shard: LocalShard, rows: ChangedRows) -> Tensor | None:
        """Return the growth of each row's sums of squared gradients since the consumer last received the row, ``[N]``.

        The growth is summed over the shard's column ranges.
        """
        assert rows.states is not None, "this mode keeps old states"
        return (self.old_states(shard, rows.ids) - rows.states).sum(dim=1)


def _remedy(optimizers: str) -> str:
    return (
        f"Pass mode='ID_ONLY' or 'EMBEDDING', train it with fused {optimizers}, or name it in fqns_to_skip to train it "
        "untracked"
    )


CAPTURES: dict[TrackingMode, Capture] = {
    TrackingMode.ID_ONLY: Capture(),
    TrackingMode.EMBEDDING: EmbeddingCapture(),
    TrackingMode.MOMENTUM_LAST: MomentumLastCapture(),
    TrackingMode.MOMENTUM_DIFF: MomentumDiffCapture(),
    TrackingMode.ROWWISE_ADAGRAD: MomentumDiffCapture(),
}

UPDATE_MODE_MAP: Mapping[TrackingMode, EmbdUpdateMode] = MappingProxyType(
    {mode: capture.update_mode for mode, capture in CAPTURES.items()}
)
"""Mapping from tracking mode to the update mode with which a ``DeltaStore`` keeps the same states.

If every lookup is appended to ``DeltaStore(UPDATE_MODE_MAP[mode])``, the store keeps the states of ``mode``. See
:class:`~delta_tracker.tracker.store.lookups.DeltaStore`.
"""
