"""Callback that adds tracking, checkpoints and publishing to a PyTorch Lightning ``Trainer``.

Import the callback with ``from delta_tracker.integrations.lightning import TrackerCallback``. The import raises
:class:`~delta_tracker.errors.MissingExtraError` if neither ``pytorch_lightning`` nor ``lightning`` is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self
from weakref import ref

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


@dataclass(frozen=True)
class _Saved:
    """Tracker state that belongs to a module's weights while no tracker is attached to them.

    Args:
        state: the state; empty for a checkpoint without one; None if rows may have changed unseen.
        weights: each parameter of the module and its version counter, which in-place writes increment.
    """

    state: Mapping[str, Tensor] | None
    weights: list[tuple[ref[Tensor], int]]

    @classmethod
    def of(cls, module: nn.Module, state: Mapping[str, Tensor]) -> Self:
        """Return a state that belongs to the weights that ``module`` has now."""
        return cls(state, [(ref(each), each._version) for each in module.parameters()])  # noqa: SLF001

    def belongs_to(self, module: nn.Module) -> bool:
        """Return True if ``module`` is the same module, and no parameter was written since."""
        now = list(module.parameters())
        return len(now) == len(self.weights) and all(
            held() is each and each._version == version  # noqa: SLF001
            for each, (held, version) in zip(now, self.weights, strict=True)
        )


_UNSEEN = _Saved(None, [])

# Key of a checkpoint of Lightning's WeightAveraging, which has the average in "state_dict" and the weights here.
_AVERAGED = "current_model_state"


class TrackerCallback(Callback):
    """Callback that builds the tracker when ``fit`` starts, steps it after each batch, and checkpoints its state.

    The state is part of every checkpoint, whichever ranks the strategy saves on: the checkpoint of rank 0 has the parts
    of all ranks, and the checkpoint of any other rank has the part of this rank. After the model is restored, each rank
    loads the rows of its own shards, at any world size. If the checkpoint has no tracker state, every row is marked as
    changed. At the world size of the save, each rank also loads its own state of each registered counter.

    When ``fit`` starts, all ranks compare their trackers and the states that they load. If these differ, or if a rank
    fails, all ranks raise an error. This is a collective.

    A later ``fit`` without a checkpoint builds a new tracker, in which every row counts as changed. If a checkpoint is
    restored during ``fit``, as learning rate and batch size finders do, the tracker loads its state, every row counts
    as changed, and the publisher is built again after the next batch.

    The callback moves itself to the front of ``trainer.callbacks``, because other callbacks save and restore
    checkpoints in the hooks that it uses.

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
            It is built when training starts, so that a search by Lightning's ``Tuner`` takes over no stream.

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
        self._saved: _Saved | None = None  # None before the first fit or checkpoint

    @staticmethod
    def state_of(checkpoint: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """Return the tracker state in a checkpoint of Lightning, for ``tracker.load_state_dict``.

        ``load_from_checkpoint`` calls no callback. Call this method with the same checkpoint, and load the state after
        the model. The state is empty, so that every row counts as changed, if the checkpoint has none, or if its
        ``state_dict`` is an average of the weights (of ``WeightAveraging``) and not the weights that were tracked.

        Args:
            checkpoint: the loaded file.
        """
        return {} if _AVERAGED in checkpoint else checkpoint.get(_KEY, {})

    @property
    def tracker(self) -> ModelDeltaTracker:
        """Tracker of the current ``fit``.

        Raises:
            DetachedError: before ``fit`` starts, after it ends, and after :meth:`on_fit_start` raised an error.
        """
        if self._tracker is None:
            raise DetachedError().advising("Use it while Trainer.fit() runs, from on_fit_start to on_fit_end")
        return self._tracker

    @property
    def publisher(self) -> Publisher | None:
        """Publisher of the current ``fit``; None if publishing is disabled or training has not started."""
        return self._publisher

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Release what a ``fit`` that raised has left, and become the first callback of ``trainer``."""
        del pl_module
        trainer.callbacks = [self, *(each for each in trainer.callbacks if each is not self)]
        self._release()
        if stage == "fit" and self._saved is not None:
            self._saved = _UNSEEN  # replaced if this fit loads a checkpoint

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Load the tracker state of ``checkpoint``, in :meth:`on_fit_start` if no tracker exists yet.

        If a tracker exists, all ranks must call this method. It closes the publisher and marks every row as changed.

        Raises:
            RankMismatchError: if the loaded states of the ranks differ, or if another rank failed.
            RankLostError: if a rank died or did not call this method in time.
            Exception: the error that was raised while the state was loaded.
        """
        state = checkpoint.get(_KEY, {}) if _restores_weights(trainer) else self.state_of(checkpoint)
        saved = _Saved.of(pl_module, state)
        if self._tracker is None:
            self._saved = saved
            return
        self._close_publisher()  # it reserves a consumer
        group = RankGroup("trackers", "Trainer.fit(...)", DEFAULT_TIMEOUT)
        try:
            agree(lambda: self._loaded(saved), group)
        finally:
            group.close()
        # A consumer may have read rows that the restore has replaced.
        self._mark_everything()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Build the tracker and load the state of the checkpoint, if there is one. All ranks must call this method.

        If it raises an error, the tracker is detached.

        Raises:
            RankMismatchError: if the trackers or the loaded states of the ranks differ, or if another rank failed.
            RankLostError: if a rank died or did not build its tracker in time.
            Exception: the error that was raised while the tracker was built or its state loaded.
        """
        del trainer
        self._release()
        saved = self._saved
        group = RankGroup("trackers", "Trainer.fit(...)", DEFAULT_TIMEOUT)
        try:
            agree(lambda: self._built(pl_module), group)
            agree(lambda: self._loaded(saved), group)
        except BaseException:
            self._release()
            raise
        finally:
            group.close()
        self._saved = _UNSEEN

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Build the publisher, if publishing is enabled. All ranks must call this method.

        Raises:
            Exception: the error that was raised while the publisher was built.
        """
        del trainer, pl_module
        self._open_publisher()

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
        publisher = self._open_publisher()
        if publisher is not None:
            publisher.step()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the tracker state to ``checkpoint``: on rank 0 the parts of all ranks, on other ranks this rank's part.

        Called by Lightning on every rank. After ``fit``, the state is that of its end, or of the checkpoint that
        was loaded since. It is empty, so that every row counts as changed when it is loaded, if the weights were
        written since then, after a ``fit`` that raised an error and was followed by another call of ``trainer``, and
        before the first ``fit``.
        """
        del trainer
        checkpoint[_KEY] = self._unattached(pl_module) if self._tracker is None else self._state()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Publish the rows that are pending, and keep the tracker's state. All ranks must call this method.

        Raises:
            DeltaTrackerError: the errors of :meth:`~delta_tracker.publisher.publisher.Publisher.publish`. The rows then
                stay pending in the checkpoints that were saved.
        """
        del trainer
        publisher = self._open_publisher()
        if publisher is not None:
            publisher.publish()
        self._saved = _Saved.of(pl_module, self._state())

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close the publisher and detach the tracker.

        Lightning does not call this method if ``fit`` raised an error, so that callbacks can still save a checkpoint
        then. :meth:`setup` does the same at the next call of ``trainer``.
        """
        del trainer, pl_module, stage
        self._release()

    def _release(self) -> None:
        self._close_publisher()
        if self._tracker is not None:
            self._tracker.detach()
        self._tracker = None

    def _open_publisher(self) -> Publisher | None:
        if self._publisher is None and self._publish is not None:
            self._publisher = self._publish(self.tracker)
        return self._publisher

    def _close_publisher(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
        self._publisher = None

    def _state(self) -> Mapping[str, Tensor]:
        # A strategy may save on rank 0, or on every rank.
        return self.tracker.state_dict(strategy="gather_or_local")

    def _unattached(self, pl_module: LightningModule) -> Mapping[str, Tensor]:
        """Return the state that belongs to the weights of ``pl_module`` now."""
        saved = self._saved
        return saved.state if saved and saved.state and saved.belongs_to(pl_module) else {}

    def _built(self, pl_module: LightningModule) -> dict[str, object]:
        """Build the tracker. Return what must be the same on every rank."""
        self._tracker = self._build(pl_module)
        return self._tracker.description()

    def _loaded(self, saved: _Saved | None) -> dict[str, object]:
        """Load a state. Return what must be the same on every rank."""
        if saved is None:
            found = "no checkpoint"
        elif saved.state is None:
            found = "an earlier fit"
            self._mark_everything()
        else:
            found = "present" if saved.state else "missing"
            self.tracker.load_state_dict(saved.state)
        return {"tracker state of a checkpoint": found}

    def _mark_everything(self) -> None:
        for fqn in self.tracker.tables:
            self.tracker.mark_changed(fqn)


def _restores_weights(trainer: Trainer) -> bool:
    """Return True if a callback replaces the average in the checkpoint by the weights that were tracked."""
    kinds = {kind.__name__ for each in trainer.callbacks for kind in type(each).__mro__}
    return trainer.state.fn == "fit" and "WeightAveraging" in kinds
