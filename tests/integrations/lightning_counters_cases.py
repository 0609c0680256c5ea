"""Cases for counters in the checkpoints of a real Lightning trainer with a model of plain torch; each on every rank."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as lightning
import torch
import torchmetrics
from pytorch_lightning.strategies import DDPStrategy
from torch import distributed as dist

from delta_tracker import RankCounters
from delta_tracker.integrations.lightning import CountersCallback
from tests.publisher.publishing_cases import attempt


class _Module(lightning.LightningModule):
    """Counts in a metric that is not persistent, and in one that Lightning restores on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.clicks, self.views = torchmetrics.SumMetric(), torchmetrics.SumMetric()
        self.views.persistent(mode=True)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.clicks.update(batch.sum())
        self.views.update(float(len(batch)))
        return self.layer(batch).sum()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def own(self) -> list[float]:
        return [float(metric.sum_value) for metric in (self.clicks, self.views)]

    def totals(self) -> list[float]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torchmetrics warns of ranks without updates
            return [float(metric.compute()) for metric in (self.clicks, self.views)]


class _EveryRank(DDPStrategy):
    """Each rank writes a checkpoint of its own, and reads it."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        torch.save(checkpoint, f"{filepath}.{dist.get_rank()}")

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return dict(torch.load(f"{checkpoint_path}.{dist.get_rank()}", weights_only=True))


class _Watch(lightning.Callback):
    """Keeps what this rank and all ranks hold when training or validation starts."""

    seen: Any = None

    def on_train_start(self, trainer: Any, module: _Module) -> None:
        self.seen = [module.own(), module.totals()]

    def on_validation_start(self, trainer: Any, module: _Module) -> None:
        self.seen = self.seen or [module.own(), module.totals()]


def _loader(rank: int) -> Any:
    batches = [torch.full((rank + 1, 1), float(each)) for each in range(1, 4)]
    return torch.utils.data.DataLoader(batches, batch_size=None)


def _trainer(world_size: int, every_rank: bool, callbacks: list[Any]) -> lightning.Trainer:
    strategy = _EveryRank if every_rank else DDPStrategy
    return lightning.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy(process_group_backend="gloo"),
        max_epochs=2,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )


def save(rank: int, world_size: int, path: str, every_rank: bool, names: Any = ("clicks", "views")) -> list[Any]:
    """Train and save; return what this rank and all ranks hold."""
    module = _Module()
    counters = RankCounters({name: getattr(module, name) for name in names})
    trainer = _trainer(world_size, every_rank, [CountersCallback(counters)] if names else [])
    trainer.fit(module, _loader(rank))
    trainer.save_checkpoint(path)
    return [module.own(), module.totals()]


def _resumed(rank: int, world_size: int, path: str, every_rank: bool, verb: str, **options: Any) -> list[Any]:
    module, watch = _Module(), _Watch()
    module.clicks.update(77.0)  # a load replaces it
    counters = RankCounters({"clicks": module.clicks, "views": module.views})
    trainer = _trainer(world_size, every_rank, [CountersCallback(counters, **options), watch])
    trainer.fit_loop.max_epochs = 3
    getattr(trainer, verb)(module, _loader(rank), ckpt_path=path)
    return watch.seen


def resume(rank: int, world_size: int, path: str, every_rank: bool) -> list[Any]:
    """Fit and validate from the checkpoint; return what this rank and all ranks held at the start of each."""
    return [_resumed(rank, world_size, path, every_rank, verb) for verb in ("fit", "validate")]


def refusals(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Return the errors of checkpoints that lack counters, or have others, or are damaged on one rank."""
    module = _Module()
    plain = _trainer(world_size, False, [])
    plain.fit(module, _loader(rank))
    plain.save_checkpoint(f"{folder}/none")
    save(rank, world_size, f"{folder}/other", False, ("clicks",))
    save(rank, world_size, f"{folder}/damaged", True)
    if rank == 1:
        file = Path(f"{folder}/damaged.1")
        checkpoint = torch.load(file, weights_only=True)
        checkpoint["delta_tracker_counters"]["rank1of2/header"] = torch.zeros(3, dtype=torch.uint8)
        torch.save(checkpoint, file)
    dist.barrier()
    resume = partial(_resumed, rank, world_size)
    messages = {
        "none": attempt(lambda: resume(f"{folder}/none", False, "fit")),
        "other": attempt(lambda: resume(f"{folder}/other", False, "fit")),
        "damaged": attempt(lambda: resume(f"{folder}/damaged", True, "fit")),
        "no counters": attempt(lambda: CountersCallback({"clicks": module.clicks})),  # type: ignore[arg-type]
    }
    return {**messages, "allowed": resume(f"{folder}/none", False, "fit", is_required=False)}
