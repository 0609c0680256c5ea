"""Cases for the callback under a real Lightning trainer; each runs on every rank."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytorch_lightning as lightning
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.strategies import DDPStrategy
from torch import distributed as dist
from torch.distributed import checkpoint as dcp

from delta_tracker import ModelDeltaTracker, Predictor, Publisher, TrackingMode
from delta_tracker.errors import InvalidArgumentError
from delta_tracker.integrations.lightning import TrackerCallback
from delta_tracker.publisher.cadence import Cadence
from delta_tracker.tracker.checkpoint import tracker_checkpoint
from tests.models import Spec, Table, batch, shard
from tests.publisher.publishing_cases import assert_equal, attempt, empty_model
from tests.tracker.checkpointing_cases import dump
from tests.tracker.rank_states_cases import KINDS, count, held, totals, values_of


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


class _Pending(lightning.Callback):
    """Leaves the number of pending rows of a consumer at the start and the end."""

    def __init__(self, callback: TrackerCallback) -> None:
        self.callback = callback
        self.counts: list[int] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.counts.append(sum(self.callback.tracker.num_pending("a").values()))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.on_train_start(trainer, module)


def fit_and_save(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Train without reaching the cadence, save after ``fit``, and train again from that checkpoint."""
    spec = Spec([Table("t", 17, "row")])
    url, path = f"file://{folder}/stream", f"{folder}/after.ckpt"
    callback = TrackerCallback(
        lambda module: ModelDeltaTracker(module.sharded, ["a", "c"]),
        lambda tracker: Publisher(tracker, url, "c", cadence=Cadence(batches=1000)),
    )
    features = [batch(spec, torch.Generator().manual_seed(number)) for number in range(2)]
    pending, published = _Pending(callback), []
    for num_batches, checkpoint in ((1, None), (2, path)):
        trainer, module = _small_trainer(num_batches, [callback, pending]), _Module(spec, folder)
        trainer.fit(module, _loader(features), ckpt_path=checkpoint)
        with ModelDeltaTracker(module.sharded) as tracker:
            predictor = Predictor(held := empty_model(tracker), url)
            predictor.sync()
            assert_equal(tracker, held)
            published.append(predictor.version)
        after = attempt(lambda: callback.tracker).partition(":")[0]
        trainer.save_checkpoint(path)
    counts = pending.counts
    return {"published": published, "after": after, "pending": counts[1:2], "resumed": counts[2:3]}


def _small_trainer(
    num_batches: int, callbacks: list[Any], strategy: DDPStrategy | None = None, world_size: int = 1
) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy or _Sharded(process_group_backend="gloo"),
        max_steps=num_batches,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _loader(features: list[Any]) -> Any:
    return torch.utils.data.DataLoader(features, batch_size=None, collate_fn=lambda each: each)


class _Failing(_Module):
    """Raises at the second batch."""

    def training_step(self, features: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 1:
            raise ValueError("batch")
        return super().training_step(features, batch_idx)


def fit_after_an_error(rank: int, world_size: int, folder: str) -> list[str]:
    """Train until an error, save, and train again with the same callback; return what became of the first tracker."""
    spec = Spec([Table("t", 17, "row")])
    callback = TrackerCallback(
        lambda module: ModelDeltaTracker(module.sharded),
        lambda tracker: Publisher(tracker, f"file://{folder}/stream", cadence=Cadence(batches=1)),
    )
    features = [batch(spec, torch.Generator().manual_seed(number)) for number in range(2)]
    trainer = _small_trainer(2, [callback])
    with suppress(ValueError):
        trainer.fit(_Failing(spec, folder), _loader(features))
    tracker, publisher = callback.tracker, callback.publisher
    trainer.save_checkpoint(f"{folder}/after.ckpt")
    seen = [attempt(publisher.publish)]
    _small_trainer(2, [callback]).fit(_Module(spec, folder), _loader(features))
    return [*seen, attempt(tracker.get_delta), attempt(publisher.publish)]


class _Plain(lightning.LightningModule):
    """Has tables without sharding, one with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = torch.nn.EmbeddingBag(20, 4, sparse=True)
        self.rows = torch.nn.Embedding(20, 4)

    def training_step(self, ids: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (self.bag(ids).sum() + self.rows(ids).sum() - 1).square()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit_plain(rank: int, world_size: int, folder: str) -> str:
    """Train plain modules under DDP; return the error without the wrapper of DDP."""
    torch.manual_seed(0)
    url, ids = f"file://{folder}/stream", torch.randint(0, 20, (12, 3))

    def train(build: Any, module: _Plain) -> None:
        callback = TrackerCallback(build, lambda tracker: Publisher(tracker, url, cadence=Cadence(batches=2)))
        trainer = _small_trainer(5, [callback], DDPStrategy(process_group_backend="gloo"), world_size)
        trainer.fit(module, torch.utils.data.DataLoader(ids))

    error = attempt(lambda: train(ModelDeltaTracker, _Plain()))
    module = _Plain()
    train(lambda module: ModelDeltaTracker(module.trainer.strategy.model), module)
    held = {name: torch.full((20, 4), -1.0) for name in ("bag", "rows")}
    Predictor(held, url).sync()
    assert held["bag"].equal(module.bag.weight)
    assert held["rows"].equal(module.rows.weight)
    return error


class _EveryRank(_Sharded):
    """Each rank writes a checkpoint of its own, and reads it."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        file = Path(f"{filepath}.{dist.get_rank()}")
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(checkpoint, file)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return dict(torch.load(f"{checkpoint_path}.{dist.get_rank()}", weights_only=False))


class _Counts(lightning.Callback):
    """Counts at each batch, and leaves what this rank and all ranks hold at the start and at the end."""

    def __init__(self, url: str, path: str) -> None:
        self.url, self.path = url, path
        self.counters: dict[str, Any] = {}
        self.seen: list[Any] = []
        self.callback = TrackerCallback(self.build, self.publish)

    def build(self, module: Any) -> ModelDeltaTracker:
        self.counters = {name: kind() for name, kind in KINDS.items()}
        count(self.counters, [3.0])  # a load replaces it
        tracker = ModelDeltaTracker(module.sharded)
        for name, counter in self.counters.items():
            tracker.register_counter(name, counter)
        return tracker

    def publish(self, tracker: ModelDeltaTracker) -> Publisher:
        return Publisher(tracker, self.url, cadence=Cadence(batches=1), timeout=timedelta(seconds=60))

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.seen.append([held(self.counters), totals(self.counters)])

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        count(self.counters, values_of(dist.get_rank()))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.seen.append([held(self.counters), totals(self.counters)])
        publisher = self.callback.publisher
        publisher.publish()
        self.seen.append([publisher.version, str(self.callback.tracker.restored)])
        trainer.save_checkpoint(self.path)


def _continue(counts: _Counts, strategy: Any, num_batches: int, checkpoint: str | None) -> None:
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy(process_group_backend="gloo"),
        max_steps=num_batches,
        callbacks=[counts.callback, counts],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    spec = Spec([Table("t", 17, "row"), Table("u", 9, f"table:{dist.get_world_size() - 1}")])
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [batch(spec, generator) for _ in range(4)]
    loader = torch.utils.data.DataLoader(batches, batch_size=None, collate_fn=lambda features: features)
    trainer.fit(_Module(spec, str(Path(counts.path).parent)), loader, ckpt_path=checkpoint)


def fit_counting(rank: int, world_size: int, folder: str, every_rank: bool) -> list[Any]:
    """Train, save, and continue from the checkpoint; return what this rank held at the start and the end of both."""
    strategy, path = _EveryRank if every_rank else _Sharded, f"{folder}/checkpoint"
    seen = []
    for number in range(2):
        counts = _Counts(f"file://{folder}/stream", path)
        _continue(counts, strategy, 1 + number, path if number else None)
        seen.append(counts.seen)
    return seen


def packed_once(rank: int, world_size: int) -> list[Any]:
    """Save a checkpoint; return how often this rank encoded its state, and the ranks whose parts it has."""
    callback = TrackerCallback(lambda _: ModelDeltaTracker(shard(Spec([Table("t", 17, "row")]))))
    callback.on_fit_start(None, None)
    checkpoint: dict[str, Any] = {}
    with mock.patch.object(tracker_checkpoint, "pack", wraps=tracker_checkpoint.pack) as pack:
        callback.on_save_checkpoint(None, None, checkpoint)
    callback.teardown(None, None, "fit")
    return [pack.call_count, sorted({key.split("/")[0] for key in checkpoint["delta_tracker"]})]


def disagreements(rank: int, world_size: int, folder: str) -> dict[str, str]:
    """Return the errors of a fit whose ranks build different trackers, or load different states."""
    path = f"{folder}/checkpoint"
    _continue(_Counts(f"file://{folder}/stream", path), _EveryRank, 1, None)

    def counters(counts: _Counts, tracker: ModelDeltaTracker) -> None:
        tracker.register_counter("one" if rank else "other", KINDS["sum"]())

    def fails(counts: _Counts, tracker: ModelDeltaTracker) -> None:
        if rank == 1:
            raise InvalidArgumentError("built", rank, "Build it")

    messages = {}
    for name, change in (("counters", counters), ("build", fails)):
        counts = _Counts(f"file://{folder}/{name}", path)
        counts.callback = TrackerCallback(partial(_changed, counts, change), counts.publish)
        messages[name] = attempt(partial(_continue, counts, _EveryRank, 2, None))
    if rank == 1:
        file = Path(f"{path}.1")
        checkpoint = torch.load(file, weights_only=False)
        torch.save({**checkpoint, "delta_tracker": {}}, file)
    counts = _Counts(f"file://{folder}/lacking", path)
    messages["lacking"] = attempt(partial(_continue, counts, _EveryRank, 2, path))
    if rank == 1:
        torch.save({**checkpoint, "delta_tracker": {"rank1of2/header": torch.zeros(3, dtype=torch.uint8)}}, file)
    messages["damaged"] = attempt(partial(_continue, counts, _EveryRank, 2, path))
    return messages


def _changed(counts: _Counts, change: Any, module: Any) -> ModelDeltaTracker:
    tracker = counts.build(module)
    change(counts, tracker)
    return tracker
