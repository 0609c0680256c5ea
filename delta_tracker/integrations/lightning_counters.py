"""Callback that saves and restores the counters of each rank in the checkpoints of a PyTorch Lightning ``Trainer``.

The import raises :class:`~delta_tracker.errors.MissingExtraError` if neither ``pytorch_lightning`` nor ``lightning``
is installed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

from torch import Tensor

from delta_tracker.errors import CheckpointError, InvalidArgumentError
from delta_tracker.integrations.lightning_package import check_only_one, lightning_package
from delta_tracker.tracker.checkpoint.collectives import agree
from delta_tracker.tracker.checkpoint.rank_counters import RankCounters
from delta_tracker.tracker.rank_group import DEFAULT_TIMEOUT, RankGroup

if TYPE_CHECKING:
    from pytorch_lightning import Callback, LightningModule, Trainer
else:
    Callback = lightning_package().Callback

_logger = logging.getLogger(__name__)

_KEY = "delta_tracker_counters"


class CountersCallback(Callback):
    """Callback that saves counters and metrics of each rank with every checkpoint, and restores them.

    The checkpoint of rank 0 has the states of all ranks, and the checkpoint of any other rank its own, so that the
    strategy may save on rank 0 or on every rank. From a checkpoint of rank 0 the states can be restored at any number
    of ranks. The sum over all ranks stays the same, also if the metrics are persistent states of the module: those are
    restored first, by Lightning, and then replaced.

    The counters are restored whenever the trainer loads a checkpoint: in ``fit``, ``validate``, ``test`` and
    ``predict``. This is a collective. If a rank fails, all ranks raise an error, and no counter has changed.

    Args:
        counters: the counters. They must exist before the trainer starts, for example as attributes of the module.
        is_required: False to keep the present states, with a warning, if a checkpoint has no counters.

    Raises:
        InvalidArgumentError: if ``counters`` is not a :class:`~delta_tracker.RankCounters`.

    Example:
        >>> from delta_tracker import RankCounters
        >>> from torchmetrics import SumMetric
        >>> clicks = SumMetric()  # usually an attribute of the LightningModule
        >>> callback = CountersCallback(RankCounters({"clicks": clicks}))  # for Trainer(callbacks=[callback])
    """

    def __init__(self, counters: RankCounters, *, is_required: bool = True) -> None:
        if not isinstance(counters, RankCounters):
            raise InvalidArgumentError("counters", counters, "Pass a RankCounters")
        self._counters = counters
        self._is_required = is_required

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that this is the only callback of its class.

        Raises:
            InvalidArgumentError: if ``trainer`` has another one.
        """
        del pl_module, stage
        check_only_one(self, trainer, "Pass one CountersCallback with all counters")

    @staticmethod
    def load_into(counters: RankCounters, checkpoint: Mapping[str, Any]) -> None:
        """Load the counters of a checkpoint of Lightning, without a ``Trainer``.

        ``load_from_checkpoint`` calls no callback: call this method on each rank.

        Args:
            counters: the counters.
            checkpoint: the loaded file.

        Raises:
            DeltaTrackerError: the errors of :meth:`delta_tracker.RankCounters.load_state_dict`.
        """
        counters.load_state_dict(checkpoint.get(_KEY, {}))

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the states to ``checkpoint``: on rank 0 those of all ranks, on other ranks this rank's.

        Called by Lightning on every rank.
        """
        del trainer, pl_module
        checkpoint[_KEY] = self._counters.state_dict(strategy="gather_or_local")

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restore the states in ``checkpoint``. All ranks must call this method.

        Raises:
            CheckpointError: if the checkpoint has no counters and ``is_required`` is True.
            RankFailedError: if the ranks have other counters or checkpoints, or another rank failed.
            RankLostError: if a rank died or did not answer in time.
            Exception: the errors of :meth:`delta_tracker.RankCounters.load_state_dict`.
        """
        del trainer, pl_module
        saved: Mapping[str, Tensor] = checkpoint.get(_KEY, {})
        with closing(RankGroup("counters of a checkpoint", "Trainer.fit(...)", DEFAULT_TIMEOUT)) as group:
            agree(lambda: self._checked(saved), group)
            if saved:
                self._counters.load_state_dict(saved)

    def _checked(self, saved: Mapping[str, Tensor]) -> dict[str, object]:
        """Check a state before any rank loads it. Return what must be the same on every rank."""
        if saved:
            self._counters.check(saved)
        elif self._is_required:
            remedy = "Load a checkpoint that has them, or pass CountersCallback(..., is_required=False)"
            raise CheckpointError(None, "it has no counters").advising(remedy)
        else:
            _logger.warning("the checkpoint has no counters: they keep their present states")
        return {**self._counters.description(), "counters of a checkpoint": bool(saved)}
