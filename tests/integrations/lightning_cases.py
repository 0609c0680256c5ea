"""Cases for the callback under a real Lightning trainer; each runs on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytorch_lightning as lightning
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.strategies import DDPStrategy
from torch import distributed as dist
from torch.distributed import checkpoint as dcp

from delta_tracker import ModelDeltaTracker, Predictor, Publisher, TrackingMode
from delta_tracker.integrations.lightning import TrackerCallback
from delta_tracker.publisher.cadence import Cadence
from tests.models import Spec, Table, batch, shard
from tests.publisher.publishing_cases import assert_equal, attempt, empty_model
from tests.tracker.checkpointing_cases import dump


class _Sharded(DDPStrategy):
    """TorchRec synchronizes its model itself; the module below restores it."""

    def load_model_state_dict(self, checkpoint: dict[str, Any], strict: bool = True) -> None: ...

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        return model


class _Module(lightning.LightningModule):
    def __init__(self, spec: Spec, folder: str) -> None:
        super().__init__()
        self.spec, self.folder = spec, folder

    def configure_model(self) -> None:
        self.sharded = shard(self.spec)

    def training_step(self, features: Any, batch_idx: int) -> torch.Tensor:
        return self.sharded(features)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([each for name, each in self.named_parameters() if "dense" in name], lr=0.1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {}
        dcp.save({"model": self.sharded}, checkpoint_id=f"{self.folder}/model")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        dcp.load({"model": self.sharded}, checkpoint_id=f"{self.folder}/model")


class _Watch(lightning.Callback):
    """Leaves in files what is pending at the start and after each batch, and compares a predictor at the end."""

    def __init__(self, callback: TrackerCallback, folder: str, url: str) -> None:
        self.callback, self.folder, self.url = callback, folder, url
        self.seen: dict[str, Any] = {}

    def _dump(self, moment: str) -> None:
        tracker = self.callback.tracker
        file = f"{moment}-{dist.get_rank()}of{dist.get_world_size()}.pt"
        dump(tracker, tracker._log.state(), Path(self.folder) / file)
        self.seen[moment] = {"batches": tracker.num_batches, "restored": str(tracker.restored)}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._dump("loaded")

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self._dump("saved")

    def on_train_end(self, trainer: Any, module: Any) -> None:
        publisher, tracker = self.callback.publisher, self.callback.tracker
        publisher.publish()
        self.seen["version"] = publisher.version
        held = empty_model(tracker)
        Predictor(held, self.url).sync()
        assert_equal(tracker, held)
        self.seen["errors"] = tracker.num_hook_errors


def fit(rank: int, world_size: int, folder: str, url: str, num_batches: int, checkpoint: str | None) -> dict[str, Any]:
    """Train up to a number of batches, with a checkpoint at every third; from a checkpoint, if one is named."""
    spec = Spec([Table("t", 17, "row"), Table("u", 9, f"table:{world_size - 1}")])
    generator = torch.Generator().manual_seed(rank + num_batches)
    callback = TrackerCallback(
        lambda module: ModelDeltaTracker(module.sharded, ["a", "b", "c"], mode=TrackingMode.EMBEDDING),
        lambda tracker: Publisher(tracker, url, "c", cadence=Cadence(batches=2)),
    )
    watch = _Watch(callback, folder, url)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=_Sharded(process_group_backend="gloo"),
        max_steps=num_batches,
        callbacks=[callback, watch, ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    batches = [batch(spec, generator) for _ in range(20)]
    loader = torch.utils.data.DataLoader(batches, batch_size=None, collate_fn=lambda features: features)
    trainer.fit(_Module(spec, folder), loader, ckpt_path=checkpoint)
    assert attempt(lambda: callback.tracker).startswith("DetachedError")
    return watch.seen
