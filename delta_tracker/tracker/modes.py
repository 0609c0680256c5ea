"""Tracking modes. A mode defines which data the log keeps for a changed row, and which data a delta contains.

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
    """Base class of tracking modes. A mode defines the old states in the log and the states in a delta.

    This base class implements ``ID_ONLY``: only the ids of changed rows are kept. All tables share one instance.

    Attributes:
        keeps_old: True if the log keeps, for each row, the result of :meth:`old_states` before the row's first change.
        update_mode: update mode of a ``DeltaStore`` that keeps the same states.
        states_are_columns: True if an old state has one value per column of the shard, False if it has one value per
            column range.
        has_scores: True if the mode implements :meth:`scores`, which top-k requires if no custom score is passed.
    """

    keeps_old = False
    update_mode = EmbdUpdateMode.NONE
    states_are_columns = False
    has_scores = False

    def check(self, shard: LocalShard) -> None:
        """Raise UnsupportedModelError if the mode does not support ``shard``. No-op by default."""

    def old_states(self, shard: LocalShard, ids: Tensor) -> Tensor:
        """Return the state of each row before it changes, ``[N, ...]``. The log keeps it as the row's old state.

        ``ids`` is ``[N]`` int64 local ids.
        """
        return torch.empty(len(ids), 0, device=shard.device)

    def old_state_bytes(self, table: TableSpec) -> int:
        """Return the size in bytes of the old state of one row in a table that is not sharded by columns."""
        if self.states_are_columns:
            return table.dim * table.dtype.itemsize
        return torch.float32.itemsize if self.keeps_old else 0

    def states(self, shard: LocalShard, rows: ChangedRows) -> Tensor | None:  # noqa: ARG002
        """Return the ``states`` of a delta. ``rows`` must contain old states if :attr:`keeps_old` is True.

        Returns:
            ``[N, ...]``, or None in a mode without states. NaN for rows whose old state is required but unknown.
        """
        return None

    def scores(self, values: Tensor, states: Tensor) -> Tensor:  # noqa: ARG002
        """Return the default scores of rows for top-k, ``[N]`` float32. Larger changes have higher scores.

        ``values`` is ``[N, D]``, the current values of the rows; the method may overwrite it. ``states`` is the result
        of :meth:`states`.
        """
        raise AssertionError("the mode has no scores")


class EmbeddingCapture(Capture):
    """Mode ``EMBEDDING``: a delta contains the values that each row had before it changed."""

    keeps_old = True
    update_mode = EmbdUpdateMode.FIRST
    states_are_columns = True
    has_scores = True

    def old_states(self, shard: LocalShard, ids: Tensor) -> Tensor:
        """Return the current values of the rows ``ids``, ``[N, D]``."""
        return read_rows(shard, ids)

    def states(self, shard: LocalShard, rows: ChangedRows) -> Tensor | None:  # noqa: ARG002
        """Return the values that each row had at the consumer's last committed read, ``[N, D]``. NaN if unknown."""
        return rows.states

    def scores(self, values: Tensor, states: Tensor) -> Tensor:
        """Return the L2 distance between the current and the old values of each row, ``[N]`` float32."""
        norms: Tensor = torch.linalg.vector_norm(values.float().sub_(states), dim=1)
        return norms


class MomentumLastCapture(Capture):
    """Mode ``MOMENTUM_LAST``: a delta contains the norm of each row's first optimizer state, such as the momentum.

    A read returns the current states. No old states are kept.
    """

    update_mode = EmbdUpdateMode.LAST
    has_scores = True

    def check(self, shard: LocalShard) -> None:
        """Raise UnsupportedModelError if the optimizer of ``shard`` is not fused or keeps no state per row."""
        if not shard.is_fused or not all(kernel.optimizer_states(slot) for kernel, slot in shard.holders):
            reason = "its optimizer keeps no state per row inside the kernel"
            raise UnsupportedModelError({shard.spec.table.fqn: reason}, _remedy("Adam or row-wise Adagrad"))

    def states(self, shard: LocalShard, rows: ChangedRows) -> Tensor | None:
        """Return the L2 norm of the first optimizer state of each row, ``[N]`` float32."""
        if not shard.holders:
            return torch.empty(0, device=shard.device)
        norms: Tensor = torch.linalg.vector_norm(read_optimizer(shard, rows.ids)[0].float(), dim=1)
        return norms

    def scores(self, values: Tensor, states: Tensor) -> Tensor:  # noqa: ARG002
        """Return ``states``, because the states of this mode are its scores."""
        return states


class MomentumDiffCapture(MomentumLastCapture):
    """Modes ``MOMENTUM_DIFF`` and ``ROWWISE_ADAGRAD``: a delta contains the increase of each row's Adagrad state."""

    keeps_old = True
    update_mode = EmbdUpdateMode.FIRST

    def check(self, shard: LocalShard) -> None:
        """Raise UnsupportedModelError if the optimizer is not fused or its first state is not one number per row."""
        super().check(shard)
        if any(kernel.optimizer_states(slot)[0].dim() > 1 for kernel, slot in shard.holders):
            reason = "its optimizer keeps no sum of squared gradients per row"
            raise UnsupportedModelError({shard.spec.table.fqn: reason}, _remedy("row-wise Adagrad"))

    def old_states(self, shard: LocalShard, ids: Tensor) -> Tensor:
        """Return the current sums of squared gradients of the rows ``ids``, ``[N, S]``."""
        return read_optimizer(shard, ids)[0] if shard.holders else torch.empty(len(ids), 0, device=shard.device)

    def states(self, shard: LocalShard, rows: ChangedRows) -> Tensor | None:
        """Return how much each row's sum of squared gradients grew since the consumer's last committed read, ``[N]``.

        The increases in all column ranges of the shard are summed.
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
"""Update mode for each tracking mode. ``DeltaStore(UPDATE_MODE_MAP[mode])`` keeps the same states as ``mode``.

Append every lookup to the store. See :class:`~delta_tracker.tracker.store.lookups.DeltaStore`.
"""
