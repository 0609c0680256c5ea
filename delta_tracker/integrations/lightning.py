"""A callback that tracks, checkpoints and publishes under a PyTorch Lightning ``Trainer``.

Import it where Lightning is installed: ``from delta_tracker.integrations.lightning import TrackerCallback``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from delta_tracker.errors import DetachedError, MissingExtraError
from delta_tracker.publisher.publisher import Publisher
from delta_tracker.tracker.tracker import ModelDeltaTracker

try:
    from pytorch_lightning import Callback, LightningModule, Trainer
except ModuleNotFoundError as missing:
    raise MissingExtraError(missing.name or "pytorch_lightning", "lightning") from missing

_KEY = "delta_tracker"


class TrackerCallback(Callback):
    """Builds the tracker when ``fit`` starts, steps it after each batch, and puts its state into every checkpoint.

    Lightning writes rank 0's checkpoint alone, so the parts of all ranks are gathered on rank 0 for it. At a restore
    every rank takes the rows of its own shards out of it, at any world size; the model is restored before. From a
    checkpoint without tracker state every row counts as changed.

    Whoever trains with TorchRec under Lightning has to keep its ``DistributedDataParallel`` away from the sharded
    model, and to save and restore the sharded tensors: the callback does neither.

    Args:
        build: makes the tracker, once the module's sharded model stands.
        publish: makes the publisher of a tracker, whose :meth:`~delta_tracker.publisher.publisher.Publisher.step` is
            then called after each batch: give it a cadence. None to publish nothing.

    Raises:
        MissingExtraError: at the import, if ``pytorch_lightning`` is not installed.
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

    @property
    def tracker(self) -> ModelDeltaTracker:
        """The tracker.

        Raises:
            DetachedError: before ``fit`` has started and after it has ended.
        """
        if self._tracker is None:
            raise DetachedError
        return self._tracker

    @property
    def publisher(self) -> Publisher | None:
        """The publisher, None if there is none."""
        return self._publisher

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep what :meth:`on_fit_start` restores: the tracker is not built yet."""
        del trainer, pl_module
        self._saved = checkpoint.get(_KEY, {})

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Build tracker and publisher, and restore the tracker between the two."""
        del trainer
        self._tracker = self._build(pl_module)
        if self._saved is not None:
            self._tracker.load_state_dict(self._saved)
            self._saved = None
        if self._publish is not None:
            self._publisher = self._publish(self._tracker)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,  # noqa: ANN401  Lightning's own signature
        batch: Any,  # noqa: ANN401
        batch_idx: int,
    ) -> None:
        """Count the batch, and publish if it is time."""
        del trainer, pl_module, outputs, batch, batch_idx
        self.tracker.step()
        if self._publisher is not None:
            self._publisher.step()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Gather the state on rank 0. A collective, as Lightning's saving of a checkpoint is."""
        del trainer, pl_module
        checkpoint[_KEY] = self.tracker.state_dict(strategy="gather")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close the publisher and detach the tracker, whatever ended ``fit``."""
        del trainer, pl_module, stage
        if self._publisher is not None:
            self._publisher.close()
        if self._tracker is not None:
            self._tracker.detach()
        self._tracker = self._publisher = None
