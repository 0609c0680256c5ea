"""``demo``: run a trainer and a predictor in one process on synthetic data, without torchrec or a network."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn

from delta_tracker.cli.output import Output
from delta_tracker.cli.stream_command import Number
from delta_tracker.cli.text import count, duration, size
from delta_tracker.errors import InvalidArgumentError
from delta_tracker.predictor.predictor import Predictor
from delta_tracker.publisher.publisher import Publisher
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.tracker.tracker import ModelDeltaTracker

_NUM_USERS, _NUM_ITEMS, _DIM = 100_000, 20_000, 16
_BATCH = 256
_BATCH_SECONDS = 0.02  # the rate of clicks in a small service
_APPLY_SECONDS = 30.0

_HELP = """Train a small model on synthetic clicks, publish its changes and follow with a predictor, in one process.

Writes a stream to --out and keeps it. Try the other commands on it from a second terminal, during the run or later.
The model is one of plain torch. In a checkout of the project, `make demo` runs a larger demo with MovieLens, torchrec
and two ranks.

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
    output.line(f"the stream is {directory}; in a second terminal: delta-tracker tail {directory}")
    training = _Training()
    tracker = ModelDeltaTracker(training.model)
    served = {fqn: torch.zeros_like(table) for fqn, table in training.tables.items()}
    deltas: list[Manifest] = []
    losses: list[float] = []
    applied: list[float] = []  # seconds from the commit of each delta until the predictor had applied it
    with (
        output.progress("training", seconds) as advance,
        Publisher(tracker, url) as publisher,
        Predictor(served, url, name="demo-predictor") as predictor,
    ):
        snapshot = publisher.snapshot()
        predictor.follow()
        deadline = time.monotonic() + seconds
        while not deltas or time.monotonic() < deadline:  # at least one delta, even on a slow machine
            begin = time.monotonic()
            due, is_due = min(begin + every, deadline), False
            while not is_due:  # at least one batch
                losses.append(training.step())
                tracker.step()
                time.sleep(_BATCH_SECONDS)
                is_due = time.monotonic() >= due
            deltas.append(publisher.publish())
            predictor.wait(deltas[-1].version, _APPLY_SECONDS)
            applied.append(time.time() - deltas[-1].created)
            advance(time.monotonic() - begin)
    tenth = max(1, len(losses) // 10)
    found = {
        "url": url,
        "equal": all(torch.equal(served[fqn], table) for fqn, table in training.tables.items()),
        "deltas": len(deltas),
        "rows": sum(delta.num_rows for delta in deltas),
        "bytes": sum(delta.num_bytes for delta in deltas),
        "snapshot_bytes": snapshot.num_bytes,
        "applied_seconds_p50": statistics.median_high(applied),
        "batches": len(losses),
        "loss_first": statistics.fmean(losses[:tenth]),
        "loss_last": statistics.fmean(losses[-tenth:]),
    }
    output.json(found)
    _show(output, directory, found)
    return 0 if found["equal"] else 1


class _Training:
    """Training of a matrix factorization model on random clicks. Most of the clicks involve a few users and items."""

    def __init__(self) -> None:
        self._random = torch.Generator().manual_seed(0)
        self.model = nn.ModuleDict(
            {"user": nn.Embedding(_NUM_USERS, _DIM, sparse=True), "item": nn.Embedding(_NUM_ITEMS, _DIM, sparse=True)}
        )
        self._tastes = [torch.randn(size, _DIM, generator=self._random) for size in (_NUM_USERS, _NUM_ITEMS)]
        self._tastes[0] = self._tastes[0] / 4 + 0.5  # users differ less than items do
        for table in self.model.parameters():
            nn.init.normal_(table, mean=0.2, std=0.05, generator=self._random)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=40.0)
        self.tables = {name.removesuffix(".weight"): table.detach() for name, table in self.model.named_parameters()}

    def step(self) -> float:
        rows = [self._draw(len(table)) for table in self.tables.values()]
        users, items = (tastes[ids] for tastes, ids in zip(self._tastes, rows, strict=True))
        clicks = torch.bernoulli((users * items).sum(1).sigmoid(), generator=self._random)
        user, item = (module(ids) for module, ids in zip(self.model.values(), rows, strict=True))
        loss = nn.functional.binary_cross_entropy_with_logits((user * item).sum(1), clicks)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return loss.item()

    def _draw(self, num_rows: int) -> Tensor:
        return (torch.rand(_BATCH, generator=self._random).pow(4) * num_rows).long()


def _show(output: Output, directory: Path, found: dict[str, Any]) -> None:
    delta_bytes, snapshot_bytes = found["bytes"], found["snapshot_bytes"]
    first, last = found["loss_first"], found["loss_last"]
    output.line(
        f"trained     {count(found['batches'])} batches; mean log loss {first:.3f} at the start, {last:.3f} at the end"
    )
    num_deltas = found["deltas"]
    output.line(
        f"published   a snapshot of {size(snapshot_bytes)}, {num_deltas} deltas of {size(delta_bytes)} in total"
    )
    output.line(f"saved       {1 - delta_bytes / (snapshot_bytes * num_deltas):.0%} compared with full snapshots")
    output.line(f"applied     {duration(found['applied_seconds_p50'])} after the commit (median)")
    is_equal = found["equal"]
    verdict = "the predictor holds the trainer's tables, bit for bit" if is_equal else "the predictor's tables differ"
    output.line(f"verified    {verdict}", "green" if is_equal else "bold red")
    output.line(f"next        delta-tracker inspect {directory}")
