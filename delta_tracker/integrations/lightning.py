"""Callbacks that add tracking, checkpoints, publishing and counters to a PyTorch Lightning ``Trainer``.

The import raises :class:`~delta_tracker.errors.MissingExtraError` if neither ``pytorch_lightning`` nor ``lightning`` is
installed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch import Tensor, nn

from delta_tracker.arguments import check_function
from delta_tracker.errors import CheckpointError, DetachedError, InvalidArgumentError, MissingExtraError
from delta_tracker.publisher.publisher import Publisher
from delta_tracker.tracker.checkpoint.collectives import run_on_all_ranks
from delta_tracker.tracker.checkpoint.rank_counters import RankCounters
from delta_tracker.tracker.rank_group import DEFAULT_TIMEOUT, RankGroup
from delta_tracker.tracker.tracker import ModelDeltaTracker

_PACKAGES = ("pytorch_lightning", "lightning.pytorch")


def _lightning_package() -> ModuleType:
    """Return the Lightning package that is already imported, otherwise the first one that is installed.

    The packages define different classes. If ``callbacks`` is not a list but a single callback, ``Trainer`` accepts
    only a callback of its own package.
    """
    for name in sorted(_PACKAGES, key=lambda name: sys.modules.get(name) is None):
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in {name, name.partition(".")[0]}:
                raise MissingExtraError(error.name or name, "lightning") from error
    raise MissingExtraError(_PACKAGES[0], "lightning")


if TYPE_CHECKING:
    from pytorch_lightning import Callback, LightningModule, Trainer
else:
    Callback = _lightning_package().Callback

_logger = logging.getLogger(__name__)
_KEY = "delta_tracker"
_COUNTERS_KEY = "delta_tracker_counters"

# True in a checkpoint whose weights were written after its tracker state was saved.
_WRITTEN = "delta_tracker_weights_written"

# Key in a checkpoint of Lightning's WeightAveraging, which has the average in "state_dict" and the weights here.
_AVERAGED = "current_model_state"


@dataclass(frozen=True)
class _Saved:
    """Tracker state while no tracker is attached.

    Args:
        state: the state; empty for a checkpoint without a state.
        weights: each parameter that the state belongs to, and its version counter, which in-place writes increment;
            None if the state does not cover all writes to the rows.
        is_restored: True if the current ``fit`` has loaded the state with its model.
    """

    state: Mapping[str, Tensor]
    weights: list[tuple[ref[Tensor], int]] | None
    is_restored: bool = False

    def belongs_to(self, module: nn.Module) -> bool:
        """Return True if ``module`` has the same parameters, and no parameter was written since the state was saved."""
        now = list(module.parameters())
        return (
            self.weights is not None
            and len(now) == len(self.weights)
            and all(
                held() is each and each._version == version  # noqa: SLF001
                for each, (held, version) in zip(now, self.weights, strict=True)
            )
        )


_UNKNOWN = _Saved({}, None)


class TrackerCallback(Callback):
    """Callback that builds a tracker when ``fit`` starts, calls its ``step()`` after each batch, and saves its state.

    The checkpoint of rank 0 contains the tracker states of all ranks. The checkpoint of any other rank contains only
    the state of that rank. After Lightning has restored the model, each rank loads the state of the rows in its shards,
    at any world size. If the checkpoint has no tracker state, every row is marked as changed. If the world size is
    unchanged, each rank also loads its states of the registered counters.

    When ``fit`` starts, all ranks compare their trackers and the loaded states. If they differ, or if a rank fails, all
    ranks raise an error. This comparison is a collective.

    A later ``fit`` without a checkpoint builds a new tracker, in which every row counts as changed. If a checkpoint is
    restored during ``fit``, for example by a batch size finder, every row counts as changed, and the publisher is built
    again after the next batch. The callback moves itself to the front of ``trainer.callbacks``, before callbacks that
    save and restore checkpoints in the same hooks.

    If ``fit`` ends without an error, the callback publishes the rows of the last batches, and keeps the state of the
    tracker for later calls of ``trainer.save_checkpoint(...)``. Both steps are collectives.

    If the model is sharded, the training code must prevent Lightning from wrapping the model in
    ``DistributedDataParallel``, and must save and restore the sharded tensors.

    Args:
        build: function that builds the tracker for the ``LightningModule``. A TorchRec model must be sharded before
            ``fit``. Plain modules on several ranks must be wrapped in ``DistributedDataParallel``, as in the example;
            on one rank, pass :class:`~delta_tracker.ModelDeltaTracker` itself.
        publish: function that builds the publisher for a tracker; None to disable publishing. The publisher must have a
            cadence, because :meth:`~delta_tracker.publisher.publisher.Publisher.step` is called after each batch. The
            function is called when training starts.

    Attributes:
        publisher: publisher of the current ``fit``; None if publishing is disabled or training has not started.

    Raises:
        InvalidArgumentError: if ``build`` or ``publish`` is not callable.

    Example:
        >>> from delta_tracker import Cadence, ModelDeltaTracker, Publisher
        >>> callback = TrackerCallback(  # for Trainer(callbacks=[callback], strategy="ddp")
        ...     build=lambda module: ModelDeltaTracker(module.trainer.strategy.model),
        ...     publish=lambda tracker: Publisher(tracker, "file:///streams/ctr", cadence=Cadence(seconds=10)),
        ... )
    """

    def __init__(
        self,
        build: Callable[[nn.Module], ModelDeltaTracker],
        publish: Callable[[ModelDeltaTracker], Publisher] | None = None,
    ) -> None:
        check_function("build", build, "ModelDeltaTracker")
        if publish is not None:
            check_function("publish", publish, "lambda tracker: Publisher(tracker, url, cadence=...), or None")
        self._build = build
        self._publish = publish
        self._tracker: ModelDeltaTracker | None = None
        self.publisher: Publisher | None = None
        self._saved: _Saved | None = None  # None before the first fit or checkpoint

    @staticmethod
    def load_into(tracker: ModelDeltaTracker, checkpoint: Mapping[str, Any]) -> None:
        """Load the tracker state of a Lightning checkpoint without a ``Trainer``.

        Use this method after ``load_from_checkpoint``, which calls no callbacks. Build the tracker for the loaded
        module, register the counters, and call this method on each rank. Every row counts as changed if the checkpoint
        has no tracker state, or if its weights do not match the state, for example with ``WeightAveraging``. Raises the
        same errors as :meth:`~delta_tracker.ModelDeltaTracker.load_state_dict`.
        """
        tracker.load_state_dict(checkpoint.get(_KEY, {}))
        if _has_other_weights(checkpoint):
            _mark_everything(tracker)

    @property
    def tracker(self) -> ModelDeltaTracker:
        """Tracker of the current ``fit``. Raises DetachedError outside ``fit`` or after :meth:`on_fit_start` failed."""
        if self._tracker is None:
            raise DetachedError().with_remedy("Use it while Trainer.fit() runs, from on_fit_start to on_fit_end")
        return self._tracker

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Move this callback to the front of ``trainer.callbacks``, and clean up after an earlier ``fit`` that failed.

        Raises InvalidArgumentError if ``trainer`` has another callback of this class.
        """
        _check_only_one(self, trainer, "Pass one TrackerCallback: its tracker can have any number of consumers")
        trainer.callbacks = [self, *(each for each in trainer.callbacks if each is not self)]
        self._release()  # what a fit that raised has left
        if stage == "fit" and self._saved is not None:
            self._saved = replace(self._saved, is_restored=False)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Load the tracker state of ``checkpoint``. If no tracker exists yet, keep the state for :meth:`on_fit_start`.

        If a tracker exists, all ranks must call this method, which closes the publisher and marks every row as changed.
        Raises RankFailedError if only some ranks load a state, or if another rank failed.
        """
        kinds = {kind.__name__ for each in trainer.callbacks for kind in type(each).__mro__}
        is_averaged = "WeightAveraging" in kinds and trainer.state.fn == "fit"  # the callback restores the weights
        restores = is_averaged and not checkpoint.get(_WRITTEN, False)
        others = _has_other_weights(checkpoint) and not restores
        saved = _Saved(checkpoint.get(_KEY, {}), None if others else _weights(pl_module), is_restored=True)
        if self._tracker is None:
            self._saved = saved
            return
        self._close_publisher()  # it reserves a consumer
        with closing(RankGroup("trackers", "Trainer.fit(...)", DEFAULT_TIMEOUT)) as group:
            run_on_all_ranks(lambda: self._loaded(saved), group)
        _mark_everything(self.tracker)  # a consumer may have read rows that the restore has replaced

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Build the tracker, and load the state that :meth:`on_load_checkpoint` kept. All ranks must call this method.

        Raises RankFailedError and detaches the tracker if the trackers of the ranks differ, if only some ranks load a
        state, or if a rank failed.
        """
        saved = self._saved
        try:
            with closing(RankGroup("trackers", "Trainer.fit(...)", DEFAULT_TIMEOUT)) as group:
                run_on_all_ranks(lambda: self._built(pl_module), group)
                run_on_all_ranks(lambda: self._loaded(saved), group)
        except BaseException:
            self._release()
            raise
        self._saved = _UNKNOWN

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Build the publisher, if publishing is enabled. All ranks must call this method."""
        self._open_publisher()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,  # noqa: ANN401  Lightning's own signature
        batch: Any,  # noqa: ANN401
        batch_idx: int,
    ) -> None:
        """Call ``step()`` of the tracker and, if publishing is enabled, of the publisher."""
        self.tracker.step()
        if (publisher := self._open_publisher()) is not None:
            publisher.step()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the tracker state to ``checkpoint``: on rank 0 the states of all ranks, on other ranks this rank's state.

        Lightning calls this method on every rank. After ``fit``, the method saves the state from the end of ``fit``, or
        from a checkpoint that was loaded later, and records whether weights were written afterwards. Before the first
        ``fit``, and in calls after a failed ``fit``, it saves an empty state. Loading it marks all rows as changed.
        """
        if self._tracker is not None:
            checkpoint[_KEY] = self._state()
            return
        saved = self._saved or _UNKNOWN
        checkpoint[_KEY] = saved.state
        checkpoint[_WRITTEN] = not saved.belongs_to(pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Publish pending rows, and keep the tracker's state for later checkpoints. All ranks must call this method.

        Raises:
            DeltaTrackerError: if :meth:`~delta_tracker.publisher.publisher.Publisher.publish` raises an error. The rows
                are then still pending in checkpoints that were saved earlier.
        """
        if (publisher := self._open_publisher()) is not None:
            publisher.publish()
        self._saved = _Saved(self._state(), _weights(pl_module))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close the publisher and detach the tracker.

        Lightning does not call this method if ``fit`` raised an error. Callbacks can then still save a checkpoint, and
        :meth:`setup` cleans up in the next call of ``trainer``.
        """
        self._release()

    def _release(self) -> None:
        self._close_publisher()
        if self._tracker is not None:
            self._tracker.detach()
        self._tracker = None

    def _open_publisher(self) -> Publisher | None:
        if self.publisher is None and self._publish is not None:
            self.publisher = self._publish(self.tracker)
        return self.publisher

    def _close_publisher(self) -> None:
        if self.publisher is not None:
            self.publisher.close()
        self.publisher = None

    def _state(self) -> Mapping[str, Tensor]:
        # A strategy may save on rank 0, or on every rank.
        return self.tracker.state_dict(strategy="gather_or_local")

    def _built(self, pl_module: LightningModule) -> dict[str, object]:
        """Build the tracker. Return its description, which must be the same on all ranks."""
        self._tracker = self._build(pl_module)
        return self._tracker.checkpoint.description()

    def _loaded(self, saved: _Saved | None) -> dict[str, object]:
        """Load a state. Return its description, which must be the same on all ranks."""
        if saved is None:
            return {"tracker state of a checkpoint": "no checkpoint"}
        if not saved.is_restored:
            _mark_everything(self.tracker)
            return {"tracker state of a checkpoint": "no checkpoint after an earlier fit"}
        self.tracker.load_state_dict(saved.state)
        if saved.state and saved.weights is None:
            _mark_everything(self.tracker)
        return {"tracker state of a checkpoint": "present" if saved.state else "missing"}


class CountersCallback(Callback):
    """Callback that saves counters and metrics of each rank with every checkpoint, and restores them.

    The checkpoint of rank 0 contains the states of all ranks. The checkpoint of any other rank contains only the states
    of that rank. The strategy may therefore save on rank 0 or on every rank. A checkpoint of rank 0 can be restored at
    any world size. The sum over all ranks stays the same, even if the module saves the metrics too: the callback
    replaces the values that Lightning restored.

    The counters are restored whenever the trainer loads a checkpoint: in ``fit``, ``validate``, ``test`` and
    ``predict``. The restore is a collective. If a rank fails, all ranks raise an error, and no counter is changed.

    Args:
        counters: counters to save and restore. They must exist before the trainer starts, for example in the module.
        is_required: True to raise CheckpointError if a checkpoint has no counters; False to only log a warning.

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
        """Raise InvalidArgumentError if ``trainer`` has another callback of this class."""
        _check_only_one(self, trainer, "Pass one CountersCallback with all counters")

    @staticmethod
    def load_into(counters: RankCounters, checkpoint: Mapping[str, Any]) -> None:
        """Load the counters of a Lightning checkpoint without a ``Trainer``. Call this method on each rank.

        Raises the same errors as :meth:`delta_tracker.RankCounters.load_state_dict`.
        """
        counters.load_state_dict(checkpoint.get(_COUNTERS_KEY, {}))

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the counters to ``checkpoint``: on rank 0 the states of all ranks, on other ranks this rank's states."""
        checkpoint[_COUNTERS_KEY] = self._counters.state_dict(strategy="gather_or_local")

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restore the counters from ``checkpoint``. All ranks must call this method.

        Raises:
            CheckpointError: if the checkpoint has no counters and ``is_required`` is True.
            RankFailedError: if the counters differ between ranks, some checkpoints have none, or another rank failed.
        """
        saved: Mapping[str, Tensor] = checkpoint.get(_COUNTERS_KEY, {})
        with closing(RankGroup("counters of a checkpoint", "Trainer.fit(...)", DEFAULT_TIMEOUT)) as group:
            run_on_all_ranks(lambda: self._checked(saved), group)
            if saved:
                self._counters.load_state_dict(saved)

    def _checked(self, saved: Mapping[str, Tensor]) -> dict[str, object]:
        """Check a state before any rank loads it. Return its description, which must be the same on all ranks."""
        if saved:
            self._counters.check(saved)
        elif self._is_required:
            remedy = "Load a checkpoint that has them, or pass CountersCallback(..., is_required=False)"
            raise CheckpointError(None, "it has no counters").with_remedy(remedy)
        else:
            _logger.warning("the checkpoint has no counters: they keep their present states")
        return {**self._counters.description(), "counters of a checkpoint": bool(saved)}


def _check_only_one(callback: Callback, trainer: Trainer, remedy: str) -> None:
    """Raise InvalidArgumentError if ``trainer`` has several callbacks of the class of ``callback``."""
    alike = [each for each in trainer.callbacks if isinstance(each, type(callback))]
    if len(alike) > 1:
        raise InvalidArgumentError("callbacks", alike, remedy)


def _weights(module: nn.Module) -> list[tuple[ref[Tensor], int]]:
    return [(ref(each), each._version) for each in module.parameters()]  # noqa: SLF001


def _mark_everything(tracker: ModelDeltaTracker) -> None:
    for fqn in tracker.tables:
        tracker.mark_changed(fqn)


def _has_other_weights(checkpoint: Mapping[str, Any]) -> bool:
    """Return True if the weights of a checkpoint are not the weights that its tracker state belongs to."""
    return bool(checkpoint.get(_WRITTEN, False)) or _AVERAGED in checkpoint
