"""Train under PyTorch Lightning with a callback that tracks rows, publishes on a cadence and saves checkpoints.

Shows the settings that Lightning needs for TorchRec, and a second ``fit`` that resumes from the checkpoint and
continues the same stream. Run it: ``python -m examples.lightning_trainer``
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

import pytorch_lightning as lightning
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.utils.data import DataLoader, TensorDataset
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from delta_tracker import Cadence, ModelDeltaTracker, Predictor, Publisher
from delta_tracker.integrations.lightning import TrackerCallback

NUM_ROWS, COLUMNS = 1000, 8
TABLE = "model.embedding_bags.item"


class Strategy(DDPStrategy):
    """Strategy that neither wraps nor loads the model, because TorchRec's DMP does both."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return model

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:  # noqa: FBT001, FBT002
        """Do nothing: ``Recommender.on_load_checkpoint`` loads the model."""


class Recommender(lightning.LightningModule):
    """Model with one table and a bias."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def configure_model(self) -> None:
        """Shard the model; the process group exists by now."""
        config = EmbeddingBagConfig(name="item", num_embeddings=NUM_ROWS, embedding_dim=COLUMNS, feature_names=["item"])
        collection = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
        self.model = DistributedModelParallel(collection, device=torch.device("cpu"))
        self.bias = nn.Parameter(torch.zeros(1))

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        del batch_idx
        (items,) = batch
        features = KeyedJaggedTensor(["item"], items, lengths=torch.ones_like(items))
        return (self.model(features).values().sum(dim=1) + self.bias - 1).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of the dense part; the table's optimizer is fused."""
        return torch.optim.SGD([self.bias], lr=0.1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save sharded tensors with DCP, next to Lightning's file."""
        checkpoint["state_dict"] = {}
        dcp.save({"model": self.model, "bias": self.bias.data}, checkpoint_id=f"{self.folder}/model")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load the sharded tensors; the callback loads the tracker afterwards."""
        del checkpoint
        dcp.load({"model": self.model, "bias": self.bias.data}, checkpoint_id=f"{self.folder}/model")


class Compare(lightning.Callback):
    """Callback that compares a predictor with the trainer at the end of training."""

    def __init__(self, tracking: TrackerCallback, url: str) -> None:
        self.tracking, self.url = tracking, url

    def on_fit_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Sync a predictor and compare its rows. ``TrackerCallback`` comes first, and has published the last ones."""
        del pl_module
        publisher = self.tracking.publisher
        assert publisher is not None
        served = torch.empty(NUM_ROWS, COLUMNS)
        version = Predictor({TABLE: served}, self.url).sync()
        assert served.equal(self.tracking.tracker.read_rows(TABLE))
        print(f"batch {trainer.global_step}: generation {publisher.generation}, version {version}, equal")


def fit(folder: str, num_batches: int, checkpoint: str | None) -> None:
    """Train up to a number of batches, from a checkpoint if one is given."""
    url = f"file://{folder}/stream"
    tracking = TrackerCallback(
        build=ModelDeltaTracker,
        publish=lambda tracker: Publisher(tracker, url, cadence=Cadence(batches=5)),
    )
    items = torch.randint(0, NUM_ROWS, (num_batches, 64), generator=torch.Generator().manual_seed(0))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=Strategy(process_group_backend="gloo"),
        max_steps=num_batches,
        callbacks=[tracking, Compare(tracking, url), ModelCheckpoint(folder, "newest", every_n_train_steps=10)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(TensorDataset(items), batch_size=None)
    trainer.fit(Recommender(folder), loader, ckpt_path=checkpoint)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        fit(folder, 10, None)
        fit(folder, 20, f"{folder}/newest.ckpt")
