"""Programs that train under Lightning with callbacks in any order, and what must hold after each; on every rank."""

from __future__ import annotations

import itertools
import random
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
from pytorch_lightning.tuner import Tuner
from torch import Tensor, distributed as dist

from delta_tracker import Cadence, ModelDeltaTracker, Predictor, Publisher, RankCounters
from delta_tracker.integrations.lightning import TrackerCallback
from delta_tracker.integrations.lightning_counters import CountersCallback
from tests.integrations.lightning_counters_cases import _EveryRank
from tests.publisher.publishing_cases import attempt

_TABLES = ("rows", "bags")
_LETTERS = "TCSWA"

# Callbacks of Lightning that write weights, each with validation after each epoch.
AVERAGES: dict[str, Callable[[Any], lightning.Callback]] = {
    "none": lambda _: lightning.Callback(),
    "mean": lambda _: WeightAveraging(),
    "exponential": lambda _: EMAWeightAveraging(decay=0.5),
    "stochastic": lambda _: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1),
    "pruning": lambda module: ModelPruning("l1_unstructured", [(module.layer, "weight")], amount=0.5),
}

# Where a search runs; None: nowhere. "tuner" is before the first fit, "start" in on_fit_start, a digit is an epoch.
SEARCHES = (None, "lr tuner", "lr start", "lr 0", "lr 1", "size tuner", "size start", "size 0", "size 1")
FAILURES = (None, "setup", "fit start", "batch")
SECONDS = (None, "again", "saver", "newest", "after")


@dataclass(frozen=True)
class Program:
    """A first fit, and what comes after it.

    Args:
        order: callbacks by letter: the tracker's, the counters', a saver, one that watches, and one that averages.
        averages: key of ``AVERAGES``.
        search: one of ``SEARCHES``.
        failure: where the first fit raises, one of ``FAILURES``. The second one continues from OnExceptionCheckpoint's.
        second: the second fit, one of ``SECONDS``: none, with the same trainer, or with a new one from the checkpoint of
            the saver, of ModelCheckpoint, or one that is saved after the first fit.
        every_rank: True if each rank saves its own checkpoint.
    """

    order: str
    averages: str
    search: str | None
    failure: str | None
    second: str | None
    every_rank: bool


def programs(world_size: int, count: int) -> list[dict[str, Any]]:
    """Return random programs, in which each value of each argument occurs."""
    choices = random.Random(world_size)
    orders = ["".join(each) for each in itertools.permutations(_LETTERS)]
    searches = [each for each in SEARCHES if world_size == 1 or "size" not in (each or "")]  # as Lightning requires

    def drawn(values: Any) -> Iterator[Any]:
        while True:
            yield from choices.sample(values, len(values))

    columns = [drawn(each)
        for each in (orders, list(AVERAGES), searches, (None, None, None, *FAILURES), SECONDS, (False, True))
    ]
    return [asdict(Program(*(next(each) for each in columns))) for _ in range(count)]


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
        if self.failure == "batch" and self.trainer.global_step >= 4 and not is_searching:
            raise ValueError("the real error")
        (ids,) = batch
        self.clicks.update(1.0)
        self.views.update(1.0)
        return (self.layer(self.rows(ids)).mean() + self.bags(ids).mean() - 1).square()

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

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

    def __init__(self, callback: TrackerCallback) -> None:
        self.callback = callback
        self.held: dict[str, Tensor] = {}
        self.is_training = False
        self.num_before = 0

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self.held = self.held or module.tables()
        self.is_training = False
        self.num_before = trainer.global_step  # of a trainer that continues without a checkpoint

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["watch"] = self.held

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        if not self.is_training:  # whoever reads deltas goes back with the trainer, but not in a search
            self.held = checkpoint["watch"]

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.is_training = True
        self._count(trainer)

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step % 4 == 0:
            self._read(module)

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self._count(trainer)
        if trainer.current_epoch % 2:
            self._read(module)

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        if self.callback._tracker is not None:  # not released yet
            self._count(trainer)

    def _count(self, trainer: Any) -> None:
        assert self.callback.tracker.num_batches == trainer.global_step - self.num_before

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

    def trainer(self, module: _Module, max_epochs: int, *, resumes: bool = False) -> lightning.Trainer:
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
        return lightning.Trainer(
            accelerator="cpu",
            devices=world_size,
            strategy=strategy if world_size > 1 else "auto",
            max_epochs=max_epochs,
            callbacks=[*first, *(by_letter[each] for each in self.program.order), newest],
            default_root_dir=self.folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    def check(self, module: _Module, trainer: lightning.Trainer) -> None:
        """Compare the totals of both counters with the batches, and a predictor with the model."""
        steps = trainer.global_step
        assert (float(module.clicks.sum_value), float(module.views.sum_value)) == (steps, steps)
        assert attempt(lambda: self.callback.tracker).startswith("DetachedError")
        served = {name: torch.full((40, 4), -1.0) for name in _TABLES}
        Predictor(served, self.url).sync()
        for name, weight in module.tables().items():
            assert torch.equal(served[name], weight), f"{name}: {int((served[name] != weight).any(1).sum())} rows differ"


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
    run.check(module, trainer)
    if program.second == "again":
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module)
        run.check(module, trainer)
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
    run.check(module, trainer)


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
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            failed.append(f"{values}: {type(error).__name__}: {error} ({where.filename}:{where.lineno})")
            if world_size > 1:  # the ranks may be out of step
                break
    return failed
