"""Programs that train under Lightning with callbacks in any order, and what must hold after each; on every rank."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytorch_lightning as lightning
import torch
import torchmetrics
from pytorch_lightning.callbacks import (
    BatchSizeFinder,
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from pytorch_lightning.strategies import SingleDeviceStrategy
from pytorch_lightning.tuner import Tuner
from torch import Tensor
from torch import distributed as dist

from delta_tracker import Cadence, ModelDeltaTracker, Predictor, Publisher, RankCounters
from delta_tracker.integrations.lightning import CountersCallback, TrackerCallback
from tests.integrations.lightning_counters_cases import _EveryRank
from tests.integrations.lightning_programs import Program
from tests.publisher.publishing_cases import attempt

_TABLES = ("rows", "bags")

# Callbacks of Lightning that write weights, each with validation after each epoch.
AVERAGES: dict[str, Callable[[Any], lightning.Callback]] = {
    "none": lambda _: lightning.Callback(),
    "mean": lambda _: WeightAveraging(),
    "exponential": lambda _: EMAWeightAveraging(decay=0.5),
    "stochastic": lambda _: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1),
    "pruning": lambda module: ModelPruning("l1_unstructured", [(module.layer, "weight")], amount=0.5),
}


class _Module(lightning.LightningModule):
    """Has a sparse and a dense table, and two counters that no checkpoint of Lightning has."""

    def __init__(self, failure: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = torch.nn.Embedding(40, 4, sparse=True)
        self.bags = torch.nn.EmbeddingBag(40, 4)
        self.layer = torch.nn.Linear(4, 1)
        self.clicks, self.views = torchmetrics.SumMetric(), torchmetrics.SumMetric()
        self.lr, self.batch_size, self.failure = 0.01, 2, failure

    def setup(self, stage: str) -> None:
        if self.failure == "setup":
            raise ValueError("the real error")

    def on_fit_start(self) -> None:
        if self.failure == "fit start":
            raise ValueError("the real error")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        is_searching = not any(isinstance(each, TrackerCallback) for each in self.trainer.callbacks)
        if is_searching and _Watch.current is not None:
            _Watch.current.read_in_search(self)
        if self.failure == "batch" and self.trainer.global_step >= 4 and not is_searching:
            raise ValueError("the real error")
        (ids,) = batch
        self.clicks.update(1.0)
        self.views.update(1.0)
        return (self.layer(self.rows(ids)).mean() + self.bags(ids).mean() - 1).square()

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...  # averages are swapped in

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> Any:
        ids = torch.randint(0, 20, (24, 3), generator=torch.Generator().manual_seed(1))
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ids), batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader([torch.zeros(1)])

    def tables(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).weight.detach().clone() for name in _TABLES}


class _LearningRate(LearningRateFinder):
    def __init__(self, epoch: int | None) -> None:
        super().__init__(num_training_steps=3, update_attr=False)
        self.epoch = epoch

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        if self.epoch is None:
            self.lr_find(trainer, module)

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == self.epoch:
            self.lr_find(trainer, module)


class _Size(BatchSizeFinder):
    def __init__(self, epoch: int | None) -> None:
        super().__init__(steps_per_trial=2, max_trials=2)
        self.epoch = epoch

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        if self.epoch is None:
            self.scale_batch_size(trainer, module)

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == self.epoch:
            self.scale_batch_size(trainer, module)


class _Saver(lightning.Callback):
    """Saves after every third batch."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step % 3 == 0:
            trainer.save_checkpoint(self.path)


class _Watch(lightning.Callback):
    """Reads a consumer now and then, and compares each delta with the rows that changed since the last read."""

    current: ClassVar[_Watch | None] = None  # not an attribute of the module, which some callbacks copy

    def __init__(self, callback: TrackerCallback) -> None:
        self.callback = callback
        self.held: dict[str, Tensor] = {}
        self.is_training = False
        self.num_before = 0
        self.is_counting = True  # False if the batches of an earlier fit are counted in no checkpoint

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        _Watch.current = self
        self.held = self.held or module.tables()
        self.is_training = False
        self.num_before = trainer.global_step  # of a trainer that continues without a checkpoint

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["watch"] = self.held

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        if not self.is_training:  # readers of deltas restart with the trainer, but not in a search
            self.held = checkpoint["watch"]

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.is_training = True
        self._count(trainer)
        self._read(module)

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step % 4 == 0:
            self._read(module)

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self._count(trainer)
        self._read(module)

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        if self.callback._tracker is not None:  # not released yet
            self._count(trainer)

    def _count(self, trainer: Any) -> None:
        assert not self.is_counting or self.callback.tracker.num_batches == trainer.global_step - self.num_before

    def read_in_search(self, module: _Module) -> None:
        if self.callback._tracker is not None:
            self._read(module)

    def _read(self, module: _Module) -> None:
        delta, now = self.callback.tracker.get_delta("audit"), module.tables()
        for name, old in self.held.items():
            changed = set((now[name] != old).any(1).nonzero()[:, 0].tolist())
            assert changed <= set(delta[name].ids.tolist()), f"updates of {name} are lost"
        self.held = now


@dataclass
class _Run:
    """The callbacks of a program, which both fits share, and its files."""

    program: Program
    folder: Path

    def __post_init__(self) -> None:
        self.url = f"file://{self.folder}/stream"
        self.callback = TrackerCallback(self._build, self._publish)
        self.watch = _Watch(self.callback)

    def _build(self, module: Any) -> ModelDeltaTracker:
        tracker = ModelDeltaTracker(module.trainer.strategy.model, ["stream", "audit"])
        tracker.register_counter("clicks", module.clicks)
        return tracker

    def _publish(self, tracker: ModelDeltaTracker) -> Publisher:
        return Publisher(tracker, self.url, "stream", cadence=Cadence(batches=2))

    def path(self, name: str) -> str:
        return str(self.folder / f"{name}.ckpt")

    def trainer(self, module: _Module, max_epochs: int, *, resumes: bool = False, **options: Any) -> lightning.Trainer:
        world_size = dist.get_world_size()
        by_letter: dict[str, lightning.Callback] = {
            "T": self.callback,
            "C": CountersCallback(RankCounters({"views": module.views}), is_required=False),
            "S": _Saver(self.path("saver")),
            "W": self.watch,
            "A": AVERAGES[self.program.averages](module),
        }
        first: list[Any] = [OnExceptionCheckpoint(self.folder)] if self.program.failure else []
        kind, _, place = (self.program.search or " ").partition(" ")
        if self.program.averages == "pruning" and place in {"0", "1"}:
            place = ""  # Lightning cannot load the checkpoint of a pruned module into it
        # After a search in on_fit_start, Lightning restores no loop and no optimizer from the checkpoint.
        if place in {"0", "1"} or (place == "start" and not resumes):
            epoch = None if place == "start" else int(place)
            first.append(_LearningRate(epoch) if kind == "lr" else _Size(epoch))
        newest = ModelCheckpoint(self.folder, "newest", every_n_train_steps=5)
        strategy: Any = _Strategy(process_group_backend="gloo") if self.program.every_rank else "ddp"
        is_validating = self.program.averages in {"mean", "exponential"}  # which swap weights for it
        chosen: dict[str, Any] = {
            # In later epochs, Lightning's searches train on a batch only without validation.
            "limit_val_batches": 1.0 if is_validating else 0,
            "devices": world_size,
            "strategy": strategy if world_size > 1 else "auto",
            "callbacks": [*first, *(by_letter[each] for each in self.program.order), newest],
        }
        return lightning.Trainer(
            accelerator="cpu",
            max_epochs=max_epochs,
            default_root_dir=self.folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **chosen | options,
        )

    def check(self, module: _Module, steps: int) -> None:
        """Compare the totals of both counters with a number of batches, and a predictor with the model."""
        assert (float(module.clicks.sum_value), float(module.views.sum_value)) == (steps, steps)
        assert attempt(lambda: self.callback.tracker).startswith("DetachedError")
        served = {name: torch.full((40, 4), -1.0) for name in _TABLES}
        Predictor(served, self.url).sync()
        for name, weight in module.tables().items():
            assert torch.equal(served[name], weight), (
                f"{name}: {int((served[name] != weight).any(1).sum())} rows differ"
            )


class _Strategy(_EveryRank):
    """Each rank writes its own checkpoint."""

    def remove_checkpoint(self, filepath: Any) -> None:
        Path(f"{filepath}.{dist.get_rank()}").unlink(missing_ok=True)


def _perform(program: Program, folder: Path) -> None:
    run = _Run(program, folder)
    module = _Module(program.failure)
    trainer = run.trainer(module, 2)
    kind, _, place = (program.search or " ").partition(" ")
    if place == "tuner" and program.failure is None:
        tuner = Tuner(trainer)
        if kind == "lr":
            tuner.lr_find(module, num_training=3, update_attr=False)
        else:
            tuner.scale_batch_size(module, steps_per_trial=2, max_trials=2)
    if program.failure is not None:
        try:
            trainer.fit(module)
        except ValueError as error:
            assert str(error) == "the real error"  # noqa: PT017  the error itself, and not one that hides it
        else:
            raise AssertionError("nothing was raised")
        _resume(run, run.path("on_exception"))
        return
    trainer.fit(module)
    run.check(module, trainer.global_step)
    if program.second == "again":
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module)
        run.check(module, trainer.global_step)
    elif program.second is not None:
        path = run.path(program.second)
        if program.second == "after":
            trainer.save_checkpoint(path)
        _resume(run, path)


def _resume(run: _Run, path: str) -> None:
    module = _Module()
    trainer = run.trainer(module, 3, resumes=True)
    trainer.fit(module, ckpt_path=path)
    assert trainer.current_epoch == 3
    run.check(module, trainer.global_step)


def perform(rank: int, world_size: int, folder: str, programs: list[dict[str, Any]]) -> list[str]:
    """Run programs one after the other; return the errors of those that fail."""
    failed = []
    for number, values in enumerate(programs):
        own = Path(folder) / str(number)
        if rank == 0:
            own.mkdir()
        dist.barrier()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Lightning's own
                _perform(Program(**values), own)
        except Exception as error:  # noqa: BLE001  the other programs run too
            where = traceback.extract_tb(error.__traceback__)[-1]
            failed.append(f"{values}: {type(error).__name__}: {error} ({where.filename}:{where.lineno})")
            if world_size > 1:  # the ranks may be out of step
                break
    return failed


def _plain(folder: str, averages: str = "none") -> _Run:
    return _Run(Program("TCSWA", averages, None, None, None, every_rank=False), Path(folder))


def weights_of_other_checkpoints(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Load and write weights between fits, save, and continue; return what each tracker loaded."""
    run, module, seen = _plain(folder), _Module(), {}
    run.watch.is_counting = False
    trainer = run.trainer(module, 1)
    trainer.fit(module)
    trainer.save_checkpoint(run.path("first"))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    trainer.save_checkpoint(run.path("second"))
    trainer.validate(module, ckpt_path=run.path("first"), verbose=False)
    trainer.save_checkpoint(run.path("first again"))
    with torch.no_grad():
        module.rows.weight[30:] += 1
    trainer.save_checkpoint(run.path("written"))
    # The last two have the counters of the first checkpoint with the model, but 24 batches of the trainer.
    for name, steps in (("second", 36), ("first again", 24), ("written", 24)):
        seen[name] = _continued(run, name, steps)
    # A checkpoint that validation has loaded says nothing of another model.
    other = _Module()
    with torch.no_grad():
        other.rows.weight[30:] += 2
    trainer = run.trainer(other, 3)
    trainer.validate(_Module(), ckpt_path=run.path("second"), verbose=False)
    other.views.reset()
    run.watch.held = {}
    trainer.fit(other)
    run.check(other, trainer.global_step)
    return seen


def averaged_checkpoints(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Continue from a checkpoint with averaged weights, with and without the callback that averages."""
    run, module = _plain(folder, "exponential"), _Module()
    run.watch.is_counting = False
    run.trainer(module, 2).fit(module)
    seen = {"with": _continued(run, "newest")}
    run.program = replace(run.program, averages="none")
    seen["without"] = _continued(run, "newest")
    checkpoint = torch.load(run.path("newest"), weights_only=True)
    loaded = _Module.load_from_checkpoint(run.path("newest"), weights_only=True)
    with ModelDeltaTracker(loaded, ["stream", "audit"]) as tracker:
        tracker.register_counter("clicks", loaded.clicks)
        TrackerCallback.load_into(tracker, checkpoint)
        return {**seen, "pending": {name: len(ids) for name, ids in tracker.get_delta_ids("audit").items()}}


class _Late(SingleDeviceStrategy):
    """Restores checkpoints after the model was set up, as strategies for sharded models do."""

    restore_checkpoint_after_setup = True


def late_checkpoint(rank: int, world_size: int, folder: str) -> str:
    """Continue under a strategy that restores the model after ``on_fit_start``."""
    run, module = _plain(folder), _Module()
    run.trainer(module, 2).fit(module)
    return _continued(run, "newest", strategy=_Late(torch.device("cpu")))


def checkpoint_without_a_trainer(rank: int, world_size: int, folder: str) -> list[Any]:
    """Load a checkpoint with ``load_from_checkpoint``; return what is pending for a consumer, and the counters."""
    run, module = _plain(folder), _Module()
    run.trainer(module, 2).fit(module)
    path = run.path("saver")
    checkpoint = torch.load(path, weights_only=True)
    loaded = _Module.load_from_checkpoint(path, weights_only=True)
    with ModelDeltaTracker(loaded, ["stream", "audit"]) as tracker:
        tracker.register_counter("clicks", loaded.clicks)
        TrackerCallback.load_into(tracker, checkpoint)
        CountersCallback.load_into(RankCounters({"views": loaded.views}), checkpoint)
        held = {name: (loaded.tables()[name] != old).any(1) for name, old in checkpoint["watch"].items()}
        pending = {name: len(ids) for name, ids in tracker.get_delta_ids("audit").items()}
        changed = {name: int(each.sum()) for name, each in held.items()}
        counters = [float(loaded.clicks.sum_value), float(loaded.views.sum_value)]
        return [str(tracker.restored), pending, changed, counters, tracker.num_batches]


class _Restored(lightning.Callback):
    """Keeps what the tracker has loaded when training starts."""

    def __init__(self, callback: TrackerCallback) -> None:
        self.callback = callback
        self.seen = ""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.seen = str(self.callback.tracker.restored).removeprefix("LoadOutcome.")


def _continued(run: _Run, name: str, steps: int = 36, **options: Any) -> str:
    module = _Module()
    trainer = run.trainer(module, 3, resumes=True, **options)
    trainer.callbacks.append(restored := _Restored(run.callback))
    trainer.fit(module, ckpt_path=run.path(name))
    run.check(module, steps)
    return restored.seen


def pruned_table(rank: int, world_size: int, folder: str) -> str:
    """Prune a table during training; return the error."""
    run, module = _plain(folder), _Module()
    trainer = run.trainer(module, 2)
    trainer.callbacks.append(ModelPruning("l1_unstructured", [(module.rows, "weight")], amount=0.5))
    return attempt(lambda: trainer.fit(module))
