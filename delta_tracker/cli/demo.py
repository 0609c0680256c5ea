"""``demo``: run a trainer and a predictor in one process on synthetic data, without torchrec or a network."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import click
import torch
from torch import Tensor, nn

from delta_tracker.cli.numbers import Number
from delta_tracker.cli.output import Output
from delta_tracker.cli.text import count, duration, plain, size
from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor.recorder import Recorder
from delta_tracker.predictor.predictor import Predictor
from delta_tracker.publisher.coordinator import Coordinator, Draft
from delta_tracker.publisher.exchange import Exchange, opened
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Block, IdForm, Kind, Manifest
from delta_tracker.tracker.store.lookups import DeltaStore
from delta_tracker.types import TableSpec

_NUM_USERS, _NUM_ITEMS, _DIM = 100_000, 20_000, 16
_BATCH = 256
_BATCH_SECONDS = 0.02  # the rate of clicks in a small service
_APPLY_SECONDS = 30.0

_HELP = """Train a small model on synthetic clicks, publish its changes and follow with a predictor, in one process.

Writes a stream to --out and keeps it. Try the other commands on it from a second terminal, during the run or later.
Does not need torchrec: it marks changed rows itself instead of using a ModelDeltaTracker and a Publisher. In a checkout
of the project, `make demo` runs a larger demo with MovieLens, torchrec and two ranks.

Exit code 1 if the predictor's tables do not equal the trainer's, bit for bit.

\b
Examples:
  delta-tracker demo
  delta-tracker demo --seconds 60 --out /tmp/demo &  delta-tracker tail /tmp/demo
"""


@click.command("demo", help=_HELP)
@click.option("--out", type=click.Path(path_type=Path), help="New directory.  [default: a temporary one]")
@click.option("--seconds", default=8.0, type=Number(0.1), help="Duration of the training.")
@click.option("--every", default=0.5, type=Number(0.01), help="Seconds between deltas.")
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object on stdout.")
def command(out: Path | None, seconds: float, every: float, *, is_json: bool) -> int:
    """Run the demo, then compare the predictor's tables with the trainer's. Return 1 if they differ, otherwise 0."""
    output = Output(is_json=is_json)
    directory = Path(tempfile.mkdtemp(prefix="delta-tracker-demo-")) if out is None else out.absolute()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InvalidArgumentError("--out", str(out), "Pass a new or empty directory")
    url = directory.as_uri()
    if not is_json:
        output.line(f"the stream is {directory}; in a second terminal: delta-tracker tail {directory}")
    trainer = _Trainer(url)
    served = {fqn: torch.zeros_like(table) for fqn, table in trainer.tables.items()}
    applied: list[float] = []
    losses: list[float] = []
    with output.progress("training", seconds) as progress, Predictor(served, url, name="demo-predictor") as predictor:
        trainer.publish("snapshot")
        predictor.follow()
        deadline = time.monotonic() + seconds
        while not applied or time.monotonic() < deadline:  # at least one delta, even on a slow machine
            now = time.monotonic()
            while trainer.has_nothing_new or time.monotonic() < min(now + every, deadline):
                losses.append(trainer.train())
                time.sleep(_BATCH_SECONDS)
            version = trainer.publish("delta")
            applied.append(_seconds_until_applied(predictor, version))
            progress.advance(time.monotonic() - now)
    return _report(output, directory, trainer, served, _Run(losses, applied))


@dataclass(frozen=True, slots=True)
class _Run:
    """Measurements of one run of the demo.

    Args:
        losses: loss of each batch.
        applied: seconds from the commit of each delta until the predictor had applied it.
    """

    losses: Sequence[float]
    applied: Sequence[float]


class _Trainer:
    """Trainer of a matrix factorization model on random clicks. Most of the clicks involve a few users and items."""

    def __init__(self, url: str) -> None:
        self._random = torch.Generator().manual_seed(0)
        self._model = nn.ModuleDict(
            {"user": nn.Embedding(_NUM_USERS, _DIM, sparse=True), "item": nn.Embedding(_NUM_ITEMS, _DIM, sparse=True)}
        )
        self._tastes = [torch.randn(size, _DIM, generator=self._random) for size in (_NUM_USERS, _NUM_ITEMS)]
        self._tastes[0] = self._tastes[0] / 4 + 0.5  # users differ less than items do
        for table in self._model.parameters():
            nn.init.normal_(table, mean=0.2, std=0.05, generator=self._random)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=40.0)
        self.tables = {name.removesuffix(".weight"): table.detach() for name, table in self._model.named_parameters()}
        self._specs = {fqn: TableSpec(fqn, len(table), _DIM, table.dtype) for fqn, table in self.tables.items()}
        self._changes = DeltaStore()
        self._batch = self._published = 0
        self._writer = Coordinator(Exchange(timedelta(seconds=60)), Recorder("publisher", self))
        self._writer.open(url)
        self.versions: list[Manifest] = []

    @property
    def has_nothing_new(self) -> bool:
        """True if no batch has been trained since the last published version."""
        return self._batch == self._published

    def train(self) -> float:
        """Train on one batch and return the loss."""
        rows = [self._draw(len(table)) for table in self.tables.values()]
        users, items = (tastes[ids] for tastes, ids in zip(self._tastes, rows, strict=True))
        clicks = torch.bernoulli((users * items).sum(1).sigmoid(), generator=self._random)
        user, item = (module(ids) for module, ids in zip(self._model.values(), rows, strict=True))
        loss = nn.functional.binary_cross_entropy_with_logits((user * item).sum(1), clicks)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        for fqn, ids in zip(self.tables, rows, strict=True):
            self._changes.append(self._batch, fqn, ids)
        self._batch += 1
        return loss.item()

    def publish(self, kind: Kind) -> int:
        """Commit a snapshot of all rows, or a delta of the rows changed since the last version; return the version."""
        changed = {fqn: rows.ids for fqn, rows in self._changes.get_delta(self._published).items()}
        self._changes.delete(self._batch)
        draft = Draft(
            kind=kind,
            batches=(self._published, self._batch),
            cut=time.time(),
            tables=self._specs,
            rows=[self._rows(fqn, None if kind == "snapshot" else changed[fqn]) for fqn in self.tables],
        )
        share = self._writer.write(draft)
        if share.message.failure is not None:
            raise share.message.failure
        self._writer.commit(share, [opened(0, share.message.data)])
        self.versions.append(self._writer.follow({}))
        self._published = self._batch
        return self.versions[-1].version

    def _rows(self, fqn: str, ids: Tensor | None) -> BlockRows:
        spec = self._specs[fqn]
        held = self.tables[fqn] if ids is None else self.tables[fqn][ids]
        form: IdForm = "all" if ids is None else "list"
        block = Block(fqn, (0, spec.num_rows), (0, spec.dim), len(held), form, Encoding.F32)
        return BlockRows.of(block, ids, held)

    def _draw(self, num_rows: int) -> Tensor:
        return (torch.rand(_BATCH, generator=self._random).pow(4) * num_rows).long()


def _seconds_until_applied(predictor: Predictor, version: int) -> float:
    """Wait up to 30 seconds until the predictor has applied ``version``. Return the seconds waited."""
    begin = time.monotonic()
    while (predictor.version or 0) < version and time.monotonic() < begin + _APPLY_SECONDS:
        time.sleep(0.001)
    return time.monotonic() - begin


def _report(output: Output, directory: Path, trainer: _Trainer, served: dict[str, Tensor], run: _Run) -> int:
    snapshot, *deltas = trainer.versions
    is_equal = all(torch.equal(served[fqn], table) for fqn, table in trainer.tables.items())
    delta_bytes = sum(delta.num_bytes for delta in deltas)
    middle = sorted(run.applied)[len(run.applied) // 2]
    tenth = max(1, len(run.losses) // 10)
    first, last = sum(run.losses[:tenth]) / tenth, sum(run.losses[-tenth:]) / tenth
    if output.is_json:
        output.json(
            {
                "url": directory.as_uri(),
                "equal": is_equal,
                "deltas": len(deltas),
                "rows": sum(d.num_rows for d in deltas),
            }
            | {"bytes": delta_bytes, "snapshot_bytes": snapshot.num_bytes, "applied_seconds_p50": middle}
            | {"batches": len(run.losses), "loss_first": first, "loss_last": last}
        )
        return 0 if is_equal else 1
    output.line(
        f"trained     {count(len(run.losses))} batches; mean log loss {first:.3f} at the start, {last:.3f} at the end"
    )
    output.line(
        f"published   a snapshot of {size(snapshot.num_bytes)}, {len(deltas)} deltas of {size(delta_bytes)} in total"
    )
    output.line(f"saved       {1 - delta_bytes / (snapshot.num_bytes * len(deltas)):.0%} compared with full snapshots")
    output.line(f"applied     {duration(middle)} after the commit (median)")
    verdict = "the predictor holds the trainer's tables, bit for bit" if is_equal else "the predictor's tables differ"
    output.line(f"verified    {verdict}", "green" if is_equal else "bold red")
    output.line("next        " + plain(f"delta-tracker inspect {directory}"))
    return 0 if is_equal else 1
