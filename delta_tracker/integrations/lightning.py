"""Callback that adds tracking, checkpoints and publishing to a PyTorch Lightning ``Trainer``.

Import the callback with ``from delta_tracker.integrations.lightning import TrackerCallback``. The import raises
:class:`~delta_tracker.errors.MissingExtraError` if neither ``pytorch_lightning`` nor ``lightning`` is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from delta_tracker.distributed import DEFAULT_TIMEOUT, RankGroup
from delta_tracker.errors import DetachedError
from delta_tracker.integrations.lightning_package import lightning_package
from delta_tracker.publisher.publisher import Publisher
from delta_tracker.tracker.checkpoint.agreement import agree
from delta_tracker.tracker.tracker import ModelDeltaTracker

if TYPE_CHECKING:
    from pytorch_lightning import Callback, LightningModule, Trainer
else:
    Callback = lightning_package().Callback

_KEY = "delta_tracker"


class TrackerCallback(Callback):
    """Callback that builds the tracker when ``fit`` starts, steps it after each batch, and checkpoints its state.

    The state is part of every checkpoint, whichever ranks the strategy saves on: the checkpoint of rank 0 has the parts
    of all ranks, and the checkpoint of any other rank has the part of this rank. After the model is restored, each rank
    loads the rows of its own shards, at any world size. If the checkpoint has no tracker state, every row is marked as
    changed. At the world size of the save, each rank also loads its own state of each registered counter.

    When ``fit`` starts, all ranks compare their trackers and the states that they load. If these differ, or if a rank
    fails, all ranks raise an error. This is a collective.

    At the end of a ``fit`` without an error, the callback publishes the rows of the last batches. It keeps the state of
    the tracker for ``trainer.save_checkpoint(...)`` after ``fit``. Both are collectives.

    With a sharded model, the training code must prevent Lightning from wrapping it in ``DistributedDataParallel``, and
    must save and restore sharded tensors. The callback does neither.

    Args:
        build: function that builds the tracker for the ``LightningModule``. TorchRec's model must be sharded before
            ``fit``. Plain modules on several ranks need DDP's wrapper, as in the example; on one rank, pass
            :class:`~delta_tracker.ModelDeltaTracker` itself.
        publish: function that builds the publisher for a tracker; None to disable publishing. The publisher needs a
            cadence, because its :meth:`~delta_tracker.publisher.publisher.Publisher.step` is called after each batch.

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
        self._build = build
        self._publish = publish
        self._tracker: ModelDeltaTracker | None = None
        self._publisher: Publisher | None = None
        self._saved: Mapping[str, Tensor] | None = None
        self._ended: Mapping[str, Tensor] | None = None  # state at the end of the last fit

    @property
    def tracker(self) -> ModelDeltaTracker:
        """Tracker of the current ``fit``.

        Raises:
            DetachedError: before ``fit`` starts, after it ends, and after :meth:`on_fit_start` raised an error.
        """
        if self._tracker is None:
            raise DetachedError
        return self._tracker

    @property
    def publisher(self) -> Publisher | None:
        """Publisher of the current ``fit``; None if publishing is disabled or ``fit`` is not running."""
        return self._publisher

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Store the tracker state of ``checkpoint`` until :meth:`on_fit_start` succeeds. No tracker exists yet."""
        del trainer, pl_module
        self._saved = checkpoint.get(_KEY, {})

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Build the tracker and restore its saved state, if there is one.

        Then build the publisher if publishing is enabled. All ranks must call this method. If it raises an error, the
        tracker is detached.

        Raises:
            RankMismatchError: if the trackers or the loaded states of the ranks differ, or if another rank failed.
            RankLostError: if a rank died or did not build its tracker in time.
            Exception: the error that was raised while the tracker was built, its state loaded, or the publisher built.
        """
        del trainer
        self._release()  # what a fit that raised has left
        self._ended = None
        saved = self._saved  # kept until this method succeeds, for a fit after a failed one
        group = RankGroup("trackers", "Trainer.fit(...)", DEFAULT_TIMEOUT)
        try:
            agree(lambda: self._built(pl_module, saved), group)
            agree(lambda: self._loaded(saved), group)
            if self._publish is not None:
                self._publisher = self._publish(self.tracker)
        except BaseException:
            if self._tracker is not None:
                self._tracker.detach()
            self._tracker = None
            raise
        finally:
            group.close()
        self._saved = None

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,  # noqa: ANN401  Lightning's own signature
        batch: Any,  # noqa: ANN401
        batch_idx: int,
    ) -> None:
        """Call ``step()`` of the tracker and then, if publishing is enabled, of the publisher."""
        del trainer, pl_module, outputs, batch, batch_idx
        self.tracker.step()
        if self._publisher is not None:
            self._publisher.step()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the tracker state to ``checkpoint``: on rank 0 the parts of all ranks, on other ranks this rank's part.

        Called by Lightning on every rank. After ``fit``, the state is that of its end.

        Raises:
            DetachedError: before the first ``fit``, and after one that raised an error.
        """
        del trainer, pl_module
        has_ended = self._tracker is None and self._ended is not None
        checkpoint[_KEY] = self._ended if has_ended else self._state()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Publish the rows that are pending, and keep the tracker's state. All ranks must call this method.

        Raises:
            DeltaTrackerError: the errors of :meth:`~delta_tracker.publisher.publisher.Publisher.publish`. The rows then
                stay pending in the checkpoints that were saved.
        """
        del trainer, pl_module
        if self._publisher is not None:
            self._publisher.publish()
        self._ended = self._state()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close the publisher and detach the tracker.

        Lightning does not call this method if ``fit`` raised an error, so that callbacks can still save a checkpoint
        then. The next ``fit`` does the same at its start.
        """
        del trainer, pl_module, stage
        self._release()

    def _release(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
        if self._tracker is not None:
            self._tracker.detach()
        self._tracker = self._publisher = None

    def _state(self) -> dict[str, Tensor]:
        # A strategy may save on rank 0, or on every rank.
        return self.tracker.state_dict(strategy="gather_or_local")

    def _built(self, pl_module: LightningModule, saved: Mapping[str, Tensor] | None) -> dict[str, object]:
        """Build the tracker. Return what must be the same on every rank."""
        self._tracker = self._build(pl_module)
        state = "no checkpoint" if saved is None else "present" if saved else "missing"
        return {**self._tracker.description(), "tracker state of a checkpoint": state}

    def _loaded(self, saved: Mapping[str, Tensor] | None) -> dict[str, object]:
        if saved is not None:
            self.tracker.load_state_dict(saved)
        return {}
